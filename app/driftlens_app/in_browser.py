"""What the browser does by itself, for what Streamlit has no element for: a script of this package each."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import streamlit as st


@functools.cache
def component(name: str, html: str, css: str | None = None) -> Any:
    """The component with the script `name`.js of this package, to be mounted by calling it.

    It is made on first use, since components are registered with the running server.
    """
    script = files("driftlens_app").joinpath(f"{name}.js").read_text(encoding="utf-8")
    return st.components.v2.component(f"driftlens.{name}", html=html, css=css, js=script)


def is_dark() -> bool:
    """Whether the page is shown in the dark theme."""
    return st.context.theme.type == "dark"


def watch_theme() -> None:
    """Let the browser ask for the page again when its theme is no longer the one that charts are drawn in."""
    watch = component("theme_watch", "<i></i>")
    watch(data={"dark": is_dark()}, key="theme-watch", height=1, on_dark_change=lambda: None)
