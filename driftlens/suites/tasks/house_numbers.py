"""House numbers: one printed digit in the middle, its neighbours cut off at the sides, on painted walls."""

from __future__ import annotations

import numpy as np
from PIL import Image

from driftlens.suites.drawing.canvas import CANVAS, backdrop, clutter, dark_and_light, near
from driftlens.suites.drawing.glyphs import FONTS, glyph, placed
from driftlens.suites.drawing.task import Split, drawn_task


@drawn_task(
    "house_numbers",
    class_names=tuple(str(digit) for digit in range(10)),
    templates=("a house number {}.", "a street sign with the number {}.", "the number {} on a wall."),
    subject="a house number",
)
def draw(rng: np.random.Generator, label: int, split: Split) -> Image.Image:
    """One digit of a house number, seen from the street."""
    paint, wall = dark_and_light(rng, 70)
    picture = backdrop(rng, wall, spread=45)
    clutter(rng, picture, int(rng.integers(0, 4)), wall, 45)
    font = FONTS[rng.integers(len(FONTS))]
    height, angle, shear = rng.uniform(46, 54), rng.uniform(-6, 6), rng.uniform(-0.1, 0.1)
    x, y = CANVAS / 2 + rng.uniform(-2, 2, 2)
    ink = near(rng, paint, 15)
    for step, character in _row(rng, label):
        pitch = height * rng.uniform(0.75, 0.9)
        drop = step * pitch * np.tan(np.deg2rad(angle))
        mask = placed(glyph(character, font), (x + step * pitch, y + drop), height, angle=angle, shear=shear)
        picture.paste(ink, mask=mask)
    return picture


def _row(rng: np.random.Generator, label: int) -> list[tuple[int, str]]:
    """The digit itself at step 0 and, more often than not, neighbours at steps -1 and 1."""
    neighbours = [(step, str(rng.integers(10))) for step in (-1, 1) if rng.random() < 0.6]
    return [(0, str(label)), *neighbours]
