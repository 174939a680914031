"""Geometry of a small line chart: one curve per variant, with gaps where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, MARGIN = 640.0, 180.0, 12.0


@dataclass(frozen=True)
class Curve:
    """One variant's curve: an SVG path, and its points for markers."""

    variant: str
    role: str
    path: str
    points: tuple[tuple[float, float], ...]


def curves(layers: Sequence[int], values: Mapping[str, Sequence[float]]) -> list[Curve]:
    """The curves of one chart on a common scale that starts at zero.

    Args:
        layers: layer indices, ascending.
        values: per variant one value per layer; NaN makes a gap.
    """
    highest = max((value for row in values.values() for value in row if not math.isnan(value)), default=0.0)
    return [_curve(variant, layers, row, highest) for variant, row in values.items()]


def role_of(variant: str) -> str:
    """The part a variant plays, which fixes its colour: base, merged, calibrated or baseline."""
    return variant.split(":")[0]


def _curve(variant: str, layers: Sequence[int], values: Sequence[float], highest: float) -> Curve:
    commands, points, is_drawing = [], [], False
    for layer, value in zip(layers, values, strict=True):
        if math.isnan(value):
            is_drawing = False
            continue
        x, y = _x(layer, layers), _y(value, highest)
        commands.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}")
        points.append((round(x, 1), round(y, 1)))
        is_drawing = True
    return Curve(variant, role_of(variant), " ".join(commands), tuple(points))


def _x(layer: int, layers: Sequence[int]) -> float:
    span = layers[-1] - layers[0]
    return WIDTH / 2 if span == 0 else MARGIN + (WIDTH - 2 * MARGIN) * (layer - layers[0]) / span


def _y(value: float, highest: float) -> float:
    share = value / highest if highest > 0 else 0.0
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share
