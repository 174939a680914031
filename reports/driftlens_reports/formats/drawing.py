"""What a drawing without a script consists of: paths, boxes and words, which a template writes as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from driftlens_reports.columns import printable

WIDTH = 960.0
"""Of every drawing, in its own units; the page scales it to the room there is."""


@dataclass(frozen=True)
class Path:
    """A line or an outline; `look` names its style classes."""

    look: str
    d: str


@dataclass(frozen=True)
class Box:
    """A filled cell; `hint` is shown where the reader points at it."""

    look: str
    x: float
    y: float
    width: float
    height: float
    hint: str


@dataclass(frozen=True)
class Words:
    """Text at a point: `start`, `middle` or `end` of it lies there."""

    look: str
    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True)
class Series:
    """How one variant is drawn: the style class with its colour and dash, and the symbol of its marks."""

    look: str
    symbol: str


@dataclass(frozen=True)
class Drawing:
    """One drawing, painted in the order of its parts.

    Attributes:
        axes: what runs across and what up, with units.
        height: in its own units; see `WIDTH`.
        parts: what is painted.
        variants: whose marks need a key; empty where none does.
        note: what was left out; empty where nothing was.
    """

    axes: str
    height: float
    parts: tuple[Path | Box | Words, ...]
    variants: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """Values to coordinates, linearly: `low` lies at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


_TINY = 1e-300
"""Below this a step has no power of ten of its own: the numbers are as good as equal."""


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values that enclose `low` to `high`; the first and the last are the ends of an axis."""
    if not high - low > max(1e-9 * max(abs(low), abs(high)), _TINY):
        high = low + (abs(low) if abs(low) > _TINY else 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


def left_out(shown: int, there: int, noun: str) -> str:
    """That not everything is drawn; empty where everything is."""
    return f"{shown} of {there} {noun} are drawn; the JSON report has all numbers." if shown < there else ""


def titled(value: str, unit: str) -> str:
    """What an axis shows, with its unit in brackets where it has one."""
    return f"{value} ({unit})" if unit else value


def number_text(value: float) -> str:
    """A value at an axis: short, never in more digits than an axis needs."""
    return f"{value:.4g}"


def cut(text: str, longest: int) -> str:
    """A name that fits into its place, safe to show; what is cut off ends in an ellipsis."""
    clean = printable(text)
    return clean if len(clean) <= longest else f"{clean[: longest - 1]}…"


def polyline(points: Sequence[tuple[float, float] | None]) -> str:
    """Path data through points; None is a gap."""
    commands, is_drawing = [], False
    for point in points:
        if point is None:
            is_drawing = False
            continue
        commands.append(f"{'L' if is_drawing else 'M'}{point[0]:.1f} {point[1]:.1f}")
        is_drawing = True
    return " ".join(commands)


_SHAPES = {
    "circle": "a3.4 3.4 0 1 0 6.8 0 a3.4 3.4 0 1 0 -6.8 0z",
    "square": "v-3.2h6.4v6.4h-6.4z",
    "diamond": "l4.4 -4.4 l4.4 4.4 l-4.4 4.4z",
    "triangle-up": "m0 3.4 l4.2 -7.4 l4.2 7.4z",
    "triangle-down": "m0 -3.4 l4.2 7.4 l4.2 -7.4z",
    "star": "h8.4 m-4.2 -4.2 v8.4 m-3 -7.2 l6 6 m0 -6 l-6 6",
    "cross": "h8 m-4 -4 v8",
    "x": "m1 -3 l6 6 m0 -6 l-6 6",
}
_HALF = {"circle": 3.4, "square": 3.2, "diamond": 4.4, "triangle-up": 4.2, "triangle-down": 4.2, "star": 4.2}


def mark(symbol: str, x: float, y: float) -> str:
    """Path data of a symbol around a point; symbols without a shape of their own are circles."""
    known = symbol if symbol in _SHAPES else "circle"
    return f"M{x - _HALF.get(known, 4.0):.1f} {y:.1f} {_SHAPES[known]}"
