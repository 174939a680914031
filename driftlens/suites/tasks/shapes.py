"""Plain shapes, filled or outlined, among distracting strokes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from driftlens.suites import drawing

Points = NDArray[np.float64]
"""A closed outline [n, 2] within the square [-1, 1] x [-1, 1], y downwards."""


def _regular(corners: int, turn: float = -90.0) -> Points:
    angles = np.deg2rad(turn) + 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _star() -> Points:
    points = _regular(10)
    points[1::2] *= 0.42
    return points


def _heart() -> Points:
    t = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    across = 16 * np.sin(t) ** 3
    along = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([across, -along - 2], axis=1) / 16


def _crescent() -> Points:
    outer = np.linspace(np.deg2rad(50), np.deg2rad(310), 30)
    inner = np.linspace(np.deg2rad(292), np.deg2rad(68), 30)
    rim = np.stack([np.cos(outer), np.sin(outer)], axis=1)
    bite = np.stack([0.35 + 0.78 * np.cos(inner), 0.83 * np.sin(inner)], axis=1)
    return np.concatenate([rim, bite]) + np.array([0.2, 0])


def _cross() -> Points:
    a, b = 0.34, 1.0
    quarter = np.array([[a, -b], [a, -a], [b, -a]])
    turns = [np.array([[c, -s], [s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    return np.concatenate([quarter @ turn.T for turn in turns])


OUTLINES: dict[str, Callable[[], Points]] = {
    "circle": lambda: _regular(32),
    "square": lambda: _regular(4, -45.0) * 1.15,
    "triangle": lambda: _regular(3) + np.array([0, 0.2]),
    "diamond": lambda: _regular(4) * np.array([0.75, 1.0]),
    "star": _star,
    "cross": _cross,
    "heart": _heart,
    "crescent": _crescent,
    "arrow": lambda: np.array(
        [[-1, -0.3], [0.1, -0.3], [0.1, -0.8], [1, 0], [0.1, 0.8], [0.1, 0.3], [-1, 0.3]]
    ),
    "bar": lambda: np.array([[-1, -0.28], [1, -0.28], [1, 0.28], [-1, 0.28]]),
}


def _silhouette(outline: Points) -> Image.Image:
    mask = Image.new("L", (drawing.CANVAS, drawing.CANVAS))
    corners = [(x, y) for x, y in (outline * (drawing.CANVAS / 2 - 6) + drawing.CANVAS / 2).tolist()]
    ImageDraw.Draw(mask).polygon(corners, fill=255)
    return mask


FILLED = tuple(_silhouette(outline()) for outline in OUTLINES.values())
HOLLOW = tuple(ImageChops.subtract(each, each.filter(ImageFilter.MinFilter(9))) for each in FILLED)


@drawing.drawn_task(
    "shapes",
    class_names=tuple(OUTLINES),
    templates=("a drawing of a {}.", "a {} shape.", "a simple {}."),
    subject="a drawing of a shape",
)
def draw(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One shape, filled or as an outline, over and under a few strokes."""
    paper, ink = drawing.dark_and_light(rng, 80)
    sheet = drawing.backdrop(rng, paper, spread=40)
    drawing.clutter(rng, sheet, int(rng.integers(1, 5)), paper, 35)
    silhouette = (HOLLOW if rng.random() < 0.25 else FILLED)[label]
    mask = drawing.placed_somewhere(
        silhouette, rng, shift=2.5, height=(50, 62), angle=12, stretch=(0.85, 1.15)
    )
    sheet.paste(ink, mask=mask)
    drawing.clutter(rng, sheet, int(rng.integers(0, 2)), paper, 35)
    return sheet
