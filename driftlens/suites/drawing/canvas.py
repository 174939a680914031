"""Colours, backgrounds and clutter: everything around the thing that a picture shows.

Pictures are drawn on a canvas twice their size and averaged down, which smooths every edge.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZE = 32
CANVAS = 2 * SIZE

Pixels = NDArray[np.uint8]
"""[h, w, 3], sRGB."""
Field = NDArray[np.floating]
"""One number per pixel."""
Colour = tuple[int, int, int]


def colour(rng: np.random.Generator, chroma: int = 50) -> Colour:
    """A random colour of any brightness whose channels differ from grey by at most `chroma`."""
    grey = int(rng.integers(0, 256))
    return near(rng, (grey, grey, grey), chroma)


def near(rng: np.random.Generator, reference: Colour, spread: int) -> Colour:
    """A colour that differs from `reference` by at most `spread` per channel."""
    red, green, blue = (
        min(max(round(channel + spread * (2 * chance - 1)), 0), 255)
        for channel, chance in zip(reference, rng.random(3).tolist(), strict=True)
    )
    return red, green, blue


def luminance(of: Colour) -> float:
    """Perceived brightness in [0, 255] (ITU-R BT.601 weights)."""
    return 0.299 * of[0] + 0.587 * of[1] + 0.114 * of[2]


def dark_and_light(rng: np.random.Generator, gap: float) -> tuple[Colour, Colour]:
    """Two random colours; the second is brighter than the first by at least `gap`."""
    while True:
        dark, light = colour(rng), colour(rng)
        if luminance(light) - luminance(dark) >= gap:
            return dark, light


def backdrop(rng: np.random.Generator, middle: Colour, spread: int = 30, side: int = CANVAS) -> Image.Image:
    """A smooth background [side, side] that runs between four shades of `middle`, one in each corner."""
    corners = [[near(rng, middle, spread) for _ in range(2)] for _ in range(2)]
    return Image.fromarray(np.array(corners, dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)


def smooth_field(rng: np.random.Generator, cells: int, side: int = CANVAS) -> Field:
    """Smooth random values, about -1 to 1, that change over `side / cells` pixels."""
    knots = Image.fromarray(rng.uniform(-1, 1, (cells, cells)).astype(np.float32))
    return np.asarray(knots.resize((side, side), Image.Resampling.BICUBIC))


def clutter(rng: np.random.Generator, picture: Image.Image, count: int, middle: Colour, spread: int) -> None:
    """Draw `count` random strokes and blots onto `picture`, in shades of `middle`."""
    pen = ImageDraw.Draw(picture)
    for _ in range(count):
        ink = near(rng, middle, spread)
        x, y, u, v = rng.uniform(0, picture.width, 4).tolist()
        if rng.random() < 0.5:
            pen.line([x, y, u, v], fill=ink, width=int(rng.integers(1, 4)))
        else:
            radius = rng.uniform(1, 6)
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=ink)
