"""The marks that charts draw with: bars, points, cells, whiskers and hatches. The first of them imports plotly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import pandas as pd

from driftlens_reports.charts.theme import SMALL, Look, palette
from driftlens_reports.charts.words import label, literal

Trace: TypeAlias = Any
"""A trace of plotly's, which has no types of its own."""


def bar(**settings: Any) -> Trace:
    """Bars; settings as plotly names them."""
    import plotly.graph_objects as go

    return go.Bar(**settings)


def scatter(**settings: Any) -> Trace:
    """Points or lines; settings as plotly names them."""
    import plotly.graph_objects as go

    return go.Scatter(**settings)


def cells(values: Any, layers: Sequence[int], **settings: Any) -> Trace:
    """Coloured cells, layers across and rows down from 0; further settings as plotly names them."""
    import plotly.graph_objects as go

    rows = list(range(len(values)))
    return go.Heatmap(x=layers, y=rows, z=values, xgap=1, ygap=1, hoverongaps=False, **settings)


def named(variant: str, shown: str, *, legend: bool) -> dict[str, Any]:
    """Settings of a trace that the legend names here or elsewhere, and hides with the others of its variant."""
    return {"name": shown, "legendgroup": variant, "showlegend": legend}


def gapped(values: Iterable[Any]) -> list[Any]:
    """The values with None for what was not measured: a line breaks there, and a bar is left out."""
    return [None if pd.isna(value) else value for value in values]


def whiskers(
    values: pd.Series[Any], low: pd.Series[Any], high: pd.Series[Any], colour: str, **look: Any
) -> dict[str, Any]:
    """Whiskers from `low` to `high` around the values; none where an end was not measured.

    A whisker of no length would claim certainty.
    """
    up, down = high.astype(float) - values, values - low.astype(float)
    return {"array": gapped(up), "arrayminus": gapped(down), "color": colour, **look}


def hatched(style: Look, *, size: int = 6) -> dict[str, Any]:
    """How a variant's bars are filled: its colour, and the hatch that tells it from others without colour."""
    pattern = {"shape": style.hatch, "fillmode": "overlay", "size": size, "solidity": 0.25}
    return {"color": style.colour, "pattern": pattern}


def colour_bar(**settings: Any) -> dict[str, Any]:
    """A bar that says what colours stand for, beside the panels."""
    return {"thickness": 14, "outlinewidth": 0, **settings}


def category_axis(names: Sequence[str]) -> dict[str, Any]:
    """Settings of an axis of names, in their order, long ones cut."""
    shown = [literal(name) for name in names]
    return {
        **{"type": "category", "categoryorder": "array", "categoryarray": shown},
        **{"tickvals": shown, "ticktext": [label(name) for name in names], "showgrid": False},
    }


def cell_rows(names: Sequence[str], title: str) -> dict[str, Any]:
    """Settings of the y axis of cells: a name per row, the first one on top."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [label(name) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "title_text": title,
    }


def ink(*, dark: bool, size: int = SMALL) -> dict[str, Any]:
    """The font of words inside a figure."""
    return {"size": size, "color": palette(dark).ink}
