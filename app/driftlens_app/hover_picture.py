"""The picture of a sample beside the pointer, while that is over the sample's point in a chart."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import streamlit as st

from driftlens.records.run import DriftRun
from driftlens_app.pictures import pictures

MOST_PICTURES = 512
"""Samples with a picture; each goes to the browser, a few kilobytes."""

_STYLE = """
img { position: fixed; z-index: 1000; pointer-events: none; width: 80px; height: 80px; object-fit: contain;
      border: 1px solid var(--st-border-color); background: var(--st-background-color); image-rendering: pixelated; }
img[hidden] { display: none; }
"""


def show_hover_pictures(run: DriftRun, task: str, chart: str, sample_ids: Sequence[str]) -> None:
    """Let the chart with the key `chart` show pictures; points say which sample they are in their `customdata`.

    Nothing happens where the run has no pictures of the task.

    Raises:
        RunError: the file of pictures is damaged.
    """
    ids = list(sample_ids)[:MOST_PICTURES]
    there = {name: image for name, image in zip(ids, pictures(run, task, ids), strict=True) if image}
    if there:
        _component()(data={"chart": chart, "pictures": there}, key=f"pictures-{chart}", height=1)


@functools.cache
def _component() -> Any:
    # Made on first use: components are registered with the running server.
    script = files("driftlens_app").joinpath("hover_picture.js").read_text(encoding="utf-8")
    return st.components.v2.component(
        "driftlens.hover_picture", html="<img hidden alt='' />", css=_STYLE, js=script
    )
