"""Corrupted images: Gaussian noise, motion blur and fog of ImageNet-C (arXiv:1903.12261), the kinds in FeatCal's table.

The table corrupts calibration images alone, at severity 3. Strengths are ImageNet-C's for images of 224 pixels. Lengths
in pixels scale with the shorter side, so that a severity looks alike at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftlens.data.samples import SampleSet, drawing
from driftlens.data.sources import Picture
from driftlens.utils.errors import DataError, SpecError, did_you_mean

# [h, w, 3], from 0 to 1.
Pixels = NDArray[np.float64]
# image, severity from 0 (slight) to 4, random generator -> corrupted image.
Change = Callable[[Pixels, int, np.random.Generator], Pixels]

CLEAN = "none"
# The severity in FeatCal's table.
SEVERITY = 3
# Side in pixels of ImageNet-C's images, to which its lengths refer.
_SIDE = 224


def parse(word: str) -> tuple[str, int]:
    """Parse `fog` (severity 3), `fog:5` or `none` (0) into kind and severity."""
    kind, colon, severity = str(word).partition(":")
    if kind == CLEAN and not colon:
        return CLEAN, 0
    if kind not in CORRUPTIONS:
        raise SpecError(
            f"unknown corruption {kind!r}, expected {', '.join((CLEAN, *CORRUPTIONS))}",
            hint=did_you_mean(kind, CORRUPTIONS) or "Add a severity after a colon: fog:5.",
        )
    if colon and severity not in set("12345"):
        raise SpecError(f"corruption {word!r}: severity {severity!r}, expected 1 to 5")
    return kind, int(severity or SEVERITY)


def written(word: str) -> str:
    """Format a corruption as in tables: `none`, or the kind with its severity. Errors as for `parse`."""
    kind, severity = parse(word)
    return f"{kind}:{severity}" if severity else CLEAN


def corrupted(samples: SampleSet, corruption: str, seed: int) -> SampleSet:
    """Return samples whose images are corrupted when read. The noise depends only on seed, kind and sample id.

    Args:
        samples: the samples.
        corruption: kind and severity, see `parse`.
        seed: of the noise.
    """
    kind, severity = parse(corruption)
    if kind == CLEAN:
        return samples
    picture, preprocess = samples.picture, samples.preprocess
    if picture is None or preprocess is None:
        raise DataError(
            f"task {samples.task}: only images of a data source can be corrupted",
            hint="Use image data, or remove `corruption`.",
        )

    def load(positions: Sequence[int]) -> Any:
        return preprocess(
            [
                corrupt(picture(position), kind, severity, (seed, f"{samples.task}/{samples.ids[position]}"))
                for position in positions
            ]
        )

    return replace(samples, load=load, picture=None)


def corrupt(picture: Picture, kind: str, severity: int, drawn: tuple[int, str]) -> NDArray[np.uint8]:
    """Return a corrupted image [h, w, 3]; equal seeds and names give equal results on every machine.

    Args:
        picture: the image.
        kind: of the corruption.
        severity: 1 to 5.
        drawn: seed and name of the sample.
    """
    from PIL import Image

    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    seed, name = drawn
    # The kind is part of the seed, so that kinds do not share their noise.
    corrupted_pixels = CORRUPTIONS[kind](pixels, severity - 1, drawing(seed, f"{kind}/{name}"))
    # The cast truncates; half a level more rounds to nearest.
    return np.asarray(np.clip(corrupted_pixels, 0, 1) * 255 + 0.5, dtype=np.uint8)


def _gaussian_noise(pixels: Pixels, severity: int, random: np.random.Generator) -> Pixels:
    return pixels + random.normal(scale=(0.08, 0.12, 0.18, 0.26, 0.38)[severity], size=pixels.shape)


def _motion_blur(pixels: Pixels, severity: int, random: np.random.Generator) -> Pixels:
    """Compute the average along a line from each pixel, with half a Gaussian as weights; borders are extended."""
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity]
    scale = min(pixels.shape[:2]) / _SIDE
    angle = math.radians(random.uniform(-45, 45))
    # Steps of at most a pixel, so that small pictures are sampled as finely as large ones.
    steps = np.arange(0, (2 * radius + 1) * scale, min(scale, 1.0))
    weights = np.exp(-((steps / scale) ** 2) / (2 * sigma**2))
    rows, columns = (np.arange(size) for size in pixels.shape[:2])
    blurred = np.zeros_like(pixels)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        down = np.clip(rows + round(step * math.sin(angle)), 0, len(rows) - 1)
        right = np.clip(columns + round(step * math.cos(angle)), 0, len(columns) - 1)
        blurred += weight * pixels[down][:, right]
    return blurred


def _fog(pixels: Pixels, severity: int, random: np.random.Generator) -> Pixels:
    strength, decay = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[severity]
    height, width = pixels.shape[:2]
    fog = _plasma(max(height, width), decay, random)[:height, :width, None]
    top = pixels.max()
    # As in ImageNet-C, black stays black.
    return np.asarray((pixels + strength * fog) * top / (top + strength))


def _plasma(side: int, decay: float, random: np.random.Generator) -> Pixels:
    """Generate a fractal map from 0 to 1 by the diamond-square algorithm on a torus."""
    # Halving the step needs a power of two; the caller crops.
    size = 2 ** math.ceil(math.log2(max(side, 2)))
    heights, step, wibble = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        square = corners + np.roll(corners, -1, 0)
        square = square + np.roll(square, -1, 1)
        heights[half::step, half::step] = square / 4 + random.uniform(-wibble, wibble, square.shape)
        middle = heights[half::step, half::step]
        across, down = middle + np.roll(middle, 1, 0), middle + np.roll(middle, 1, 1)
        ends = corners + np.roll(corners, -1, 1), corners + np.roll(corners, -1, 0)
        heights[::step, half::step] = (across + ends[0]) / 4 + random.uniform(-wibble, wibble, across.shape)
        heights[half::step, ::step] = (down + ends[1]) / 4 + random.uniform(-wibble, wibble, down.shape)
        step, wibble = half, wibble / decay
    heights -= heights.min()
    return np.asarray(heights / max(heights.max(), 1e-12), dtype=np.float64)


CORRUPTIONS: Mapping[str, Change] = MappingProxyType(
    {
        "gaussian_noise": _gaussian_noise,
        "motion_blur": _motion_blur,
        "fog": _fog,
    }
)
