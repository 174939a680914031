"""Colours of scatters: classes told apart by hue and symbol, drift by lightness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens_reports.charts.axes import titled
from driftlens_reports.charts.theme import TICK_NUMBER, palette, scale
from driftlens_reports.charts.words import counted, label

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LIGHT = ("#0072B2", "#D55E00", "#00805D", "#B0407F", "#6D1FD0", "#7A5C00", "#1B1B1B")
_DARK = ("#56B4E9", "#E69F00", "#2FC79A", "#E08BC0", "#B08CFF", "#F0E442", "#EDEDED")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_MOST_NAMED = 10
"""Classes that a legend can name in a few lines."""
_BAR = 24
"""Pixels that the bar of drift colours needs beyond the room of a legend."""


def class_marks(labels: pd.Series[Any], every: pd.Series[Any], *, dark: bool) -> dict[str, Any]:
    """Colour and symbol of each point by its class; points without one are quiet.

    Args:
        labels: class of each point of a panel.
        every: classes of all points of the figure, which decide what each class looks like in every panel.
        dark: which theme.
    """
    looks = _looks(every, dark)
    unknown = (palette(dark).quiet, "circle")
    marks = [unknown if pd.isna(name) else looks[name] for name in labels]
    return {
        "color": [colour for colour, _ in marks],
        "symbol": [symbol for _, symbol in marks],
        "opacity": 0.8,
    }


def class_legend(every: pd.Series[Any], *, dark: bool) -> list[go.Scatter]:
    """Legend entries that name the classes; none where there are too many to read."""
    import plotly.graph_objects as go

    looks = _looks(every, dark)
    if len(looks) > _MOST_NAMED:
        return []
    return [
        go.Scatter(
            x=[None],
            y=[None],
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 7},
            name=label(str(name)),
        )
        for name, (colour, symbol) in looks.items()
    ]


def class_notes(every: pd.Series[Any]) -> list[str]:
    """What a reader must know of the colours, where the legend can't name the classes."""
    count = every.nunique()
    if count == 0:
        return ["The samples have no labels, so that classes have no colours."]
    if count <= _MOST_NAMED:
        return []
    return [f"{counted(count, 'class', 'classes')}, told apart by colour and symbol; hovering names them."]


def _looks(every: pd.Series[Any], dark: bool) -> dict[Any, tuple[str, str]]:
    colours = _DARK if dark else _LIGHT
    # After every round of colours the next symbol: 56 classes look different.
    return {
        name: (colours[at % len(colours)], _SYMBOLS[at // len(colours) % len(_SYMBOLS)])
        for at, name in enumerate(sorted(every.dropna().unique()))
    }


def add_drift_bar(figure: go.Figure, drifts: pd.Series[Any], *, dark: bool) -> None:
    """Give `figure` one colour scale of drift for all panels, from zero to the largest one, and its bar above them."""
    bar = {
        "title": {"text": titled("drift", "samples", "drift_l2"), "side": "bottom"},
        "tickformat": TICK_NUMBER,
        "thickness": 10,
        "outlinewidth": 0,
        # Above the panels, for beside them it takes their room in a narrow window; and there in pixels of the figure,
        # for in the panels' units it pushes them onto the lines below them.
        **{"orientation": "h", "x": 0.5, "xpad": 0, "yref": "container", "y": 1, "yanchor": "top"},
    }
    # The first colours are nearly the background's: points would vanish.
    axis = {
        "cmin": 0,
        "cmax": float(drifts.max()) or 1.0,
        "colorscale": scale(palette(dark).sequential[2:]),
        "colorbar": bar,
    }
    layout = figure.layout
    figure.update_layout(coloraxis=axis, height=layout.height + _BAR, margin_t=layout.margin.t + _BAR)
