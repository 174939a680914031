"""The picture of a sample beside the pointer, while that is over the sample's point in a chart."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_app.component import component
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
        picture = component("hover_picture", "<img hidden alt='' />", _STYLE)
        picture(data={"chart": chart, "pictures": there}, key=f"pictures-{chart}", height=1)
