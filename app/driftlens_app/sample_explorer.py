"""Samples on a page: the explorer, which works without the server, and pictures for tables."""

from __future__ import annotations

import hashlib
import time
from typing import Literal
from urllib.parse import parse_qsl

import streamlit as st

from driftlens.runs.manifest import texts_file, thumbs_file
from driftlens.runs.run import DriftRun
from driftlens_app.run_cache import run_cache_key
from driftlens_app.selection import TASK, current_selection, open_page, select_value
from driftlens_app.settings import require_inside
from driftlens_app.show import is_dark, script_component, show_errors_in_place
from driftlens_reports.explorer import Explorer

_FRAME = "iframe { display: block; width: 100%; border: 0; }"
# Initial height of each part in pixels, until its frame reports its own.
_HEIGHTS = {"": 1000, "wall": 700}
_REQUESTED, _BROUGHT = "_explore", "_explorer_page"


def open_explorer(state: str) -> None:
    """Open the page Samples with a state of the sample explorer, given as in the URL fragment."""
    # The time makes the same state requested twice two requests.
    st.session_state[_REQUESTED] = (time.time_ns(), state)
    task = dict(parse_qsl(state)).get(TASK)
    open_page("samples", **({TASK: task} if task else {}))


def show_explorer(run: DriftRun, part: Literal["", "wall"] = "", state: str = "") -> None:
    """Show the sample explorer, or a part of it, in a sandboxed iframe.

    Args:
        run: the run.
        part: the part to show; empty for the whole page.
        state: initial state, as after the # of the page's URL.
    """
    # The page embeds these files, so a link to a file elsewhere would disclose it.
    for task in run.tasks:
        for file in (thumbs_file(task), texts_file(task)):
            require_inside(run.path / file)
    with show_errors_in_place():
        requested, requested_state = st.session_state.get(_REQUESTED, (0, "")) if part == "" else (0, "")
        name, page = _cached_explorer_page(run)
        data = {
            "page": name,
            "run": run.id,
            "show": part,
            "dark": is_dark(),
            "task": current_selection().task,
            "asked": requested,
            "state": requested_state or state,
            "height": _HEIGHTS[part],
            "title": "Samples across models",
        }
        embedded, bring = (
            script_component("explorer", "<div></div>", _FRAME),
            script_component("explorer_page", "<i></i>"),
        )
        with st.container(gap=None):
            # Megabytes, so only once: the browser keeps the last page that it got, for both parts. As bytes, since
            # Streamlit would encode text as JSON twice.
            needed = b"" if st.session_state.get(_BROUGHT) == name else page
            st.session_state[_BROUGHT] = name
            bring(
                data=f"{name}\n".encode() + needed,
                key=f"explorer-page-{part}",
                height=1,
                on_lacking_change=lambda: st.session_state.pop(_BROUGHT, None),
            )
            embedded(data=data, key=f"explorer-{part}", on_task_change=_select_explorer_task)


def _select_explorer_task() -> None:
    """Select on all pages the task that the user chose in the explorer."""
    task = st.session_state["explorer-"].get("task")
    if task:
        select_value(TASK, str(task))


def show_explorer_download(run: DriftRun) -> None:
    """Show a button that downloads the sample explorer as an HTML page."""
    st.download_button(
        "Download this page",
        lambda: Explorer(run).page,
        f"{run.id}.html",
        "text/html",
        icon=":material/download:",
        on_click="ignore",
    )


# Shared and not copied: pages are megabytes, and nothing changes them.
@st.cache_resource(max_entries=8, show_spinner="Arranging samples", hash_funcs={DriftRun: run_cache_key})
def _cached_explorer_page(run: DriftRun) -> tuple[str, bytes]:
    """Return the hash and the bytes of the explorer's HTML page."""
    page = Explorer(run).embedded_page()
    return hashlib.sha256(page).hexdigest(), page
