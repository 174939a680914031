"""The headline of a run as HTML: a coloured sentence, a tile for every model, and the gap as a bar.

The classes are those of `headline.css`, which reads its colours from variables; the bar has those of charts.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Callable, Iterator
from importlib.resources import files

from markupsafe import Markup

from driftlens.base.intervals import Interval
from driftlens.base.variants import part_of, title
from driftlens.findings.reading import estimate, is_measured, printable, signs, unbroken, written
from driftlens_reports.charts.theme import Palette, palette
from driftlens_reports.content import Estimate, Headline

_EDGE, _SPAN = 2.0, 96.0
"""Percent of the bar's width: left of its scale, and the scale."""
_MIDDLE, _THICK = 16, 10
_TICK = 42
"""Pixels: height of the bar's middle, its thickness, and the foot of the numbers below."""
STYLE = files(__package__).joinpath("headline.css").read_text("utf-8")
"""Rules for the block; the colours that they name are a page's own."""


def style(theme: Palette) -> str:
    """Rules for the block in one theme."""
    colours = {"surface": theme.surface, "grid": theme.grid, "quiet": theme.quiet, **theme.tones}
    variables = "".join(f"--{name}:{colour};" for name, colour in colours.items())
    return f".headline{{{variables}}}{STYLE}"


def block(head: Headline, *, dark: bool = False) -> Markup:
    """The sentence, the tiles and the bar; whatever came with the run is escaped."""
    theme = palette(dark)
    so_far = Markup('<p class="so-far">{}</p>').format(head.so_far) if head.so_far else ""
    tiles = Markup("").join(_tile(head, variant, theme) for variant in head.tiles)
    return Markup(
        '<section class="headline {}"><p class="says">{}</p>{}<dl class="tiles">{}</dl>{}</section>'
    ).format(head.tone, unbroken(signs(printable(head.text))), so_far, tiles, bar(head, dark=dark))


def as_images(html: Markup) -> str:
    """The same with drawings as images, for a host that takes no drawing inside a page."""

    def image(drawing: re.Match[str]) -> str:
        label = re.search(r'aria-label="([^"]*)"', drawing[0])
        look = re.search(r'class="([^"]*)"', drawing[0])
        data = base64.b64encode(drawing[0].encode()).decode()
        alt, name = (match[1] if match else "" for match in (label, look))
        return f'<img class="{name}" alt="{alt}" src="data:image/svg+xml;base64,{data}">'

    return re.sub(r"<svg .*?</svg>", image, str(html))


def shown_alone(head: Headline, *, dark: bool = False) -> str:
    """The block with its rules, for a host that has none of its own."""
    return f"<style>{style(palette(dark))}</style>{as_images(block(head, dark=dark))}"


def called(variant: str) -> str:
    """What a tile calls a model."""
    return "experts" if variant == "expert" else title(variant)


def _tile(head: Headline, variant: str, theme: Palette) -> Markup:
    mean = _interval(head.tiles[variant])
    text, _, ends = estimate(mean, head.kind).partition(" (")
    dot = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="drawing dot" width="11" height="11" aria-hidden="true">'
        '<circle cx="5.5" cy="5.5" r="5.5" fill="{}"/></svg>'
    ).format(_colour(theme, variant))
    name = printable(called(variant))
    return Markup(
        '<div class="tile"><dt title="{}">{}{}</dt><dd class="value">{}</dd><dd class="ends">{}</dd></div>'
    ).format(name, dot, name, unbroken(text), unbroken(ends.removesuffix(")")) or head.measure)


def _colour(theme: Palette, variant: str) -> str:
    """As style sheets of pages look for it, which give it a twin in the dark."""
    return theme.roles[part_of(variant)][0].lower()


def _interval(mean: Estimate) -> Interval:
    return Interval(mean.value, *(math.nan if end is None else end for end in (mean.low, mean.high)), mean.n)


def reach(head: Headline) -> tuple[float, float]:
    """Both ends of the bar's scale: the numbers with their intervals, and of shares whole tenths around them."""
    ends = [end for mean in head.tiles.values() for end in _interval(mean).ends if is_measured(end)]
    low, high = min(ends), max(ends)
    if head.kind == "share":
        low, high = math.floor(10 * low + 1e-9) / 10, math.ceil(10 * high - 1e-9) / 10
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def bar(head: Headline, *, dark: bool = False) -> Markup:
    """Every model on one scale: thick, in its colour, what the repair moved, and grey what is left to the experts."""
    if len(head.tiles) < 2:
        return Markup("")
    theme, (low, high) = palette(dark), reach(head)

    def place(value: float) -> float:
        return _EDGE + _SPAN * (value - low) / (high - low)

    text = ", ".join(f"{called(name)} {written(mean.value, head.kind)}" for name, mean in head.tiles.items())
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="drawing bar" role="img" aria-label="{}" width="100%" '
        'height="46">{}</svg>'
    ).format(
        printable(f"{head.measure} on one scale: {text}"),
        Markup("").join(_marks(head, theme, place, (low, high))),
    )


def _marks(
    head: Headline, theme: Palette, place: Callable[[float], float], scale: tuple[float, float]
) -> Iterator[Markup]:
    line = Markup('<rect x="{}%" y="{}" width="{}%" height="{}" fill="{}" rx="2"/>')
    yield line.format(_EDGE, _MIDDLE - 1, _SPAN, 2, theme.grid.lower())
    parts = {part_of(name): (name, mean.value) for name, mean in head.tiles.items()}
    ends = [parts[part] for part in ("merged", "calibrated", "expert") if part in parts]
    for (_, start), (name, end) in itertools.pairwise(ends):
        colour = theme.gap.lower() if name == "expert" else _colour(theme, name)
        left, width = min(place(start), place(end)), abs(place(end) - place(start))
        yield line.format(f"{left:.2f}", _MIDDLE - _THICK / 2, f"{width:.2f}", _THICK, colour)
    for name, mean in head.tiles.items():
        colour, interval = _colour(theme, name), _interval(mean)
        if is_measured(interval.low):
            width = place(interval.high) - place(interval.low)
            yield line.format(f"{place(interval.low):.2f}", _MIDDLE - 1.5, f"{width:.2f}", 3, colour)
        yield Markup('<circle cx="{}%" cy="{}" r="7" fill="{}" stroke="{}" stroke-width="2"/>').format(
            f"{place(interval.value):.2f}", _MIDDLE, colour, theme.surface.lower()
        )
    for value, anchor, side in zip(scale, ("start", "end"), (_EDGE, _EDGE + _SPAN), strict=True):
        yield Markup(
            '<text x="{}%" y="{}" text-anchor="{}" font-size="12" font-family="sans-serif" fill="{}">{}</text>'
        ).format(side, _TICK, anchor, theme.quiet.lower(), written(value, head.kind))
