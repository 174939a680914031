"""Compare: two runs, or two models of one run, with what changes from one to the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from driftlens.results.compare import Comparison, compare, comparison_table
from driftlens.results.verdict import shown_repair
from driftlens.runs.manifest import COMPARISON, MERGES
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError
from driftlens.utils.variants import display_name
from driftlens_app.job_panel import show_repair_link
from driftlens_app.job_requests import merge_comparisons
from driftlens_app.run_cache import open_cached_run, readable_runs, run_cache_key
from driftlens_app.selection import TASK, Selection, current_selection
from driftlens_app.settings import Settings, is_file_inside
from driftlens_app.show import (
    escape_markdown,
    is_dark,
    is_narrow,
    show_caption,
    show_data_expander,
    show_drawn_chart,
    show_errors_in_place,
    show_note,
    show_report_table,
)
from driftlens_reports.charts.layer_curves import draw_drift_change
from driftlens_reports.charts.panels import stack_panels
from driftlens_reports.merges import draw_merge_ranking, merge_ranking_table, read_merge_ranking

_SAYS = "Change from one model to another by layer; negative is better."
_SAME = "this run"


def show() -> None:
    """Show the comparison of runs and of merges, a part of the page Repair."""
    show_caption(_SAYS)
    chosen = current_selection(TASK)
    _show_changes(chosen)
    with show_errors_in_place():
        show_merge_ranking(Settings.from_environment(), chosen.run)


def _show_changes(chosen: Selection) -> None:
    whole = _select_comparison(chosen)
    if whole is None:
        return
    comparison = comparison_of_task(whole, chosen.task)
    if comparison.mismatches:
        differing = "; ".join(escape_markdown(text) for text in comparison.mismatches)
        st.warning(
            f"These runs differ in {differing}. Only what both have is compared.",
            icon=":material/warning:",
        )
    for remark in comparison.notes:
        show_caption(remark)
    names = f"{comparison.before.id}-{comparison.after.id}"
    st.header("Change by layer", anchor=False)
    with stack_panels(is_narrow()):
        drawn = draw_drift_change(comparison, dark=is_dark())
    show_drawn_chart("change", names, drawn)
    # With the column of samples, the table would be wider than a window.
    show_report_table(comparison_table(comparison.tasks), {"samples"})
    show_data_expander(comparison.tasks, f"{names}-tasks", key="data-tasks")


def _select_comparison(chosen: Selection) -> Comparison | None:
    run, others = chosen.run, readable_runs(Settings.from_environment())
    others.pop(chosen.name, None)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        other = st.selectbox("With", [_SAME, *others], key="with", bind="query-params", width=300)
        second = run if other == _SAME else open_cached_run(others[other].path)
        pair = _select_variant_pair(run, second)
    if pair is None:
        show_note("Nothing to compare. Calibrate the run, or choose another one.")
        show_repair_link()
        return None
    return _cached_comparison(run, second, *pair)


def _select_variant_pair(first: DriftRun, second: DriftRun) -> tuple[str, str] | None:
    """Show controls for two variants and return the pair; None if the runs have fewer than two."""
    within = first is second
    if not first.variants or not second.variants or (within and len(first.variants) < 2):
        return None
    # The merged model comes first, since repairs are compared with it most often.
    starts = sorted(first.variants, key=lambda name: name != "merged")
    before = st.selectbox("Before", starts, format_func=display_name, key="before", bind="query-params", width=220)
    ends = [name for name in second.variants if not (within and name == before)]
    first_choice = [shown_repair(first)] if within else [before]
    ends = sorted(ends, key=lambda name: name not in first_choice)
    after = st.selectbox("After", ends, format_func=display_name, key="after", bind="query-params", width=220)
    return before, after


def show_merge_ranking(settings: Settings, run: DriftRun | None = None) -> None:
    """Show a ranking of merges stored in the root, or only those of a run and in its folder."""
    own = [] if run is None else [run.path / MERGES]
    rankings: dict[str, Any] = {}
    for folder in (*own, *(settings.root / name for name in merge_comparisons(settings.root))):
        if is_file_inside(folder / COMPARISON):
            with show_errors_in_place():
                ranking = read_merge_ranking(folder)
                name = folder.relative_to(settings.root).as_posix()
                rankings |= {name: ranking} if run is None or folder in own or ranking["name"] == run.name else {}
    if not rankings:
        return
    st.header("Compared merges", anchor=False)
    chosen = next(iter(rankings))
    if len(rankings) > 1:
        chosen = st.selectbox("Comparison", [*rankings], label_visibility="collapsed", key="comparison")
    show_drawn_chart("merges", chosen, draw_merge_ranking(rankings[chosen], dark=is_dark()))
    show_report_table(merge_ranking_table(rankings[chosen]))


# Shared and not copied, since comparisons are never changed and a copy would include both runs.
@st.cache_resource(max_entries=4, show_spinner="Comparing", hash_funcs={DriftRun: run_cache_key})
def _cached_comparison(first: DriftRun, second: DriftRun, before: str, after: str) -> Comparison:
    other = None if second is first else second
    return compare(first, other, before=before, after=after, allow_mismatch=True)


def comparison_of_task(comparison: Comparison, task: str | None) -> Comparison:
    """Return the comparison restricted to one task, which both runs must have; None for all tasks."""
    if task is None:
        return comparison
    tables = {name: getattr(comparison, name) for name in ("layers", "tasks")}
    tables = {name: rows[rows["task"] == task] if len(rows) else rows for name, rows in tables.items()}
    if tables["tasks"].empty:
        raise DataError(f"only one of the runs has the task {task!r}", hint="Choose another task.")
    return replace(comparison, **tables)
