"""Where a visitor lands who waited for a run: on its overview, once it is there."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from driftlens.errors import RunError
from driftlens.records.manifest import read_manifest
from driftlens_app.jobs import watch
from driftlens_app.jobs.requests import DEMO
from driftlens_app.pages import path_of
from driftlens_app.selection import RUN
from driftlens_app.settings import Settings

_AWAITED = "_awaited_run"


def await_run(run: Path) -> None:
    """Remember that this visitor waits for the run in the folder `run`."""
    st.session_state[_AWAITED] = run


def await_demo(settings: Settings) -> None:
    """Let a visitor who finds the demo run being made wait for it: a reload, a second tab, another server's start."""
    view = watch(settings.root / DEMO, "demo")
    if view is not None and view.is_live:
        await_run(view.job.run)


def land() -> None:
    """Switch to the overview of the run that this visitor waited for, if its job is done; else do nothing."""
    run = st.session_state.get(_AWAITED)
    view = None if run is None else watch(run)
    if view is None or view.is_live:
        return
    del st.session_state[_AWAITED]
    if view.state != "done":
        return
    try:
        run_id = read_manifest(run).id
    except RunError:
        return
    st.switch_page(path_of("overview"), query_params={RUN: run_id})
