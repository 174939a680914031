"""Curves over layers: one line per variant, a band around it, a gap wherever nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_places
from driftlens_reports.charts.theme import NUMBER, Look, faded, look
from driftlens_reports.charts.words import literal, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LONE = 0.2
"""Half the width, in layers, of a band with no neighbour."""


@dataclass(frozen=True)
class Part:
    """What one variant shows on one task.

    Attributes:
        at: place of the task among those drawn, from 0.
        rows: its rows, by layer.
        marks: how the variant is drawn.
        is_first: whether the variant was not drawn before, so that the legend names it here.
    """

    at: int
    rows: pd.DataFrame
    marks: Look
    is_first: bool


def parts(run: DriftRun, rows: pd.DataFrame, *, dark: bool) -> Iterator[Part]:
    """`rows` of the layer table by task and variant, in their order."""
    tasks = list(dict.fromkeys(rows["task"]))
    named: set[str] = set()
    for (task, variant), part in rows.groupby(["task", "variant"], sort=False):
        yield Part(tasks.index(task), part, look(run.variants, variant, dark=dark), variant not in named)
        named.add(variant)


def curve(
    rows: pd.DataFrame,
    column: str,
    marks: Look,
    *,
    what: str,
    legend: bool = False,
    number: str = NUMBER,
    **changes: Any,
) -> go.Scatter:
    """One variant's values by layer on one task.

    Args:
        rows: rows of the layer table, of one task and variant, by layer.
        column: what is plotted; NaN makes a gap.
        marks: how the variant is drawn.
        what: what the value is, for the hover text.
        legend: whether the legend names the variant here; once is enough for all panels.
        number: format of the hovered value.
        changes: further settings of the trace.
    """
    import plotly.graph_objects as go

    variant = str(rows["variant"].iloc[0])
    values = rows[column].astype(float)
    settings: dict[str, Any] = {
        "x": rows["layer"].tolist(),
        "y": [None if pd.isna(value) else value for value in values],
        "mode": "lines+markers",
        "connectgaps": False,
        "name": shown(variant),
        "legendgroup": variant,
        "showlegend": legend,
        "line": {"color": marks.colour, "dash": marks.dash, "width": 2},
        "marker": {"color": marks.colour, "symbol": marks.symbol, "size": 6},
        "text": [f"{literal(str(rows['task'].iloc[0]))}, {place}" for place in layer_places(rows)],
        "hovertemplate": f"%{{text}}<br>{what} %{{y:{number}}}",
    }
    return go.Scatter({**settings, **changes})


def companion(rows: pd.DataFrame, column: str, marks: Look, *, what: str, number: str = NUMBER) -> go.Scatter:
    """Open markers of a value to compare a curve with; the curve's legend entry shows and hides them too."""
    marker = {"color": marks.colour, "symbol": f"{marks.symbol}-open", "size": 7}
    return curve(rows, column, marks, what=what, number=number, mode="markers", marker=marker)


def legend_names(rows: pd.DataFrame) -> list[str]:
    """What the legend of `rows` says."""
    return [shown(variant) for variant in dict.fromkeys(rows["variant"])]


def band_opacity(rows: pd.DataFrame) -> float:
    """How opaque bands are: the more variants lie over one another, the less."""
    return min(0.14, 0.5 / rows["variant"].nunique())


def band(rows: pd.DataFrame, low: str, high: str, marks: Look, *, opacity: float) -> go.Scatter:
    """The area between two columns; it stops where either has no number.

    Rows as for `curve`, whose legend entry shows and hides it too.
    """
    import plotly.graph_objects as go

    x: list[float | None] = []
    y: list[float | None] = []
    for run in _unbroken(rows, low, high):
        layers = run["layer"].astype(float).tolist()
        if len(layers) == 1:
            layers = [layers[0] - _LONE, layers[0] + _LONE]
            run = pd.concat([run, run])
        lows, highs = run[low].astype(float).tolist(), run[high].astype(float).tolist()
        x += [*layers, *reversed(layers), None]
        y += [*lows, *reversed(highs), None]
    return go.Scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=faded(marks.colour, opacity),
        legendgroup=str(rows["variant"].iloc[0]),
        showlegend=False,
        hoverinfo="skip",
    )


def _unbroken(rows: pd.DataFrame, *columns: str) -> Sequence[pd.DataFrame]:
    """The runs of rows without a gap in any of the columns."""
    is_gap = rows[list(columns)].isna().any(axis=1)
    return [run for _, run in rows[~is_gap].groupby(is_gap.cumsum()[~is_gap])]
