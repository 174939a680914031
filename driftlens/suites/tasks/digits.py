"""Handwritten digits: scikit-learn's collection of real handwriting, in any ink on any paper."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image

from driftlens.suites.drawing.canvas import CANVAS, backdrop, dark_and_light
from driftlens.suites.drawing.glyphs import placed
from driftlens.suites.drawing.task import Split, drawn_task

TEST_EVERY = 3
"""One scan in so many is a test scan."""


@functools.cache
def handwriting(label: int, split: Split) -> tuple[Image.Image, ...]:
    """Masks of the collected digits of one class; every third scan belongs to the test split."""
    from sklearn.datasets import load_digits

    collection = load_digits()
    scans = collection.images[collection.target == label] * (255 / 16)
    is_test = np.arange(len(scans)) % TEST_EVERY == 0
    return tuple(_mask(scan) for scan in scans[is_test if split == "test" else ~is_test])


def _mask(scan: np.ndarray) -> Image.Image:
    # An empty rim keeps the ink away from the edge, where placing the mask would cut it off.
    padded = np.pad(scan, 1).clip(0, 255).astype(np.uint8)
    return Image.fromarray(padded).resize((40, 40), Image.Resampling.BICUBIC)


@drawn_task(
    "digits",
    class_names=tuple(str(digit) for digit in range(10)),
    templates=("a handwritten digit {}.", "the number {} in handwriting.", "handwriting: {}."),
    subject="a handwritten digit",
)
def draw(rng: np.random.Generator, label: int, split: Split) -> Image.Image:
    """One collected digit, written somewhere near the middle of a sheet."""
    sources = handwriting(label, split)
    paper, ink = dark_and_light(rng, 90)
    sheet = backdrop(rng, paper)
    mask = placed(
        sources[rng.integers(len(sources))],
        tuple(CANVAS / 2 + rng.uniform(-2, 2, 2)),
        rng.uniform(58, 68),
        angle=rng.uniform(-6, 6),
        shear=rng.uniform(-0.08, 0.08),
    )
    sheet.paste(ink, mask=mask)
    return sheet
