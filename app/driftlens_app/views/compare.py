"""Compare: two runs, or two models of one run, with what changes from one to the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from driftlens.results.compare import Comparison, compare, comparison_table
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError
from driftlens.utils.variants import part_of, title
from driftlens_app.live import link_to_repair
from driftlens_app.requests import comparisons
from driftlens_app.runs import folder_of, key_of, opened, run_ids
from driftlens_app.selection import TASK, Selection, selection
from driftlens_app.settings import Settings
from driftlens_app.show import (
    caption,
    is_dark,
    is_narrow,
    note,
    plain,
    show_data,
    show_drawn,
    show_sheet,
    shown_errors,
)
from driftlens_reports.charts.layer_curves import change_curves
from driftlens_reports.charts.panels import one_column
from driftlens_reports.merges import draw_merges, merges_sheet, read_merges

_SAYS = "Change from one model to another by layer; negative is better."
_SAME = "this run"


def show() -> None:
    """Draw this part of the page Repair."""
    caption(_SAYS)
    chosen = selection(TASK)
    _show_changes(chosen)
    with shown_errors():
        show_merges(Settings.from_environment(), chosen.run.name)


def _show_changes(chosen: Selection) -> None:
    whole = _selected_comparison(chosen)
    if whole is None:
        return
    comparison = of_task(whole, chosen.task)
    if comparison.mismatches:
        differing = "; ".join(plain(text) for text in comparison.mismatches)
        st.warning(
            f"These runs differ in {differing}. Only what both have is compared.",
            icon=":material/warning:",
        )
    for remark in comparison.notes:
        caption(remark)
    names = f"{comparison.before.id}-{comparison.after.id}"
    st.header("Change by layer", anchor=False)
    with one_column(is_narrow()):
        drawn = change_curves(comparison, dark=is_dark())
    show_drawn("change", names, drawn)
    # With the column of samples, the table would be wider than a window.
    show_sheet(comparison_table(comparison.tasks), {"samples"})
    show_data(comparison.tasks, f"{names}-tasks", key="data-tasks")


def _selected_comparison(chosen: Selection) -> Comparison | None:
    run, settings = chosen.run, Settings.from_environment()
    others = [name for name in run_ids(settings) if name != run.id]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        other = st.selectbox("With", [_SAME, *others], key="with", bind="query-params", width=300)
        second = run if other == _SAME else opened(folder_of(settings, other))
        pair = _select_variant_pair(run, second)
    if pair is None:
        note("Nothing to compare. Calibrate the run, or choose another one.")
        link_to_repair()
        return None
    return _cached_comparison(run, second, *pair)


def _select_variant_pair(first: DriftRun, second: DriftRun) -> tuple[str, str] | None:
    """Show controls for two variants and return them; None if there are no two."""
    within = first is second
    if not first.variants or not second.variants or (within and len(first.variants) < 2):
        return None
    # The merged model comes first, since repairs are compared with it most often.
    starts = sorted(first.variants, key=lambda name: name != "merged")
    before = st.selectbox("Before", starts, format_func=title, key="before", bind="query-params", width=220)
    ends = [name for name in second.variants if not (within and name == before)]
    calibrated = [name for name in reversed(ends) if part_of(name) == "calibrated"]
    first_choice = calibrated[:1] if within else [before]
    ends = sorted(ends, key=lambda name: name not in first_choice)
    after = st.selectbox("After", ends, format_func=title, key="after", bind="query-params", width=220)
    return before, after


def show_merges(settings: Settings, name: str = "") -> None:
    """Show a ranking of merges in the root, optionally of the runs called `name`."""
    rankings: dict[str, Any] = {}
    for folder in comparisons(settings.root):
        with shown_errors():
            ranking = read_merges(settings.root / folder)
            rankings |= {folder: ranking} if name in ("", ranking["name"]) else {}
    if not rankings:
        return
    st.header("Compared merges", anchor=False)
    chosen = st.selectbox("Comparison", [*rankings], label_visibility="collapsed", key="comparison")
    show_drawn("merges", chosen, draw_merges(rankings[chosen], dark=is_dark()))
    show_sheet(merges_sheet(rankings[chosen]))


# Shared and not copied, since comparisons are never changed and a copy would include both runs.
@st.cache_resource(max_entries=4, show_spinner="Comparing", hash_funcs={DriftRun: key_of})
def _cached_comparison(first: DriftRun, second: DriftRun, before: str, after: str) -> Comparison:
    other = None if second is first else second
    return compare(first, other, before=before, after=after, allow_mismatch=True)


def of_task(comparison: Comparison, task: str | None) -> Comparison:
    """Return the comparison of one task, which both runs must have; None for all."""
    if task is None:
        return comparison
    tables = {name: getattr(comparison, name) for name in ("layers", "tasks")}
    tables = {name: rows[rows["task"] == task] if len(rows) else rows for name, rows in tables.items()}
    if tables["tasks"].empty:
        raise DataError(f"only one of the runs has the task {task!r}", hint="Choose another task.")
    return replace(comparison, **tables)
