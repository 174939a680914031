"""Axes and hover texts that charts share: titles with the schema's units, the layer axis."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.records.schema import TABLES
from driftlens_reports.charts.picking import ChartOptions
from driftlens_reports.charts.theme import TICK_NUMBER
from driftlens_reports.charts.words import literal

_UNITS = {"feature": "feature units", "score": "score units", "1": "ratio"}
"""What a reader sees of the schema's units; others stand as they are."""
_MOST_TICKS = 8
_TITLE_AND_TICKS, _LETTER, _COLOUR_BAR = 36, 6, 100
"""Pixels: what an axis of names takes besides its names, a letter of them, a colour bar with title and numbers."""


def titled(label: str, table: str, column: str) -> str:
    """An axis title: the label, and in brackets the unit that the schema gives the column."""
    unit = TABLES[table].column(column).unit
    return f"{label} ({_UNITS.get(unit, unit)})"


def layer_title(run: DriftRun) -> str:
    """The title of the layer axis, which says where the stem and the head are."""
    return f"layer (index: 1 stem, {last_layer(run)} head)"


def last_layer(run: DriftRun) -> int:
    """Index of the head."""
    return max((layer.index for layer in run.manifest.layers), default=1)


def layer_axis(run: DriftRun) -> dict[str, Any]:
    """Settings of an axis of layers: from the stem to the head whatever is drawn, both always labelled."""
    last = last_layer(run)
    step = -(-last // _MOST_TICKS)
    ticks = [layer for layer in range(1, last, step) if last - layer >= step]
    return {"autorangeoptions": whole(0.5, last + 0.5), "tickvals": [*ticks, last]}


def whole(low: float, high: float) -> dict[str, Any]:
    """Settings by which an axis runs from `low` to `high` until a reader zooms.

    A fixed range would do, but plotly then gives up on the other axis where panels share both.
    """
    return {"include": [low, high], "clipmin": low, "clipmax": high}


def room_beside(names: Sequence[str]) -> dict[str, int]:
    """Margins, in pixels, for a y axis with these names on the left and a colour bar on the right.

    They are roughly right: plotly widens a margin that is too narrow, but then draws the whole figure again.
    """
    longest = max((len(html.unescape(name)) for name in names), default=0)
    return {"l": _TITLE_AND_TICKS + _LETTER * longest, "r": _COLOUR_BAR}


def layer_places(rows: pd.DataFrame) -> list[str]:
    """Hover text for each row of a layer table: index, role, module path."""
    return [
        f"layer {layer}: {literal(str(role))}, {literal(str(path))}"
        for layer, role, path in zip(rows["layer"], rows["role"], rows["path"], strict=True)
    ]


def value_axis(options: ChartOptions, *, zero: bool = True, include: Sequence[float] = ()) -> dict[str, Any]:
    """Settings of an axis of values, logarithmic if the options say so.

    Args:
        options: what the reader chose.
        zero: whether a linear axis begins at zero.
        include: values that are always on it, such as the one that a line marks.
    """
    return {
        "type": "log" if options.log else "linear",
        "rangemode": "tozero" if zero and not options.log else "normal",
        "tickformat": TICK_NUMBER,
        "autorangeoptions": {"include": list(include)} if include else None,
    }
