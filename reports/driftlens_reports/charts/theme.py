"""How every chart looks: colours by role in light and dark, marks that tell variants apart without colour, a layout.

Role colours are of the Okabe-Ito family: apart under simulated deuteranopia and protanopia, 3:1 from their background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from driftlens.base.variants import Part, part_of

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
SIZE, SMALL = 13, 11
"""Font sizes in pixels: titles and legend; ticks and panel text."""

NUMBER, SHARE = ".3~g", ".1~%"
"""Formats of hovered numbers: three significant digits; a fraction as a percentage."""
TICK_NUMBER, TICK_SHARE = ".3~g", ".0~%"
"""The same for axis ticks."""


@dataclass(frozen=True)
class Palette:
    """Colours of one theme.

    `gap` is where a heatmap has no number; `roles` has, by part, the shades of its first, second and third variant. The
    lightness of `sequential` runs one way, from near the surface; `diverging` is blue below zero and orange above.
    """

    surface: str
    ink: str
    quiet: str
    grid: str
    gap: str
    roles: Mapping[Part, Sequence[str]]
    sequential: Sequence[str]
    diverging: Sequence[str]


LIGHT = Palette(
    surface="#FFFFFF",
    ink="#1B1B1B",
    quiet="#595959",
    grid="#E3E3E3",
    gap="#D0D0D0",
    roles={
        "base": ("#0F4D25",),
        "expert": ("#0072B2",),
        "merged": ("#6B6B6B",),
        "calibrated": ("#D55E00", "#8A3B00", "#B07800"),
        "baseline": ("#6D1FD0", "#3F0E80", "#A3439B"),
    },
    sequential=("#FBF3E0", "#F3CF92", "#E89B57", "#C8603C", "#8A3142", "#3F1538"),
    diverging=("#0B2A5B", "#2F6DB0", "#A9CBE6", "#F6F6F6", "#F9C79B", "#EE8A3C", "#C55200"),
)
DARK = Palette(
    surface="#161616",
    ink="#EDEDED",
    quiet="#B0B0B0",
    grid="#363636",
    gap="#4A4A4A",
    roles={
        "base": ("#2F8F4A",),
        "expert": ("#56B4E9",),
        "merged": ("#B8B8B8",),
        "calibrated": ("#E69F00", "#FFD98A", "#D9772B"),
        "baseline": ("#A45CF2", "#CFAAFF", "#E07BD0"),
    },
    sequential=("#24182E", "#552449", "#913A4A", "#CC663F", "#EBA45F", "#FBE9BE"),
    diverging=("#7FB4F0", "#3F7CC4", "#1F416B", "#232323", "#7A3E10", "#CF7420", "#FFC98A"),
)


def palette(dark: bool) -> Palette:
    """The colours of the dark or the light theme."""
    return DARK if dark else LIGHT


@dataclass(frozen=True)
class Look:
    """How one variant is drawn: its colour, and the marks that tell it from others without colour."""

    colour: str
    symbol: str
    dash: str
    hatch: str


_MARKS: Mapping[Part, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "base": (("triangle-up",), ("dot",), (".",)),
    "expert": (("circle",), ("longdash",), ("x",)),
    "merged": (("square",), ("dash",), ("/",)),
    "calibrated": (
        ("diamond", "star", "hexagon", "bowtie"),
        ("solid", "10px,2px", "8px,2px,2px,2px"),
        ("", "-", "|"),
    ),
    "baseline": (
        ("triangle-down", "cross", "x", "pentagon"),
        ("dashdot", "longdashdot", "4px,2px"),
        ("\\", "+", "-"),
    ),
}
"""By part: symbols, dashes and hatches of its first, second and third variant, as with shades."""
GLYPHS = {
    **{"triangle-up": "▲", "circle": "●", "square": "■", "diamond": "◆"},
    **{"triangle-down": "▼", "star": "★", "cross": "✚", "x": "✖"},
}
"""Symbols as letters, as far as common fonts have them."""


def look(variants: Sequence[str], variant: str, *, dark: bool) -> Look:
    """How `variant` is drawn in a run with these `variants`, whichever a figure shows; up to twelve stay distinct."""
    part = part_of(variant)
    alike = [name for name in variants if part_of(name) == part]
    at = alike.index(variant) if variant in alike else 0
    return Look(*(marks[at % len(marks)] for marks in (palette(dark).roles[part], *_MARKS[part])))


def shade(colours: Sequence[str], share: float) -> str:
    """The colour at `share`, 0 the first and 1 the last, of a continuous scale of `colours`."""
    at = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    below = min(int(at), len(colours) - 2)
    pairs = zip(_channels(colours[below]), _channels(colours[below + 1]), strict=True)
    return "#" + "".join(f"{round(low + (at - below) * (high - low)):02X}" for low, high in pairs)


def readable(colour: str) -> str:
    """Black or white ink, whichever stands out more from `colour`; always by 4.5:1 or more."""
    linear = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(colour))
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if luminance > 0.179 else "#FFFFFF"  # where both contrast alike


def faded(colour: str, opacity: float) -> str:
    """`colour` (#RRGGBB) with an opacity in [0, 1], for bands and fills."""
    red, green, blue = _channels(colour)
    return f"rgba({red},{green},{blue},{opacity:g})"


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def apply_theme(figure: go.Figure, *, dark: bool, height: int) -> go.Figure:
    """`figure` itself, with the theme's layout and a height in pixels; it is as wide as there is room."""
    return lay_out(figure, {**theme_layout(dark), "height": height})


def lay_out(figure: go.Figure, settings: Mapping[str, Any]) -> go.Figure:
    """`figure` itself, its layout changed as `update_layout` would, many times faster for many panels."""
    layout = _merged(figure.layout.to_plotly_json(), settings)
    # A template is one thing: ours must not inherit from plotly's, which every new figure has.
    figure.layout = {**layout, "template": settings["template"]} if "template" in settings else layout
    return figure


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(old[name], new[name])
        for name in old.keys() & new.keys()
        if isinstance(old[name], Mapping) and isinstance(new[name], Mapping)
    }
    return {**old, **new, **both}


def theme_layout(dark: bool) -> dict[str, Any]:
    """The theme's layout settings; its axes follow a template."""
    colours = palette(dark)
    axis = {
        "gridcolor": colours.grid,
        "linecolor": colours.quiet,
        "zerolinecolor": colours.quiet,
        "zerolinewidth": 1,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": colours.quiet,
        "tickfont": {"size": SMALL, "color": colours.ink},
        "title": {"font": {"size": SMALL, "color": colours.ink}, "standoff": 8},
        "automargin": True,
    }
    return {
        "template": {"layout": {"xaxis": axis, "yaxis": axis}},
        "autosize": True,
        "font": {"family": FONT, "size": SMALL, "color": colours.ink},
        "paper_bgcolor": colours.surface,
        "plot_bgcolor": colours.surface,
        "margin": {"l": 68, "r": 16, "t": 24, "b": 52},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "top",
            "y": 1,
            "xanchor": "left",
            "x": 0,
            "font": {"size": SIZE},
            "bgcolor": faded(colours.surface, 0),
        },
        "hoverlabel": {
            "bgcolor": colours.surface,
            "bordercolor": colours.quiet,
            "font": {"family": FONT, "size": SIZE, "color": colours.ink},
            "align": "left",
            "namelength": -1,
        },
        "hovermode": "closest",
    }
