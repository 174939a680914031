"""The marks that charts draw with: bars, points, clouds of samples, whiskers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from driftlens.findings.reading import percent
from driftlens_reports.charts.picking import ChartOptions
from driftlens_reports.charts.theme import SMALL, Look, Palette, look, palette
from driftlens_reports.charts.words import counted, label, literal, shown, spaced

Ends = tuple["pd.Series[Any]", "pd.Series[Any]"]
"""The low and high ends of intervals, a row each."""

MOST_SVG = 5000
"""Points that a browser still draws and moves smoothly as SVG; a figure of more draws them with WebGL.

Without a graphics processor a browser takes a quarter of a second and more to make ready for WebGL, as long as for
these as SVG; and a page may hold few figures that use it.
"""


@dataclass(frozen=True)
class Brush:
    """Draws the variants of a run in one figure: each in its own look, and named in the legend once."""

    variants: Sequence[str]
    dark: bool
    _in_legend: set[str] = field(default_factory=set, init=False)

    @property
    def palette(self) -> Palette:
        """The theme's colours."""
        return palette(self.dark)

    def look(self, variant: str) -> Look:
        """How a variant is drawn."""
        return look(self.variants, variant, dark=self.dark)

    def named(self, group: str, name: str = "") -> dict[str, Any]:
        """Settings of a trace that the legend names once per group, by default a variant, and hides with it."""
        is_first = group not in self._in_legend
        self._in_legend.add(group)
        return {"name": name or shown(group), "legendgroup": group, "showlegend": is_first}

    def line(
        self, variant: str, x: Iterable[Any], y: pd.Series[Any], ends: Ends | None = None, **changes: Any
    ) -> go.Scatter:
        """A variant's values, joined by a line that breaks at a gap, with whiskers from `ends` if given."""
        style, values = self.look(variant), y.astype(float)
        trace = go.Scatter(
            **{"x": list(x), "y": gapped(values), "mode": "lines+markers", "connectgaps": False},
            line={"color": style.colour, "dash": style.dash, "width": 2},
            marker={"color": style.colour, "symbol": style.symbol, "size": 6},
            error_y=whiskers(values, *ends, style.colour) if ends else None,
            **self.named(variant),
        )
        return trace.update(**changes)

    def bars(
        self, variant: str, x: Iterable[Any], y: pd.Series[Any], ends: Ends | None = None, **changes: Any
    ) -> go.Bar:
        """A variant's values as bars in its colour, with the hatch that tells it from others without colour."""
        values, look = y.astype(float), {"marker": hatched(self.look(variant)), "textposition": "none"}
        if ends is not None:
            look["error_y"] = whiskers(values, *ends, self.palette.ink)
        return go.Bar(x=list(x), y=gapped(values), **look, **self.named(variant)).update(**changes)

    def cloud(
        self, variant: str, x: pd.Series[Any], y: pd.Series[Any], *, total: int, **settings: Any
    ) -> go.Scatter | go.Scattergl:
        """A variant's samples as points; `total` in the whole figure decides what draws them."""
        draw, style = go.Scatter if total <= MOST_SVG else go.Scattergl, self.look(variant)
        marker = {
            "color": style.colour,
            "symbol": style.symbol,
            "size": 5,
            "opacity": 0.7,
            "line": {"width": 0},
        }
        places = {"x": x.to_numpy(dtype=float), "y": y.to_numpy(dtype=float)}
        return draw(**places, mode="markers", marker=marker, **self.named(variant)).update(**settings)


def identity_line(figure: go.Figure, low: float, high: float, *, dark: bool, **place: Any) -> None:
    """A thin line from (low, low) to (high, high): where both axes show the same."""
    line = {"color": palette(dark).quiet, "width": 1, "dash": "dot"}
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, line=line, layer="below", **place)


def gapped(values: Iterable[Any]) -> list[Any]:
    """The values with None for what was not measured: a line breaks there, and a bar is left out."""
    return [None if pd.isna(value) else value for value in values]


def whiskers(
    values: pd.Series[Any], low: pd.Series[Any], high: pd.Series[Any], colour: str, *, width: int = 3
) -> dict[str, Any]:
    """Whiskers from `low` to `high` around the values; none where an end is missing: no length claims certainty."""
    up, down = high.astype(float) - values, values - low.astype(float)
    return {"array": gapped(up), "arrayminus": gapped(down), "color": colour, "thickness": 1, "width": width}


def interval_texts(
    rows: pd.DataFrame,
    low: str,
    high: str,
    said: str = "95 % interval",
    write: Callable[[float], str] = percent,
) -> list[str]:
    """A line of hover text with both ends for each row; empty where they are not measured."""
    ends = rows.reindex(columns=[low, high]).astype(float).to_numpy().tolist()
    return [
        "" if math.isnan(start + end) else f"<br>{literal(f'{said}: {write(start)} to {write(end)}')}"
        for start, end in ends
    ]


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


def ink(*, dark: bool, size: int = SMALL) -> dict[str, Any]:
    """The font of words inside a figure."""
    return {"size": size, "color": palette(dark).ink}


def literal_column(names: pd.Series[Any]) -> pd.Series[Any]:
    """Every name of a column as plotly shows it character by character; each is made safe once."""
    safe = {name: literal(str(name)) for name in names.unique()}
    return names.map(safe).astype(object)


def thinned_samples(
    rows: pd.DataFrame, options: ChartOptions, panels: int
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows of as many samples as the options allow points in `panels`, a sample in all its rows or in none."""
    key = ["task", "sample_id"]
    samples = rows[[*key, "label"]].drop_duplicates(key)
    kept = thinned(samples, max(1, options.max_points // max(1, panels)), ["task", "label"])
    if len(kept) == len(samples):
        return rows, ()
    there, wanted = (pd.MultiIndex.from_frame(table[key]) for table in (rows, kept))
    few = spaced(len(kept))
    note = f"{few} of {counted(len(samples), 'sample')} shown, of every class alike."
    return rows[there.isin(wanted)].reset_index(drop=True), (note,)


def thinned(rows: pd.DataFrame, limit: int, by: Sequence[str]) -> pd.DataFrame:
    """At most `limit` of the rows, in their order: as many of each stratum as its size asks for, rare ones included.

    Which rows stay depends on their sample ids alone, not on order or day.
    """
    if len(rows) <= limit:
        return rows
    ids = rows["sample_id"].to_numpy(dtype=object)
    drawn = pd.DataFrame({"order": pd.util.hash_array(ids, categorize=False)}, index=rows.index)
    strata = drawn.groupby([rows[column].astype(str) for column in by])["order"]
    # Row r of a stratum of s comes up at r / s: the first of each stratum first, then all in step.
    turn = (strata.rank(method="first") - 1) / strata.transform("size")
    kept = np.sort(np.argsort(turn.to_numpy(), kind="stable")[:limit])
    return rows.iloc[kept]


_LETTERS = ((0.027, 0.06), (0.009, 0.04))
"""Width of a letter and height of a name in parts of a panel: of half a page on paper, and of a screen."""
_PLACES = {
    "top right": (1, 1),
    "top left": (0, 1),
    "bottom right": (1, 0),
    "bottom left": (0, 0),
    "middle right": (1, 0.5),
    "middle left": (0, 0.5),
    "top center": (0.5, 1),
    "bottom center": (0.5, 0),
}
"""As plotly calls them, with where the name lies: from left to right, and from below to above its point."""
_GAP, _NEAR, _HAIR = 0.012, 0.04, 0.004
"""From a point to its name; nearer than this to another point a name reads as that one's; a line's breadth."""
_ROUNDS = 5

Array = NDArray[np.float64]


def places(names: Sequence[str], crosses: pd.DataFrame) -> list[str]:
    """Where beside its point each name stands, as plotly calls it; `crosses` has x, y and their ends, names first."""
    x, y = _scaled(crosses, "x"), _scaled(crosses, "y")
    spots = np.stack([x[:, 0] - 0.012, x[:, 0] + 0.012, y[:, 0] - 0.018, y[:, 0] + 0.018], axis=1)
    across = np.stack([x[:, 1], x[:, 2], y[:, 0], y[:, 0]], axis=1)
    up = np.stack([x[:, 0], x[:, 0], y[:, 1], y[:, 2]], axis=1)
    count, ways = len(names), len(_PLACES)
    alone, mutual = np.zeros((count, ways)), np.zeros((count, ways, count, ways))
    others = ~np.eye(count, len(x), dtype=bool)[:, None]
    for letter, tall in _LETTERS:
        boxes = _boxes(np.array([letter * len(name) for name in names]), tall, x[:count, 0], y[:count, 0])
        beyond = np.maximum(np.maximum(-boxes, boxes - 1), 0).sum(-1)
        reach = [
            np.maximum(np.maximum(boxes[..., [at]] - to, to - boxes[..., [at + 1]]), 0)
            for at, to in ((0, x[:, 0]), (2, y[:, 0]))
        ]
        astray = np.maximum(_NEAR - np.hypot(*reach), 0)
        area = tall * letter * np.array([max(1, len(name)) for name in names])[:, None]
        alone += (
            10 * beyond + (60 * astray * others).sum(-1) + (_shared(boxes, spots) * others).sum(-1) * 4 / area
        )
        alone += 7 * (_shared(boxes, across) + _shared(boxes, up)).sum(-1) / area
        mutual += 4 * _shared(boxes, boxes.reshape(-1, 4)).reshape(mutual.shape) / area[..., None, None]
    mutual[np.arange(count), :, np.arange(count)] = 0
    mutual += mutual.transpose(2, 3, 0, 1)
    tries = []
    for start in range(ways):
        chosen = np.full(count, start)
        for at in [*range(count)] * _ROUNDS:
            chosen[at] = (alone[at] + mutual[at][:, np.arange(count), chosen].sum(-1)).argmin()
        total = alone[np.arange(count), chosen].sum()
        total += mutual[np.arange(count)[:, None], chosen[:, None], np.arange(count), chosen].sum() / 2
        tries.append((total, [[*_PLACES][at] for at in chosen]))
    return min(tries)[1]


def _boxes(wide: Array, tall: float, x: Array, y: Array) -> Array:
    """Left, right, low and high end of every name at each of the places."""
    across, up = np.array([*_PLACES.values()]).T
    left = x[:, None] + _GAP * (2 * across - 1) - wide[:, None] * (1 - across)
    low = y[:, None] + _GAP * (2 * up - 1) - tall * (1 - up)
    return np.stack([left, left + wide[:, None], low, low + tall], axis=-1)


def _shared(boxes: Array, others: Array) -> Array:
    """The area that each box shares with each of the others, lines being a hair broad."""
    each, low, high = boxes[..., None, :], others[:, ::2] - _HAIR / 2, others[:, 1::2] + _HAIR / 2
    common = np.minimum(each[..., 1::2], high) - np.maximum(each[..., ::2], low)
    shared: Array = np.maximum(common, 0).prod(-1)
    return shared


def _scaled(crosses: pd.DataFrame, axis: str) -> Array:
    """Value, low and high end on one axis, as they lie from 0 to 1 on a panel that has all of them and 0."""
    values = crosses[[axis, f"{axis}_low", f"{axis}_high"]].to_numpy(dtype=float)
    values = np.where(np.isnan(values), values[:, :1], values)
    low, high = min(0.0, values.min()), max(0.0, values.max())
    scaled: Array = 0.05 + 0.9 * (values - low) / ((high - low) or 1.0)
    return scaled
