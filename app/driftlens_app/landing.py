"""What a visitor without a run sees, and where one who waited for a run lands: on its overview, once it is there.

Who went elsewhere meanwhile stays there.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from driftlens.errors import RunError
from driftlens.records.manifest import read_manifest
from driftlens_app.jobs import start, watch
from driftlens_app.jobs.requests import DEMO, demo_request
from driftlens_app.live import show_new_runs
from driftlens_app.pages import path_of
from driftlens_app.selection import RUN
from driftlens_app.settings import Settings, require_root
from driftlens_app.show import note, page_title, plain, shown_errors

_AWAITED, _WELCOMED = "_awaited_run", "_welcomed_on"
_WAITING_ROOMS = ("runs", "new_run")
"""Pages on which a run that is being made is watched; on any other, the visitor has turned to something else."""
_HOW_TO = """
Or measure your own models:

1. `driftlens init` writes a commented spec; fill in your base, experts and data.
2. `driftlens validate run.yaml` checks it in seconds.
3. Start it on the page **New run**, or with `driftlens analyze run.yaml --out runs/mine`.
"""


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


def welcome() -> None:
    """Draw the first visitor's page."""
    settings = Settings.from_environment()
    require_root(settings.root)
    page_title(
        "Welcome to DriftLens",
        "There is no run to look at in this folder. The demo makes one, without network.",
    )
    await_demo(settings)
    is_live = show_new_runs(settings)
    if settings.read_only:
        note("This dashboard is read-only: `driftlens demo` makes a run in a terminal.", "lock")
    else:
        st.markdown(
            "A small CLIP and eight experts are trained, merged and analysed here. "
            "This takes about four minutes the first time, one minute later."
        )
        if st.button(
            "Make the demo run", type="primary", icon=":material/play_arrow:", disabled=is_live, key="demo"
        ):
            with shown_errors():
                await_run(start(demo_request(settings)).run)
                st.rerun()
    st.markdown(_HOW_TO)
