"""Where the names of points stand, so that each reads as its own point's and covers as little as it can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    """Where beside its point each name stands, as plotly calls it.

    `crosses` has x, x_low, x_high, y, y_low, y_high of every point, those of the names first; ends may be missing.
    """
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
