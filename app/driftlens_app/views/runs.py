"""Runs: every run in the folder, and the way to the first one."""

from __future__ import annotations

import math

import pandas as pd
import streamlit as st
from streamlit.column_config import NumberColumn, TextColumn

from driftlens.records.listing import RunSummary
from driftlens.records.reading import size
from driftlens_app.jobs.requests import DEMO
from driftlens_app.jobs.watching import is_at_work
from driftlens_app.live import await_demo, show_new_runs, welcome
from driftlens_app.pages import Page, path_of
from driftlens_app.runs import listed_runs
from driftlens_app.selection import RUN
from driftlens_app.settings import Settings
from driftlens_app.show import note, page_title, plain, show_table, when

PAGE = Page("Runs", icon=":material/folder_open:", order=10, section="Start", needs_run=False)


def show() -> None:
    """Draw the page."""
    settings = Settings.from_environment()
    # A run that is just being made has no manifest in its first moments; its job says more than an error would.
    found = [run for run in listed_runs(settings) if not (run.problem and is_at_work(run.path))]
    if not found:
        welcome()
        return
    if [run.path for run in found] == [settings.root / DEMO]:
        await_demo(settings)  # its tables come before its end: there is nothing else to look at yet
    page_title("Runs", f"In {plain(settings.root)}. Select a row to open its overview.")
    show_new_runs(settings)
    wanted = st.text_input(
        "Filter", placeholder="part of a name, task or variant", key="filter", bind="query-params"
    )
    shown = sorted((run for run in found if _matches(run, wanted)), key=lambda run: run.created, reverse=True)
    if not shown:
        note("No run matches the filter.", "filter_alt")
        return
    _table(shown)
    for run in shown:
        if run.problem:
            reason = f"**{plain(run.path.name)}** can't be read: {plain(run.problem)}"
            st.warning("\n\n".join(filter(None, (reason, plain(run.hint)))), icon=":material/warning:")
        for text in run.left:
            note(f"**{plain(run.path.name)}**: {plain(text)}", "pending")


def _table(runs: list[RunSummary]) -> None:
    rows = pd.DataFrame([_row(run) for run in runs])
    columns = {
        "drift": NumberColumn("largest final drift", format="%.4g", help="Merged model, L2."),
        "worst task": TextColumn(help="The task with the largest final drift."),
    }
    selecting = {"on_select": "rerun", "selection_mode": "single-row"}
    chosen = show_table(rows, columns, key="runs-table", alt=f"Table of {len(rows)} runs", **selecting)
    for position in chosen["selection"]["rows"]:
        if not runs[position].problem:
            st.switch_page(path_of("overview"), query_params={RUN: runs[position].id})


def _row(run: RunSummary) -> dict[str, object]:
    worst = max(run.final_drift, key=lambda task: run.final_drift[task], default="")
    return {
        "name": run.name,
        "state": run.state,
        "created": when(run.created),
        "tasks": len(run.tasks) or None,
        "drift": run.final_drift.get(worst, math.nan),
        "worst task": worst,
        "size": size(run.bytes) if run.bytes else "",
        "variants": ", ".join(run.variants),
        "id": run.id,
    }


def _matches(run: RunSummary, wanted: str) -> bool:
    texts = (run.name, run.id, run.path.name, *run.tasks, *run.variants)
    return all(any(word in text.casefold() for text in texts) for word in wanted.casefold().split())


if __name__ == "__main__":
    show()
