"""What every page shows in the same way: titles, charts with the numbers behind them, tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from driftlens.records.run import DriftRun
from driftlens_app.drawn_once import drawn_once
from driftlens_app.runs import Stamp, stamp
from driftlens_app.texts import plain
from driftlens_app.trouble import shown_errors
from driftlens_reports.charts.chart import ChartOptions, Drawn, charts

_SELECTING = {"displaylogo": False}
_LOOKING = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
"""Plotly's toolbar, with and without the tools that select points."""


def page_title(title: str, subtitle: str = "") -> None:
    """The heading of a page, and one line in Markdown that says what it shows."""
    st.title(title, anchor=False)
    if subtitle:
        st.caption(subtitle)


def show_chart(name: str, run: DriftRun, options: ChartOptions, **plotly: Any) -> Any:
    """Draw the chart `name` with its caption, reading hint and the plotted numbers; returns what Streamlit does.

    Where the run lacks what the chart shows, its place says what is missing and which command adds it. An error
    stays within the chart's place.

    Args:
        name: in `driftlens_reports.charts`.
        run: the run.
        options: what the reader chose; `selection().options(...)` makes them.
        plotly: further arguments of `st.plotly_chart`, such as `on_select`.
    """
    with shown_errors():
        chart = charts[name]
        st.subheader(plain(chart.title), anchor=False, help=chart.hint)
        lacking = chart.missing(run, options)
        if lacking is not None:
            st.info(plain(lacking), icon=":material/info:")
            return None
        drawn = _drawn(name, run.id, stamp(run.path), options, "on_select" in plotly, run)
        return show_drawn(name, run.id, drawn, chart.caption, **plotly)
    return None


def show_drawn(name: str, run_id: str, drawn: Drawn, caption: str = "", **plotly: Any) -> Any:
    """Draw a figure with its caption, notes and the plotted numbers; returns what Streamlit does.

    Args:
        name: unique on the page, and part of the name of the file with the numbers.
        run_id: the other part.
        drawn: the figure; as `drawn_once` makes it from here on.
        caption: a sentence that says what is plotted.
        plotly: further arguments of `st.plotly_chart`, such as `on_select`.
    """
    settings = {"key": f"chart-{name}", "config": _SELECTING if "on_select" in plotly else _LOOKING, **plotly}
    result = st.plotly_chart(drawn_once(drawn.figure), theme=None, alt=drawn.alt, **settings)
    words = [text for text in (caption, *drawn.notes) if text]
    if words:
        st.caption(" ".join(plain(text) for text in words))
    show_data(drawn.data, f"{run_id}-{name}", key=f"data-{name}")
    return result


def show_data(rows: pd.DataFrame, name: str, *, key: str, label: str = "Show data") -> None:
    """A table, and a button that downloads it as CSV at full precision, both folded away behind `label`.

    They are sent to the browser once that is opened.
    """
    drawer = st.expander(label, key=f"open-{key}", on_change="rerun")
    if not drawer.open:
        return
    with drawer:
        st.dataframe(rows, hide_index=True, key=key, alt=f"Table of {len(rows)} rows")
        st.download_button(
            f"Download {len(rows):,} rows as CSV",
            data=lambda: _csv(rows),
            file_name=f"{name}.csv",
            mime="text/csv",
            key=f"{key}-csv",
            on_click="ignore",
            icon=":material/download:",
        )


@st.cache_resource(max_entries=64, show_spinner="Drawing")
def _drawn(
    name: str, run_id: str, run_stamp: Stamp, options: ChartOptions, selecting: bool, _run: DriftRun
) -> Drawn:
    """The chart, shared by all readers: nobody changes it, and a copy would take longer than most of a page."""
    drawn = charts[name].draw(_run, options)
    drawn_once(drawn.figure, selecting=selecting)
    return drawn


def _csv(rows: pd.DataFrame) -> bytes:
    """CSV that a spreadsheet shows but does not execute: text that looks like a formula is quoted as text."""
    texts = rows.select_dtypes(include=["object", "string"]).columns
    safe = rows.assign(**{column: rows[column].map(_harmless) for column in texts})
    return safe.to_csv(index=False).encode()


def _harmless(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
