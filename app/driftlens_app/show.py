"""Elements that all pages share: titles, charts with data, tables, names and errors."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import pandas as pd
import streamlit as st
from plotly.graph_objects import Figure
from plotly.io import to_json
from streamlit.column_config import NumberColumn, TextColumn

from driftlens.results.formatting import (
    INTERVAL,
    Table,
    keep_units_together,
    map_code_spans,
    strip_control_chars,
    typeset_signs,
)
from driftlens.results.verdict import headline, hide_run_path
from driftlens.runs.run import DriftRun, resume_command
from driftlens.runs.schema import ANALYZE
from driftlens.runs.tables import csv_text
from driftlens.utils.errors import DataError, DriftLensError, start_sentence, wrap_library_error
from driftlens_app import views
from driftlens_app.run_cache import run_cache_key
from driftlens_reports import content
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart_names_by_heading, charts
from driftlens_reports.charts.layer_curves import draw_mean_drift
from driftlens_reports.charts.moved_samples import draw_moved_samples
from driftlens_reports.charts.panels import stack_panels
from driftlens_reports.charts.theme import deep_merge
from driftlens_reports.formats.page import standalone_headline

_LOG = logging.getLogger("driftlens_app")
# Columns of names, the length from which their width is fixed, and pixels of a letter.
_NAMED, _LONG_NAME, _LETTER = ("name", "task", "model"), 14, 8
# Rows that a table shows at once; a longer one scrolls.
_TALLEST = 30
# Characters of a caption that fit next to the sidebar.
_LINE = 140
_SENTENCES = re.compile(r"(?<=[.])\s+(?=[A-Za-z0-9`])")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&=^\"'])")
# Positions inside icon codes and URLs. Streamlit replaces these after it parsed Markdown, so escapes do not prevent it.
_MADE = re.compile(r"(?<=:)(?=material|streamlit|//)|(?<=www)(?=\.)|(?=@)", re.IGNORECASE)
_NUMBERS = {
    "count": (1, "%d"),
    "number": (1, "%.3g"),
    "share": (100, "%.1f %%"),
    "points": (100, "%+.1f"),
    "error": (1, "%.1e"),
    "signed": (1, "%+.3g"),
    "relative": (100, "%+.1f %%"),
}
"""Factor and format of each kind of number in sortable tables."""
_WATCH = "theme-watch"
_TOOLBAR = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}


@dataclass(frozen=True)
class Page:
    """A dashboard page as its file declares it: title, icon, order, and whether it needs a run."""

    title: str
    icon: str
    order: int
    is_listed: bool = True
    says: str = ""
    needs_run: bool = True


@functools.cache
def pages() -> Mapping[str, Page]:
    """Return all dashboard pages by file path relative to the app, in navigation order."""
    files = {
        f"views/{module.name}.py": importlib.import_module(f"{views.__name__}.{module.name}")
        for module in pkgutil.iter_modules(views.__path__)
    }
    # A file without `PAGE` provides a part of another page.
    declared: dict[str, Page] = {path: file.PAGE for path, file in files.items() if hasattr(file, "PAGE")}
    return dict(sorted(declared.items(), key=lambda item: item[1].order))


def page_path(view: str) -> str:
    """Return the file of a page for `st.page_link` and `st.switch_page`, for example `views/overview.py`."""
    return f"views/{view}.py"


@functools.cache
def script_component(name: str, html: str, css: str | None = None) -> Any:
    """Return the Streamlit component with the script `name`.js, created on first use.

    Args:
        name: name of the script and the component.
        html: markup that the script finds.
        css: style of the markup.
    """
    script = files("driftlens_app").joinpath(f"{name}.js").read_text(encoding="utf-8")
    return st.components.v2.component(f"driftlens.{name}", html=html, css=css, js=script)


def is_dark() -> bool:
    """Return True if the page is shown in the dark theme."""
    return st.context.theme.type == "dark"


def watch_theme() -> None:
    """Rerun the page when the browser switches theme or the window width changes."""
    watch, now = script_component("page_watch", "<i></i>"), {"dark": is_dark(), "narrow": is_narrow()}
    watch(data=now, key=_WATCH, height=1, on_dark_change=lambda: None, on_narrow_change=lambda: None)


def is_narrow() -> bool:
    """Return True if the window is too narrow for panels side by side."""
    return bool(st.session_state.get(_WATCH, {}).get("narrow"))


def escape_markdown(text: object) -> str:
    """Escape untrusted text for Markdown, on one line."""
    return _MARKDOWN.sub(r"\\\1", _MADE.sub("\N{WORD JOINER}", strip_control_chars(str(text))))


def escape_except_code(text: str) -> str:
    """Escape untrusted text for Markdown, except code between backticks."""
    return map_code_spans(text, escape_markdown, lambda part: f"`{strip_control_chars(part)}`")


def verdict_markdown(run: DriftRun, text: str, command: str) -> str:
    """Format a sentence of the verdict in Markdown, its command as code and without local folders."""
    before, code, after = typeset_signs(hide_run_path(run, text)).partition(f"`{hide_run_path(run, command)}`")
    # A name with backticks must not end the code.
    code = code if code.count("`") == 2 else escape_markdown(code)
    return keep_units_together(escape_markdown(before) + code + escape_markdown(after))


def show_headline(run: DriftRun, name: str = "") -> None:
    """Show the headline of a run or of its calibration `name`: verdict sentence, score tiles and score bar."""
    head = content.ReportHeadline.model_validate(headline(run, name))
    st.html(standalone_headline(head, dark=is_dark()))


def format_time(moment: str) -> str:
    """Format a run's UTC time to the minute; other texts are returned unchanged."""
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        return strip_control_chars(moment)
    return parsed.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


@contextmanager
def show_errors_in_place() -> Iterator[None]:
    """Show errors raised within the context in place, and keep the rest of the page."""
    try:
        yield
    except DriftLensError as error:
        _LOG.info("page shows an error", exc_info=error)
        # DataError means missing data, so its class name adds nothing for the reader.
        kind = "" if type(error) is DataError else type(error).__name__
        show_error(kind, error.message, error.hint)
    except Exception as error:
        _LOG.exception("page failed")
        # Messages of unexpected errors may quote private data; the type is enough for a bug report.
        known = wrap_library_error(error)
        show_error(type(error).__name__, *(("", "") if known is None else (known.message, known.hint)))
        st.caption(escape_except_code("See the log of `driftlens ui` for the traceback."))


def show_error(kind: str, message: str, hint: str) -> None:
    """Show an error box with message and hint.

    Args:
        kind: name of the error's class; empty to leave it out.
        message: the message, whose further lines become a list.
        hint: what the user can do.
    """
    first, *further = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    first = first if kind else start_sentence(first)
    head = ": ".join(filter(None, (f"**{escape_markdown(kind)}**" if kind else "", escape_markdown(first))))
    parts = (
        head,
        "\n".join(f"- {escape_markdown(line)}" for line in further),
        escape_markdown(" ".join(hint.split())),
    )
    st.error("\n\n".join(filter(None, parts)), icon=":material/error:")


def show_page_title(title: str, subtitle: str) -> None:
    """Show the title of a page and one line of Markdown below it."""
    st.title(title, anchor=False)
    st.caption(subtitle)


def show_caption(text: str, line: int = _LINE) -> None:
    """Show one line below an element: the first sentence, shortened; the full text on hover."""
    first, *others = _SENTENCES.split(text.strip(), maxsplit=1)
    if (cut := textwrap.shorten(first, line, placeholder=" …")) != first:
        first, others = cut, [text]
    if first:
        st.caption(escape_except_code(first), help=escape_except_code(" ".join(others)) or None)


def show_note(text: str, icon: str = "info") -> None:
    """Show a remark in an info box with a Material symbol."""
    st.info(start_sentence(text), icon=f":material/{icon}:")


def select_page_part(names: Sequence[str], *, key: str) -> str:
    """Show a switch between parts of a page and return the selected one, stored in the URL as `key`."""
    # A radio and not a segmented control, whose accent colour has too little contrast on dark pages.
    return st.radio(
        "Part of the page", names, horizontal=True, key=key, bind="query-params", label_visibility="collapsed"
    )


def show_part_charts(page: str, part: str, run: DriftRun, options: ChartOptions) -> None:
    """Show all charts registered for a heading of a page."""
    for name in chart_names_by_heading(page)[part]:
        show_chart(name, run, options)


def show_chart_expanders(names: Sequence[str], run: DriftRun, options: ChartOptions) -> None:
    """Show charts in closed expanders with their titles; each is drawn when it is opened."""
    for name in names:
        drawer = st.expander(escape_markdown(charts[name].title), key=f"section-{name}", on_change="rerun")
        if drawer.open:
            with drawer:
                show_chart(name, run, options, is_titled=False)


def show_chart(name: str, run: DriftRun, options: ChartOptions, without: str = "", *, is_titled: bool = True) -> None:
    """Show a chart with caption, hint and data, or `without` or a message if the run lacks its data.

    Args:
        name: name of the chart.
        run: the run.
        options: options of the chart.
        without: sentence that replaces the message.
        is_titled: False leaves out the title; the caption's help has the hint then.
    """
    with show_errors_in_place():
        chart, caption = charts[name], charts[name].caption
        if is_titled:
            st.header(escape_markdown(chart.title), anchor=False, help=chart.hint)
        else:
            caption = f"{caption} {chart.hint}"
        try:
            drawn = cached_chart(name, run, chart.draw, options, narrow=is_narrow())
            show_drawn_chart(name, run.id, drawn, caption)
            return
        except DataError as error:
            if not (lacking := error.context.get("lacking")):
                raise
        if without:
            show_caption(without)
        else:
            show_note(escape_except_code(insert_run_path(run, lacking)))


def show_before_after(run: DriftRun, options: ChartOptions, between: Callable[[], None] = lambda: None) -> None:
    """Show the drift curve and the scatter of samples, merged and repaired; side by side in a wide window.

    Args:
        run: the run.
        options: options of both charts.
        between: shows what comes between the charts and their notes.
    """
    pictures = {
        "mean-drift": ("Drift", draw_mean_drift, "A line below that of merged is closer to the experts."),
        "moved-samples": ("Samples", draw_moved_samples, "Each line leads to the sample's position in its expert."),
    }
    if not run.manifest.layers:
        del pictures["moved-samples"]
    width = 1 if is_narrow() else 2
    drawn = {}
    for place, (name, (title, draw, about)) in zip(st.columns(width) * 2, pictures.items(), strict=False):
        with place, show_errors_in_place():
            st.header(title, anchor=False, help=about)
            drawn[name] = cached_chart(name, run, draw, options, narrow=is_narrow())
            _show_figure(name, drawn[name])
    between()
    for place, (name, chart) in zip(st.columns(width) * 2, drawn.items(), strict=False):
        with place:
            _show_chart_notes(name, run.id, chart)


def insert_run_path(run: DriftRun, lacking: str) -> str:
    """Replace the placeholder RUN by the run's path in a message about missing data."""
    if not run.manifest.finished:
        lacking = lacking.replace(ANALYZE, resume_command(run.path, run.manifest))
    return lacking.replace(" RUN", f" {shlex.quote(str(run.path))}")


def show_drawn_chart(name: str, run_id: str, drawn: Drawn, says: str = "") -> None:
    """Show a drawn chart with caption, notes, and the plotted numbers for download as `run_id`-`name`.csv."""
    _show_figure(name, drawn)
    _show_chart_notes(name, run_id, drawn, says)


def _show_figure(name: str, drawn: Drawn) -> None:
    st.plotly_chart(without_redraw(drawn.figure), theme=None, alt=drawn.alt, key=f"chart-{name}", config=_TOOLBAR)


def _show_chart_notes(name: str, run_id: str, drawn: Drawn, says: str = "") -> None:
    show_caption(" ".join(text for text in (says, *drawn.notes) if text))
    show_data_expander(drawn.data, f"{run_id}-{name}", key=f"data-{name}")


def show_table(rows: pd.DataFrame, columns: Mapping[str, Any], *, key: str, alt: str, **more: Any) -> Any:
    """Show a data frame as a sortable table with a dash for missing values; return Streamlit's selection."""
    # Longer names would push numbers out of view, and shorter ones be cut in a table of many columns.
    widest = 128 if is_narrow() else 220
    lengths = {name: rows[name].astype(str).str.len().max() for name in _NAMED if name in rows}
    named = {
        name: TextColumn(name, width=min(widest, 20 + _LETTER * int(length)))
        for name, length in lengths.items()
        if length > _LONG_NAME
    }
    looks = {"hide_index": True, "placeholder": "–", "column_config": {**named, **columns}}
    looks["height"] = "content" if len(rows) <= _TALLEST else "auto"
    return st.dataframe(rows, key=key, alt=alt, **looks, **more)


def show_report_table(sheet: Table, folded: Collection[str] = ()) -> None:
    """Show a report table with its notes; `folded` columns are hidden until chosen in its menu."""
    rows, columns = sortable_table(sheet)
    st.header(escape_markdown(sheet.title), anchor=False)
    order = [head for head in rows if head not in folded]
    show_table(rows, columns, key=sheet.name, alt=sheet.title, column_order=order)
    # Notes about hidden columns are left out.
    notes = [text for text in _SENTENCES.split(sheet.notes()) if not text.lower().startswith(tuple(folded))]
    show_caption(" ".join(notes))


def sortable_table(sheet: Table) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Convert a report table to sortable rows and Streamlit column settings."""
    numbers, (_, *texts) = sheet.frame(), sheet.formatted_rows()
    names = [sheet.columns[shown.at[0]].name for shown in sheet.display_columns()]
    rows, columns = pd.DataFrame(texts, columns=names), dict[str, Any]()
    for head, shown in zip(names, sheet.display_columns(), strict=True):
        if len(shown.at) > 1:
            rows[head] = rows[head].map(typeset_signs)
            columns[head] = TextColumn(shown.head, width=94 if shown.head == INTERVAL else None)
        elif shown.kind in _NUMBERS:
            factor, digits = _NUMBERS[shown.kind]
            rows[head] = factor * numbers[head].astype(float)
            # Rounded here like in sentences, since browsers round halves differently.
            if factor == 100:
                rows[head] = rows[head].round(1)
            columns[head] = NumberColumn(typeset_signs(head), format=digits)
    return rows, columns


def show_data_expander(rows: pd.DataFrame, name: str, *, key: str, label: str = "Show data") -> None:
    """Show a table and its CSV download in an expander; data is sent only when it is opened."""
    drawer = st.expander(label, key=f"open-{key}", on_change="rerun")
    if not drawer.open:
        return
    with drawer:
        st.dataframe(rows, hide_index=True, key=key, alt=f"Table of {len(rows)} rows")
        st.download_button(
            f"Download {len(rows):,} rows as CSV",
            data=lambda: csv_text(rows).encode(),
            file_name=f"{name}.csv",
            mime="text/csv",
            key=f"{key}-csv",
            on_click="ignore",
            icon=":material/download:",
        )


@st.cache_resource(max_entries=64, show_spinner="Drawing", hash_funcs={DriftRun: run_cache_key})
def cached_chart(
    name: str, run: DriftRun, _draw: Callable[..., Drawn], options: ChartOptions, *, narrow: bool = False
) -> Drawn:
    """Cache the chart that `_draw(run, options)` returns, for all users."""
    # Shared and not copied: a copy would take longer than most of a page.
    with stack_panels(narrow):
        drawn = _draw(run, options)
    return replace(drawn, figure=without_redraw(drawn.figure))


def without_redraw(figure: Any) -> Any:
    """Prepare a figure so that plotly draws it once instead of twice.

    Streamlit's client passes a copy of every figure to plotly, which draws again unless nothing changed. Plotly trusts
    a revision number if data are lists, not typed arrays.
    """
    if isinstance(figure, _ValidatedFigure):
        return figure
    traces = [trace.to_plotly_json() for trace in figure.data]
    text = to_json({"data": traces, "layout": figure.layout.to_plotly_json()}, validate=False)
    settings = json.loads(text)
    layout = {**settings["layout"], "datarevision": hashlib.sha256(text.encode()).hexdigest()}
    # Plotly takes another template object for a change, so the theme's settings of axes go into the layout.
    axes = layout.get("template", {}).get("layout", {})
    if axes.keys() == {"xaxis", "yaxis"}:
        del layout["template"]
        layout = deep_merge({name: axes[name[:5]] for name in (*axes, *layout) if name[1:5] == "axis"}, layout)
    return _ValidatedFigure({"data": settings["data"], "layout": layout})


class _ValidatedFigure(Figure):  # type: ignore[misc]
    """A plotly figure with validated settings, which skips validation and copying when shown."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self._settings = settings

    def to_dict(self) -> dict[str, Any]:
        return self._settings
