"""Where a visitor lands who waited for a run: on its overview, once it is there; who went elsewhere stays there."""

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
from driftlens_app.texts import plain

_AWAITED, _WELCOMED = "_awaited_run", "_welcomed_on"
_WAITING_ROOMS = ("runs", "new_run")
"""Pages on which a run that is being made is watched; on any other, the visitor has turned to something else."""


def await_run(run: Path) -> None:
    """Remember that this visitor waits for the run in the folder `run`."""
    st.session_state[_AWAITED] = run


def await_demo(settings: Settings) -> None:
    """Let a visitor who finds the demo run being made wait for it: a reload, a second tab, another server's start."""
    view = watch(settings.root / DEMO, "demo")
    if view is not None and view.is_live:
        await_run(view.job.run)


def wait_on(page: str) -> None:
    """Note that the page of this path shows the welcome now, on which a visitor waits as on Runs."""
    st.session_state[_WELCOMED] = page


def land(page: str) -> None:
    """Once the job of the run that this visitor waited for is done: switch to the run's overview, or say so.

    Args:
        page: path of the page that is open; it is left only where one waits for runs.
    """
    waits = st.session_state.pop(_WELCOMED, None) == page or page in map(path_of, _WAITING_ROOMS)
    run = st.session_state.get(_AWAITED)
    view = None if run is None else watch(run)
    if view is None or view.is_live:
        return
    del st.session_state[_AWAITED]
    if view.state != "done":
        return
    try:
        made = read_manifest(run)
    except RunError:
        return
    if waits:
        st.switch_page(path_of("overview"), query_params={RUN: made.id})
    # A switch would swallow what was clicked here, perhaps the start of another job.
    st.toast(f"The run {plain(made.name)} is finished.", icon=":material/check_circle:")
