"""Small components of our own, for what Streamlit has no element for: a script of this package each."""

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
