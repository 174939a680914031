"""Where the names of points stand, so that each reads as its own point's and covers as little as it can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

_LETTERS = ((0.027, 0.06), (0.009, 0.04))
"""Width of a letter and height of a name in parts of a panel: of half a page on paper, and of a screen."""
_CORNERS = ("top right", "top left", "bottom right", "bottom left")
_GAP, _NEAR, _HAIR = 0.012, 0.04, 0.004
"""From a point to its name; nearer than this to another point a name reads as that one's; a line's breadth."""
_ROUNDS = 5

Array = NDArray[np.float64]


def corners(names: Sequence[str], crosses: pd.DataFrame) -> list[str]:
    """The corner of its point that each name stands at, as plotly calls it.

    `crosses` has x, x_low, x_high, y, y_low, y_high of every point, those of the names first; ends may be missing.
    """
    x, y = _scaled(crosses, "x"), _scaled(crosses, "y")
    spots = np.stack([x[:, 0] - 0.012, x[:, 0] + 0.012, y[:, 0] - 0.018, y[:, 0] + 0.018], axis=1)
    across = np.stack([x[:, 1], x[:, 2], y[:, 0], y[:, 0]], axis=1)
    up = np.stack([x[:, 0], x[:, 0], y[:, 1], y[:, 2]], axis=1)
    count, own, mutual = len(names), np.zeros((len(names), 4)), np.zeros((len(names), 4, len(names), 4))
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
        own += (
            10 * beyond + (60 * astray * others).sum(-1) + (_shared(boxes, spots) * others).sum(-1) * 4 / area
        )
        own += 7 * (_shared(boxes, across) + _shared(boxes, up)).sum(-1) / area
        mutual += 4 * _shared(boxes, boxes.reshape(-1, 4)).reshape(mutual.shape) / area[..., None, None]
    mutual[np.arange(count), :, np.arange(count)] = 0
    mutual += mutual.transpose(2, 3, 0, 1)
    tries = []
    for start in range(4):
        found = np.full(count, start)
        for at in [*range(count)] * _ROUNDS:
            found[at] = (own[at] + mutual[at][:, np.arange(count), found].sum(-1)).argmin()
        total = own[np.arange(count), found].sum()
        total += mutual[np.arange(count)[:, None], found[:, None], np.arange(count), found].sum() / 2
        tries.append((total, [_CORNERS[at] for at in found]))
    return min(tries)[1]


def _boxes(wide: Array, tall: float, x: Array, y: Array) -> Array:
    """Left, right, low and high end of every name at each of the corners."""
    right, top = np.array([1, 0, 1, 0]), np.array([1, 1, 0, 0])
    left = x[:, None] + np.where(right, _GAP, -_GAP - wide[:, None])
    low = y[:, None] + np.where(top, _GAP, -_GAP - tall)
    return np.stack([left, left + wide[:, None], low, low + tall], axis=-1)


def _shared(boxes: Array, others: Array) -> Array:
    """The area that each box shares with each of the others, lines being a hair broad."""
    mine, low, high = boxes[..., None, :], others[:, ::2] - _HAIR / 2, others[:, 1::2] + _HAIR / 2
    common = np.minimum(mine[..., 1::2], high) - np.maximum(mine[..., ::2], low)
    shared: Array = np.maximum(common, 0).prod(-1)
    return shared


def _scaled(crosses: pd.DataFrame, axis: str) -> Array:
    """Value, low and high end on one axis, as they lie from 0 to 1 on a panel that has all of them and 0."""
    values = crosses[[axis, f"{axis}_low", f"{axis}_high"]].to_numpy(dtype=float)
    values = np.where(np.isnan(values), values[:, :1], values)
    low, high = min(0.0, values.min()), max(0.0, values.max())
    scaled: Array = 0.05 + 0.9 * (values - low) / ((high - low) or 1.0)
    return scaled
