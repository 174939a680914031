"""Draws the page again when the reader, or the reader's system, switches between light and dark."""

from __future__ import annotations

import streamlit as st

from driftlens_app.component import component


def is_dark() -> bool:
    """Whether the page is shown in the dark theme."""
    return st.context.theme.type == "dark"


def watch_theme() -> None:
    """Let the browser ask for the page again when its theme is no longer the one that charts are drawn in."""
    watch = component("theme_watch", "<i></i>")
    watch(data={"dark": is_dark()}, key="theme-watch", height=1, on_dark_change=lambda: None)
