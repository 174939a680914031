"""Runs: every run in the folder, and the way to the first one."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.column_config import NumberColumn

from driftlens.results.formatting import format_bytes
from driftlens.results.listing import RunSummary
from driftlens.utils.variants import variant_kind
from driftlens_app.job_panel import SECONDS, live_job_text, show_new_run_jobs, show_welcome_page
from driftlens_app.processes import has_live_job
from driftlens_app.run_cache import list_runs
from driftlens_app.selection import open_page
from driftlens_app.settings import Settings
from driftlens_app.show import (
    Page,
    escape_markdown,
    format_time,
    show_note,
    show_page_title,
    show_table,
)

PAGE = Page("Runs", icon=":material/folder_open:", order=10, needs_run=False)

_MODELS = ("base", "merged", "calibrated", "experts")
_PERCENT = "%.1f %%"
_CHOSEN = "_chosen_in_runs"


def show() -> None:
    """Draw the page Runs: all runs in the folder, and jobs that create runs."""
    settings = Settings.from_environment()
    # A new run has no manifest yet; its job is shown instead of an error.
    runs = [run for run in list_runs(settings) if not (run.problem and has_live_job(run.path))]
    if not runs:
        show_welcome_page()
        return
    show_page_title("Runs", f"In {escape_markdown(settings.root)}.")
    if st.button("New run", icon=":material/add_circle:", key="to-new-run"):
        open_page("new_run")
    show_new_run_jobs(settings)
    query = st.text_input("Filter", placeholder="name, task or variant", key="filter", bind="query-params")
    shown = sorted((run for run in runs if _matches_filter(run, query)), key=lambda run: run.created, reverse=True)
    if not shown:
        show_note("No run matches the filter.", "filter_alt")
        return
    live = {run.path for run in shown if has_live_job(run.path)}
    # Only the table is redrawn every second: redrawing the page would close open dialogs.
    chosen = st.fragment(_show_runs_table, run_every=SECONDS if live else None)(shown, live)
    for position, column in chosen["cells"]:
        if column == "name" and not shown[position].problem:
            open_page("overview", run=shown[position].id)
    _show_selection_actions([shown[position] for position in chosen["rows"]])
    for run in shown:
        _show_run_problems(run, is_live=run.path in live)


def _show_run_problems(run: RunSummary, *, is_live: bool) -> None:
    """Show why a run can't be read, and its unfinished jobs."""
    if run.problem:
        what = "can't be read" if run.state == RunSummary(run.path).state else f"is a {run.state}"
        reason = f"**{escape_markdown(run.path.name)}** {escape_markdown(what)}: {escape_markdown(run.problem)}"
        st.warning("\n\n".join(filter(None, (reason, escape_markdown(run.hint)))), icon=":material/warning:")
    for text in () if is_live else run.left:
        show_note(f"**{escape_markdown(run.path.name)}**: {escape_markdown(text)}", "pending")


def _show_runs_table(runs: list[RunSummary], live: set[Path]) -> Any:
    """Show the table of runs; rerun the page after a selection or when a live job has ended."""
    rows = pd.DataFrame(map(_runs_table_row, runs))
    is_double = rows["name"].duplicated(keep=False)
    rows["name"] = rows["name"].mask(is_double, [f"{run.name} ({run.path.name})" for run in runs])
    rows = rows.drop(columns=[name for name in _MODELS if rows[name].isna().all()])
    shares = {name: NumberColumn(format=_PERCENT) for name in _MODELS}
    columns = {
        **shares,
        "calibrated": NumberColumn("calibration", format=_PERCENT, help="Score of the best or pinned calibration."),
        "relative drift": NumberColumn(
            "its drift",
            format=_PERCENT,
            help="Relative drift of the final feature, mean over tasks, of that calibration or the merged model.",
        ),
    }
    modes: dict[str, Any] = {
        "selection_mode": ["multi-row", "single-cell"],
        "alt": f"Table of {len(rows)} runs",
    }
    # Further columns would be cut off in most windows; the table's menu has them.
    modes["column_order"] = [name for name in rows if name not in ("created", "size", "id")]
    modes["on_select"] = lambda: st.session_state.update({_CHOSEN: True})
    # Streamlit stores selected rows by position, so a table of other runs needs another key.
    key = f"runs-{hashlib.sha256(repr([run.path for run in runs]).encode()).hexdigest()[:12]}"
    chosen = show_table(rows, columns, key=key, **modes)["selection"]
    if st.session_state.pop(_CHOSEN, False) or not all(map(has_live_job, live)):
        st.rerun()
    return chosen


def _show_selection_actions(ticked: list[RunSummary]) -> None:
    readable = [run for run in ticked if not run.problem]
    if not ticked:
        st.caption("Newest first. Click a name to open the run; check two rows to compare them.")
        return
    with st.container(horizontal=True):
        if len(readable) == len(ticked) == 2 and st.button("Compare", icon=":material/difference:", key="compare"):
            older, newer = sorted(readable, key=lambda run: run.created)
            open_page("repair", query={"repair": "Compare", "with": newer.id}, run=older.id)


def _runs_table_row(run: RunSummary) -> dict[str, object]:
    scores = {
        ("calibrated" if variant_kind(name) == "calibrated" else "experts" if name == "expert" else name): value
        for name, value in run.scores.items()
    }
    return {
        "name": run.name,
        "state": live_job_text(run.path) or run.state,
        "merge": run.merge or None,
        **{name: 100 * scores.get(name, math.nan) for name in _MODELS},
        "relative drift": 100 * run.relative,
        "tasks": len(run.tasks) or None,
        "created": format_time(run.created),
        "size": format_bytes(run.bytes) if run.bytes else "",
        "id": run.id,
    }


def _matches_filter(run: RunSummary, query: str) -> bool:
    texts = (run.name, run.id, run.path.name, *run.tasks, *run.variants)
    return all(any(word in text.casefold() for text in texts) for word in query.casefold().split())


if __name__ == "__main__":
    show()
