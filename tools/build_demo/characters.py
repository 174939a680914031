"""Single characters: handwritten digits, house numbers, and printed capital letters."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image

from tools.build_demo import drawing

DIGITS = "0123456789"
LETTERS = "ABCEHKLMRSTX"
TEST_EVERY = 3
"""One scan in so many is a test scan."""


@functools.cache
def handwriting(label: int, split: drawing.Split) -> tuple[Image.Image, ...]:
    """Masks of one class of scikit-learn's collected digits; every third scan belongs to the test split."""
    from sklearn.datasets import load_digits

    collection = load_digits()
    scans = collection.images[collection.target == label] * (255 / 16)
    is_test = np.arange(len(scans)) % TEST_EVERY == 0
    return tuple(_mask(scan) for scan in scans[is_test if split == "test" else ~is_test])


def _mask(scan: np.ndarray) -> Image.Image:
    # An empty rim keeps the ink away from the edge, where placing the mask would cut it off.
    padded = np.pad(scan, 1).clip(0, 255).astype(np.uint8)
    return Image.fromarray(padded).resize((40, 40), Image.Resampling.BICUBIC)


@drawing.drawn_task(
    "digits",
    class_names=tuple(DIGITS),
    templates=("a handwritten digit {}.", "the number {} in handwriting.", "handwriting: {}."),
    subject="a handwritten digit",
)
def draw_digit(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One collected digit in any ink, somewhere near the middle of a sheet."""
    sources = handwriting(label, split)
    paper, ink = drawing.dark_and_light(rng, 90)
    sheet = drawing.backdrop(rng, paper)
    source = sources[rng.integers(len(sources))]
    mask = drawing.placed_somewhere(source, rng, shift=2, height=(58, 68), angle=6, shear=0.08)
    sheet.paste(ink, mask=mask)
    return sheet


@drawing.drawn_task(
    "letters",
    class_names=tuple(LETTERS),
    templates=("the letter {}.", "a capital letter {} in print.", "the printed letter {}."),
    subject="a printed letter",
)
def draw_letter(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One letter in any font, on coloured paper with a few stray marks."""
    ink, paper = drawing.dark_and_light(rng, 90)
    page = drawing.backdrop(rng, paper)
    drawing.clutter(rng, page, int(rng.integers(0, 4)), paper, 30)
    letter = drawing.glyph(LETTERS[label], drawing.UPRIGHT_FONTS[rng.integers(len(drawing.UPRIGHT_FONTS))])
    mask = drawing.placed_somewhere(letter, rng, shift=2, height=(46, 54), angle=6, shear=0.08, stretch=(0.9, 1.1))
    page.paste(ink, mask=mask)
    return page


@drawing.drawn_task(
    "house_numbers",
    class_names=tuple(DIGITS),
    templates=("a house number {}.", "a street sign with the number {}.", "the number {} on a wall."),
    subject="a house number",
)
def draw_house_number(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One digit of a house number on a painted wall, its neighbours cut off at the sides."""
    paint, wall = drawing.dark_and_light(rng, 70)
    picture = drawing.backdrop(rng, wall, spread=45)
    drawing.clutter(rng, picture, int(rng.integers(0, 4)), wall, 45)
    font = drawing.FONTS[rng.integers(len(drawing.FONTS))]
    height, angle, shear = rng.uniform(46, 54), rng.uniform(-6, 6), rng.uniform(-0.1, 0.1)
    x, y = drawing.CANVAS / 2 + rng.uniform(-2, 2, 2)
    ink = drawing.near(rng, paint, 15)
    # More often than not there are neighbours at steps -1 and 1.
    neighbours = [(step, DIGITS[rng.integers(10)]) for step in (-1, 1) if rng.random() < 0.6]
    for step, digit in [(0, DIGITS[label]), *neighbours]:
        pitch = height * rng.uniform(0.75, 0.9)
        drop = step * pitch * np.tan(np.deg2rad(angle))
        mask = drawing.placed(
            drawing.glyph(digit, font), (x + step * pitch, y + drop), height, angle=angle, shear=shear
        )
        picture.paste(ink, mask=mask)
    return picture
