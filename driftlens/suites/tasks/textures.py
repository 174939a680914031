"""Textures in two colours: what tells them apart is the pattern, not the colour and not the scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

from driftlens.suites.drawing import CANVAS, Field, Split, backdrop, dark_and_light, drawn_task, smooth_field

Pattern = Callable[[Field, Field, np.random.Generator], Field]
"""(u, v, random numbers) -> how much of the second colour, in [0, 1]; u and v count periods of the pattern."""


def _edge(signed: Field, softness: float = 0.12) -> Field:
    return (signed / softness + 0.5).clip(0, 1)


def _fraction(x: Field) -> Field:
    return x - np.floor(x)


def _from_middle(x: Field) -> Field:
    """Distance from the nearest integer plus a half: 0 between two integers, 0.5 on one."""
    return np.abs(_fraction(x) - 0.5)


def _dotted(u: Field, v: Field, rng: np.random.Generator) -> Field:
    shifted = u + 0.5 * (np.floor(v) % 2)
    return _edge(rng.uniform(0.22, 0.38) - np.hypot(_fraction(shifted) - 0.5, _fraction(v) - 0.5))


def _bricked(u: Field, v: Field, rng: np.random.Generator) -> Field:
    along = u / 2 + 0.5 * (np.floor(v) % 2)
    joint = rng.uniform(0.06, 0.12)
    return 1 - np.maximum(
        _edge(2 * (_from_middle(along) - 0.5) + 2 * joint), _edge(_from_middle(v) - 0.5 + joint)
    )


def _meshed(u: Field, v: Field, rng: np.random.Generator) -> Field:
    wire = rng.uniform(0.1, 0.16)
    return np.maximum(_edge(_from_middle(u) - 0.5 + wire), _edge(_from_middle(v) - 0.5 + wire))


def _marbled(u: Field, v: Field, rng: np.random.Generator) -> Field:
    turbulence = smooth_field(rng, 5) + 0.5 * smooth_field(rng, 10)
    return np.abs(np.sin(np.pi * (0.5 * u + rng.uniform(0.9, 1.4) * turbulence)))


def _cracked(u: Field, v: Field, rng: np.random.Generator) -> Field:
    seeds = rng.uniform(0, CANVAS, (int(rng.integers(9, 18)), 2))
    across, along = np.meshgrid(np.arange(CANVAS), np.arange(CANVAS))
    distances = np.hypot(across[..., None] - seeds[:, 0], along[..., None] - seeds[:, 1])
    nearest = np.partition(distances, 1, axis=-1)
    return _edge((2.2 - (nearest[..., 1] - nearest[..., 0])).astype(np.float32), 2.0)


def _spiralled(u: Field, v: Field, rng: np.random.Generator) -> Field:
    x, y = u - u.mean() + rng.uniform(-0.5, 0.5), v - v.mean() + rng.uniform(-0.5, 0.5)
    arms = rng.choice([-1, 1])
    return _edge(_from_middle(np.hypot(x, y) + arms * np.arctan2(y, x) / (2 * np.pi)) - 0.25)


def _honeycombed(u: Field, v: Field, rng: np.random.Generator) -> Field:
    height = np.sqrt(3.0)

    def rim(x: Field, y: Field) -> Field:
        """Hexagonal distance from the nearest point of the lattice with periods 1 and sqrt(3)."""
        dx, dy = np.abs(_fraction(x) - 0.5), np.abs(_fraction(y / height) - 0.5) * height
        return np.maximum(dx, 0.5 * dx + 0.5 * height * dy)

    wall = rng.uniform(0.05, 0.09)
    return _edge(np.minimum(rim(u, v), rim(u + 0.5, v + height / 2)) - 0.5 + wall)


PATTERNS: dict[str, Pattern] = {
    "striped": lambda u, v, rng: _edge(_from_middle(u) - rng.uniform(0.15, 0.35)),
    "chequered": lambda u, v, rng: _edge(np.sin(np.pi * u) * np.sin(np.pi * v), 0.3),
    "dotted": _dotted,
    "wavy": lambda u, v, rng: _edge(_from_middle(v + rng.uniform(0.3, 0.5) * np.sin(np.pi * u)) - 0.25),
    "bricked": _bricked,
    "meshed": _meshed,
    "marbled": _marbled,
    "cracked": _cracked,
    "spiralled": _spiralled,
    "honeycombed": _honeycombed,
}


@drawn_task(
    "textures",
    class_names=tuple(PATTERNS),
    templates=("a {} texture.", "a {} surface.", "a photo of a {} pattern."),
    subject="a texture",
)
def draw(rng: np.random.Generator, label: int, split: Split) -> Image.Image:
    """One patch of a texture, turned, warped and unevenly lit."""
    period, angle, warp = rng.uniform(12, 18), rng.uniform(-0.4, 0.4), rng.uniform(0, 0.25)
    pixels = np.arange(CANVAS, dtype=np.float32)
    x, y = pixels / period + rng.uniform(), pixels[:, None] / period + rng.uniform()
    cosine, sine = math.cos(angle), math.sin(angle)
    u = cosine * x + sine * y + warp * smooth_field(rng, 4)
    v = cosine * y - sine * x + warp * smooth_field(rng, 4)
    share = list(PATTERNS.values())[label](u, v, rng)
    mask = Image.fromarray((255 * share).astype(np.uint8))
    ground, figure = dark_and_light(rng, 55)
    return Image.composite(backdrop(rng, figure), backdrop(rng, ground), mask)
