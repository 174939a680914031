"""Compare: two runs, or two models of one run, with what changes from one to the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.column_config import NumberColumn, TextColumn

from driftlens.base.errors import DataError
from driftlens.base.metrics import metric_called, title_of
from driftlens.base.variants import part_of, title
from driftlens.findings.compare import Comparison, compare
from driftlens.findings.reading import is_measured, percent_interval, points_interval, signed
from driftlens.runs.run import DriftRun
from driftlens_app.jobs.requests import comparisons
from driftlens_app.pages import path_of
from driftlens_app.runs import folder_of, key_of, opened, run_ids
from driftlens_app.selection import TASK, Selection, selection
from driftlens_app.settings import Settings
from driftlens_app.show import (
    caption,
    drawn_once,
    is_dark,
    is_narrow,
    note,
    plain,
    show_data,
    show_drawn,
    show_sheet,
    show_table,
    shown_errors,
)
from driftlens_reports.charts.chart import Drawn
from driftlens_reports.charts.page_curves import change_curves
from driftlens_reports.charts.panels import one_column
from driftlens_reports.merges import draw_merges, merges_sheet, read_merges

_SAYS = "What changes from one model to another, over all layers: a negative change is an improvement."
_SAME = "this run"
_COLUMNS: dict[str, Any] = {
    "drift_before": NumberColumn("L2 drift before", format="%.3g"),
    "drift_after": NumberColumn("after", format="%.3g"),
    "drift_relative": NumberColumn("change", format="%+.1f %%"),
    "drift_interval": TextColumn(
        "95 % interval ", help="Of the change of drift; paired where both measured the same samples."
    ),
    "cos_before": NumberColumn("cosine before", format="%.3f"),
    "cos_change": NumberColumn("change ", format="%+.3f"),
    "flips_before": NumberColumn("flips before", format="%.1f %%"),
    "flips_change": NumberColumn("points", format="%+.1f"),
    "score_before": None,
    "score_change": None,
    "interval": TextColumn(
        "95 % interval", help="Of the change of score; paired where both answered the same test samples."
    ),
}
_SHARES = ("drift_relative", "flips_before", "flips_change")
_SCORES = ("score_before", "score_change")


def show() -> None:
    """Draw this part of the page Repair."""
    caption(_SAYS)
    chosen = selection(TASK)
    _changes(chosen)
    with shown_errors():
        show_merges(Settings.from_environment(), chosen.run.name)


def _changes(chosen: Selection) -> None:
    whole = _comparison(chosen)
    if whole is None:
        return
    found = of_task(whole, chosen.task)
    if found.mismatches:
        differing = "; ".join(plain(text) for text in found.mismatches)
        st.warning(
            f"These runs differ in {differing}. Such numbers are no before and after; what both have is compared.",
            icon=":material/warning:",
        )
    for remark in found.notes:
        caption(remark)
    names = f"{found.before.id}-{found.after.id}"
    st.subheader("Change by layer", anchor=False)
    show_drawn("change", names, _curves(found, chosen.task, is_dark(), is_narrow()))
    st.subheader("Change by task", anchor=False)
    alt = "Drift, cosine, flips and score by task, before and after"
    show_table(readable(found.tasks), {**_COLUMNS, **_scored(found.tasks)}, key="changes", alt=alt)
    show_data(found.tasks, f"{names}-tasks", key="data-tasks")


def _comparison(chosen: Selection) -> Comparison | None:
    """What the reader wants compared; None where there is nothing to compare with."""
    run, settings = chosen.run, Settings.from_environment()
    others = [name for name in run_ids(settings) if name != run.id]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        other = st.selectbox("With", [_SAME, *others], key="with", bind="query-params", width=300)
        second = run if other == _SAME else opened(folder_of(settings, other))
        pair = _pair(run, second)
    if pair is None:
        note("The run has one model only. Calibrate it, or choose another run.")
        st.page_link(
            path_of("repair"),
            label="Calibrate this run",
            icon=":material/tune:",
            query_params={"repair": "Calibrate"},
        )
        return None
    return _compared(run, second, *pair)


def _pair(first: DriftRun, second: DriftRun) -> tuple[str, str] | None:
    """The variants that the reader chooses, before and after."""
    within = first is second
    if within and len(first.variants) < 2:
        return None
    if not first.variants or not second.variants:
        raise DataError("a run without models has nothing to compare", hint="Choose another one.")
    starts = sorted(first.variants, key=lambda name: name != "merged")
    before = st.selectbox("Before", starts, format_func=title, key="before", bind="query-params", width=220)
    ends = [name for name in second.variants if not (within and name == before)]
    calibrated = [name for name in reversed(ends) if part_of(name) == "calibrated"]
    first_choice = calibrated[:1] if within else [before]
    ends = sorted(ends, key=lambda name: name not in first_choice)
    after = st.selectbox("After", ends, format_func=title, key="after", bind="query-params", width=220)
    return before, after


def show_merges(settings: Settings, of: str = "") -> None:
    """A ranking of merges that was written to the root: of the runs with the name `of`, or any."""
    found: dict[str, Any] = {}
    for name in comparisons(settings.root):
        with shown_errors():
            ranking = read_merges(settings.root / name)
            found |= {name: ranking} if of in ("", ranking["name"]) else {}
    if not found:
        return
    st.subheader("Compared merges", anchor=False)
    chosen = st.selectbox("Comparison", [*found], label_visibility="collapsed", key="comparison")
    show_drawn("merges", chosen, draw_merges(found[chosen], dark=is_dark()))
    show_sheet(merges_sheet(found[chosen]))


# Shared by all readers, as runs are: nobody changes a comparison, and a copy would hold copies of both runs.
@st.cache_resource(max_entries=4, show_spinner="Comparing", hash_funcs={DriftRun: key_of})
def _compared(first: DriftRun, second: DriftRun, before: str, after: str) -> Comparison:
    other = None if second is first else second
    return compare(first, other, before=before, after=after, allow_mismatch=True)


def _pair_of(found: Comparison) -> tuple[object, ...]:
    return key_of(found.before), key_of(found.after), found.pairs


@st.cache_resource(max_entries=16, show_spinner="Drawing", hash_funcs={Comparison: _pair_of})
def _curves(found: Comparison, task: str | None, dark: bool, narrow: bool) -> Drawn:
    with one_column(narrow):
        drawn = change_curves(found, dark=dark)  # of the rows of this task
    drawn_once(drawn.figure)
    return drawn


def of_task(found: Comparison, task: str | None) -> Comparison:
    """The comparison's rows of one task, which both runs must have; None is all."""
    if task is None:
        return found
    kept = {name: getattr(found, name) for name in ("layers", "tasks")}
    kept = {name: rows[rows["task"] == task] if len(rows) else rows for name, rows in kept.items()}
    if kept["tasks"].empty:
        raise DataError(f"only one of the runs has the task {task!r}", hint="Choose another task.")
    return replace(found, **kept)


def readable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a comparison's tasks for reading: shares in percent, the intervals in words."""
    drift = (rows[f"drift_relative_ci_{end}"] for end in ("low", "high"))
    scores = (rows[f"score_ci_{end}"] for end in ("low", "high"))
    write = points_interval if _are_shares(rows) else _interval
    rows = rows.assign(drift_interval=[*map(percent_interval, *drift)], interval=[*map(write, *scores)])
    shown = rows[["task", *_COLUMNS]].copy()
    shown[[*_SHARES, *(_SCORES if _are_shares(rows) else ())]] *= 100
    return shown


def _scored(rows: pd.DataFrame) -> dict[str, Any]:
    """The columns of scores, in percent where all are shares of right answers; one of metrics where they differ."""
    of = title_of(dict.fromkeys(map(metric_called, rows["metric"])))
    formats, change = (
        (("%.1f %%", "%+.1f"), "points ") if _are_shares(rows) else (("%.3g", "%+.3g"), "change  ")
    )
    heads = (f"{of} before", change)
    return {
        name: NumberColumn(head, format=form)
        for name, head, form in zip(_SCORES, heads, formats, strict=True)
    }


def _are_shares(rows: pd.DataFrame) -> bool:
    return all(metric_called(name).kind == "share" for name in rows["metric"])


def _interval(low: float, high: float) -> str:
    return f"{signed(low)} to {signed(high)}" if is_measured(low) else ""
