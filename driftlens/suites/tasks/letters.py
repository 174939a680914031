"""Capital letters in many fonts."""

from __future__ import annotations

import numpy as np
from PIL import Image

from driftlens.suites.drawing.canvas import CANVAS, backdrop, clutter, dark_and_light
from driftlens.suites.drawing.glyphs import UPRIGHT_FONTS, glyph, placed
from driftlens.suites.drawing.task import Split, drawn_task

LETTERS = "ABCEHKLMRSTX"


@drawn_task(
    "letters",
    class_names=tuple(LETTERS),
    templates=("the letter {}.", "a capital letter {} in print.", "the printed letter {}."),
    subject="a printed letter",
)
def draw(rng: np.random.Generator, label: int, split: Split) -> Image.Image:
    """One letter on coloured paper with a few stray marks."""
    ink, paper = dark_and_light(rng, 90)
    page = backdrop(rng, paper)
    clutter(rng, page, int(rng.integers(0, 4)), paper, 30)
    mask = placed(
        glyph(LETTERS[label], UPRIGHT_FONTS[rng.integers(len(UPRIGHT_FONTS))]),
        tuple(CANVAS / 2 + rng.uniform(-2, 2, 2)),
        rng.uniform(46, 54),
        angle=rng.uniform(-6, 6),
        shear=rng.uniform(-0.08, 0.08),
        stretch=rng.uniform(0.9, 1.1),
    )
    page.paste(ink, mask=mask)
    return page
