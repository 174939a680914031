"""Draws the page again when the reader, or the reader's system, switches between light and dark."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import streamlit as st


def is_dark() -> bool:
    """Whether the page is shown in the dark theme."""
    return st.context.theme.type == "dark"


def watch_theme() -> None:
    """Let the browser ask for the page again when its theme is no longer the one that charts are drawn in."""
    _component()(data={"dark": is_dark()}, key="theme-watch", height=1, on_dark_change=lambda: None)


@functools.cache
def _component() -> Any:
    # Made on first use: components are registered with the running server.
    script = files("driftlens_app").joinpath("theme_watch.js").read_text(encoding="utf-8")
    return st.components.v2.component("driftlens.theme_watch", html="<i></i>", js=script)
