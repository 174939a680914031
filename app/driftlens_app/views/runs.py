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
from driftlens.results.verdict import headline, verdict
from driftlens.runs.manifest import NOTES
from driftlens.runs.notes import write_notes
from driftlens.runs.run import DriftRun
from driftlens.utils.variants import display_name, variant_kind
from driftlens_app.job_panel import SECONDS, live_job_text, show_new_run_jobs, show_welcome_page
from driftlens_app.processes import has_live_job
from driftlens_app.run_cache import list_runs, open_cached_run
from driftlens_app.selection import open_page
from driftlens_app.settings import Settings, require_inside
from driftlens_app.show import (
    Page,
    escape_markdown,
    format_time,
    is_dark,
    is_narrow,
    show_drawn_chart,
    show_errors_in_place,
    show_note,
    show_page_title,
    show_table,
)
from driftlens_reports.charts.run_curves import draw_run_curves

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
    query = st.text_input("Filter", placeholder="name, tag, task or variant", key="filter", bind="query-params")
    shown = sorted((run for run in runs if _matches_filter(run, query)), key=lambda run: run.created, reverse=True)
    if not shown:
        show_note("No run matches the filter.", "filter_alt")
        return
    live = {run.path for run in shown if has_live_job(run.path)}
    # Only the table is redrawn every second: redrawing the page would close open dialogs.
    chosen = st.fragment(_show_runs_table, run_every=SECONDS if live else None)(shown, live)
    for position, column in chosen["cells"]:
        if column == "name" and not shown[position].problem:
            open_page("overview", run=shown[position].name)
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
    rows = rows.drop(columns=[name for name in (*_MODELS, "tags") if rows[name].isna().all()])
    shares = {name: NumberColumn(format=_PERCENT) for name in _MODELS}
    columns = {
        **shares,
        "calibrated": NumberColumn("calibration", format=_PERCENT, help="Score of the best or pinned calibration."),
        "relative drift": NumberColumn(
            "final drift",
            format=_PERCENT,
            help="Relative drift of the final feature, mean over tasks, of that calibration or the merged model.",
        ),
    }
    modes: dict[str, Any] = {
        "selection_mode": ["multi-row", "single-cell"],
        "alt": f"Table of {len(rows)} runs",
    }
    # Further columns would be cut off in most windows; the table's menu has them.
    shown = [name for name in rows if name not in ("created", "size", "id")]
    # In a narrow window, the scores come first.
    modes["column_order"] = sorted(shown, key=lambda name: is_narrow() and name in ("state", "merge", "tags"))
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
        st.caption(
            "Newest first. Click a name to open the run; tick one for tags and a note, several to compare them."
        )
        return
    is_pair = len(readable) == len(ticked) == 2
    if is_pair and st.button("Compare layer by layer", icon=":material/difference:", key="compare"):
        older, newer = sorted(readable, key=lambda run: run.created)
        open_page("repair", query={"repair": "Compare", "with": newer.name}, run=older.name)
    if len(readable) > 1:
        with show_errors_in_place():
            _show_run_comparison(readable)
    for run in readable if len(readable) == 1 else ():
        with show_errors_in_place():
            _show_notes_form(run)


def _show_run_comparison(ticked: list[RunSummary]) -> None:
    """Show the drift curves of the ticked runs in one chart, and a table of their verdicts."""
    runs = {at.name: open_cached_run(at.path) for at in ticked}
    st.header("Drift by layer", anchor=False)
    show_drawn_chart("runs", "runs", draw_run_curves(runs, dark=is_dark()))
    rows = pd.DataFrame({"name": at.name, "merge": at.merge or None, **_verdict_row(runs[at.name])} for at in ticked)
    columns: dict[str, Any] = {name: NumberColumn(format=_PERCENT) for name in rows.select_dtypes("number")}
    show_table(rows, columns, key="compared-runs", alt=f"Verdicts on {len(rows)} runs")


def _verdict_row(run: DriftRun) -> dict[str, object]:
    """Return scores, drifts and the closed gap of a run, in percent, and the name of its repair."""
    judged = verdict(run)
    layers = run.layers()
    final = layers[layers["layer"] == layers["layer"].max()].groupby("variant")["drift_rel"].mean()
    models = {"base": "base", "merged": judged.merged, "repaired": judged.after, "experts": "expert"}
    scores = {name: judged.means[variant].value for name, variant in models.items() if variant in judged.means}
    drifts = {f"drift, {name}": final.get(models[name], math.nan) for name in ("merged", "repaired")}
    numbers = {**scores, "gap closed": headline(run).closed.value, **drifts}
    repair = display_name(judged.after) if judged.after else None
    return {"repair": repair, **{name: 100 * float(value) for name, value in numbers.items()}}


def _show_notes_form(run: RunSummary) -> None:
    """Show the tags and the note of a run with a button that stores changes."""
    is_fixed = Settings.from_environment().read_only
    with st.form(f"notes-{run.id}"):
        tags = st.text_input("Tags", ", ".join(run.tags), help="Separated by commas; the filter finds them.")
        note = st.text_area("Note", run.note, height=80)
        if st.form_submit_button("Save", icon=":material/save:", disabled=is_fixed):
            require_inside(run.path / NOTES)
            write_notes(run.path, tags.split(","), note)
            st.rerun()


def _runs_table_row(run: RunSummary) -> dict[str, object]:
    scores = {
        ("calibrated" if variant_kind(name) == "calibrated" else "experts" if name == "expert" else name): value
        for name, value in run.scores.items()
    }
    return {
        "name": run.name,
        "state": live_job_text(run.path) or run.state,
        "merge": run.merge or None,
        "tags": ", ".join(run.tags) or None,
        **{name: 100 * scores.get(name, math.nan) for name in _MODELS},
        "relative drift": 100 * run.relative,
        "tasks": len(run.tasks) or None,
        "created": format_time(run.created),
        "size": format_bytes(run.bytes) if run.bytes else "",
        "id": run.id,
    }


def _matches_filter(run: RunSummary, query: str) -> bool:
    texts = (run.name, run.id, *run.tags, *run.tasks, *run.variants)
    return all(any(word in text.casefold() for text in texts) for word in query.casefold().split())


if __name__ == "__main__":
    show()
