"""What a visitor without a run sees: one button that makes the demo run."""

from __future__ import annotations

import streamlit as st

from driftlens_app.inside import require_root
from driftlens_app.jobs import start
from driftlens_app.jobs.requests import demo_request
from driftlens_app.landing import await_demo, await_run
from driftlens_app.live import show_new_runs
from driftlens_app.settings import Settings
from driftlens_app.show import page_title
from driftlens_app.trouble import shown_errors

_HOW_TO = """
Or measure your own models:

1. `driftlens init` writes a commented spec; fill in your base, experts and data.
2. `driftlens validate run.yaml` checks it in seconds.
3. Start it on the page **New run**, or with `driftlens analyze run.yaml --out runs/mine`.
"""


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
        st.info(
            "This dashboard is read-only: `driftlens demo` makes a run in a terminal.",
            icon=":material/lock:",
        )
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
