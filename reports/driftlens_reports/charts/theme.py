"""How every chart looks: colours by role (Okabe-Ito, 3:1 from their background), a layout, and marks of variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.results.formatting import percent
from driftlens.utils.variants import Part, part_of
from driftlens_reports.charts.words import labels, literal, shown

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
SIZE, SMALL = 13, 11
"""Font sizes in pixels: titles and legend; ticks and panel text."""

NUMBER, SHARE = ".3~g", ".1~%"
"""Formats of hovered numbers: three significant digits; a fraction as a percentage."""
TICK_NUMBER, TICK_SHARE = ".3~g", ".0~%"
"""The same for axis ticks."""


@dataclass(frozen=True)
class Palette:
    """Colours of one theme.

    `roles`: by part the shades of its variants; `gap`: where a heatmap has no number; `tones`: of sentences.
    """

    surface: str
    ink: str
    quiet: str
    grid: str
    gap: str
    roles: Mapping[Part, Sequence[str]]
    sequential: Sequence[str]
    diverging: Sequence[str]
    tones: Mapping[str, str]


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
    tones={"good": "#00694B", "mixed": "#7A5C00", "bad": "#B3261E"},
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
    tones={"good": "#5FD0A5", "mixed": "#F0C75E", "bad": "#FF9A8A"},
)
CLASSES = (
    ("#0072B2", "#D55E00", "#00805D", "#B0407F", "#6D1FD0", "#7A5C00", "#1B1B1B"),
    ("#56B4E9", "#E69F00", "#2FC79A", "#E08BC0", "#B08CFF", "#F0E442", "#EDEDED"),
)
"""Colours that tell classes apart in the light and the dark theme, beside their marks."""


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
    index = alike.index(variant) if variant in alike else 0
    return Look(*(marks[index % len(marks)] for marks in (palette(dark).roles[part], *_MARKS[part])))


def shade(colours: Sequence[str], share: float) -> str:
    """The colour at `share`, 0 the first and 1 the last, of a continuous scale of `colours`."""
    place = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    below = min(int(place), len(colours) - 2)
    pairs = zip(_channels(colours[below]), _channels(colours[below + 1]), strict=True)
    return "#" + "".join(f"{round(low + (place - below) * (high - low)):02X}" for low, high in pairs)


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
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))


def themed(*traces: Any, dark: bool, height: int, **settings: Any) -> go.Figure:
    """A figure with the theme's layout and `settings` over it, so many pixels high; it is as wide as there is room."""
    return go.Figure([*traces], merged(theme_layout(dark), {"height": height, **settings}))


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `old` with those of `new` over them, setting by setting."""
    both = {
        name: merged(old[name], new[name])
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
        "font": {"family": _FONT, "size": SMALL, "color": colours.ink},
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
            "font": {"family": _FONT, "size": SIZE, "color": colours.ink},
            "align": "left",
            "namelength": -1,
        },
        "hovermode": "closest",
    }


LARGE_MARKS = {"itemsizing": "constant"}
"""Settings of a legend whose marks are larger than the points of a cloud."""


class Trace(dict[str, Any]):
    """Settings of a trace, which plotly checks once, with its figure, and not whenever some are added."""

    def update(self, **settings: Any) -> Trace:  # type: ignore[override]
        """The trace itself with these settings over its own, setting by setting."""
        super().update(merged(self, settings))
        return self


scatter, bar, heatmap = (partial(Trace, type=kind) for kind in ("scatter", "bar", "heatmap"))

Ends = tuple["pd.Series[Any]", "pd.Series[Any]"]
"""The low and high ends of intervals, a row each."""

_MOST_SVG = 5000
"""Points that a browser still draws and moves smoothly as SVG; a figure of more draws them with WebGL.

Without a graphics processor a browser takes a quarter of a second and more to make ready for WebGL, as long as for
these as SVG; and a page may hold few figures that use it.
"""


@dataclass(frozen=True)
class Brush:
    """Draws the variants of a run in one figure: each in its own look, and named in the legend once."""

    variants: Sequence[str]
    dark: bool
    _in_legend: set[str] = field(default_factory=set, init=False)

    @property
    def palette(self) -> Palette:
        """The theme's colours."""
        return palette(self.dark)

    def look(self, variant: str) -> Look:
        """How a variant is drawn."""
        return look(self.variants, variant, dark=self.dark)

    def named(self, group: str, name: str = "") -> dict[str, Any]:
        """Settings of a trace that the legend names once per group, by default a variant, and hides with it."""
        is_first = group not in self._in_legend
        self._in_legend.add(group)
        return {"name": name or shown(group), "legendgroup": group, "showlegend": is_first}

    def line(
        self, variant: str, x: Iterable[Any], y: pd.Series[Any], ends: Ends | None = None, **changes: Any
    ) -> Trace:
        """A variant's values, joined by a line that breaks at a gap, with whiskers from `ends` if given."""
        style, values = self.look(variant), y.astype(float)
        trace = scatter(
            **{"x": list(x), "y": gapped(values), "mode": "lines+markers", "connectgaps": False},
            line={"color": style.colour, "dash": style.dash, "width": 2},
            marker={"color": style.colour, "symbol": style.symbol, "size": 6},
            error_y=whiskers(values, *ends, style.colour) if ends else None,
            **self.named(variant),
        )
        return trace.update(**changes)

    def bars(
        self, variant: str, x: Iterable[Any], y: pd.Series[Any], ends: Ends | None = None, **changes: Any
    ) -> Trace:
        """A variant's values as bars in its colour, with the hatch that tells it from others without colour."""
        values, look = y.astype(float), {"marker": _hatched(self.look(variant)), "textposition": "none"}
        if ends is not None:
            look["error_y"] = whiskers(values, *ends, self.palette.ink)
        return bar(x=list(x), y=gapped(values), **look, **self.named(variant)).update(**changes)

    def cloud(
        self, variant: str, x: pd.Series[Any], y: pd.Series[Any], *, total: int, **settings: Any
    ) -> Trace:
        """A variant's samples as points; `total` in the whole figure decides what draws them."""
        kind, style = "scatter" if total <= _MOST_SVG else "scattergl", self.look(variant)
        marker = {
            "color": style.colour,
            "symbol": style.symbol,
            "size": 5,
            "opacity": 0.7,
            "line": {"width": 0},
        }
        places = {"x": x.to_numpy(dtype=float), "y": y.to_numpy(dtype=float)}
        trace = Trace(type=kind, **places, mode="markers", marker=marker, **self.named(variant))
        return trace.update(**settings)


def gapped(values: Iterable[Any]) -> list[Any]:
    """The values with None for what was not measured: a line breaks there, and a bar is left out."""
    return [None if pd.isna(value) else value for value in values]


def whiskers(
    values: pd.Series[Any], low: pd.Series[Any], high: pd.Series[Any], colour: str
) -> dict[str, Any]:
    """Whiskers from `low` to `high` around the values; none where an end is missing: no length claims certainty."""
    up, down = high.astype(float) - values, values - low.astype(float)
    return {"array": gapped(up), "arrayminus": gapped(down), "color": colour, "thickness": 1, "width": 3}


def interval_texts(
    rows: pd.DataFrame,
    low: str,
    high: str,
    said: str = "95 % interval",
    write: Callable[[float], str] = percent,
) -> list[str]:
    """A line of hover text with both ends for each row; empty where they are not measured."""
    ends = rows.reindex(columns=[low, high]).astype(float).to_numpy().tolist()
    return [
        "" if math.isnan(start + end) else f"<br>{literal(f'{said}: {write(start)} to {write(end)}')}"
        for start, end in ends
    ]


def _hatched(style: Look) -> dict[str, Any]:
    """How a variant's bars are filled: its colour, and the hatch that tells it from others without colour."""
    pattern = {"shape": style.hatch, "fillmode": "overlay", "size": 6, "solidity": 0.25}
    return {"color": style.colour, "pattern": pattern}


def colour_bar(**settings: Any) -> dict[str, Any]:
    """A bar that says what colours stand for, beside the panels."""
    return {"thickness": 14, "outlinewidth": 0, **settings}


def category_axis(names: Sequence[str]) -> dict[str, Any]:
    """Settings of an axis of names, in their order, long ones cut."""
    shown = [literal(name) for name in names]
    return {
        **{"type": "category", "categoryorder": "array", "categoryarray": shown},
        **{"tickvals": shown, "ticktext": labels(names), "showgrid": False},
    }


def ink(*, dark: bool) -> dict[str, Any]:
    """The font of words inside a figure."""
    return {"size": SMALL, "color": palette(dark).ink}


def literal_column(names: pd.Series[Any]) -> pd.Series[Any]:
    """Every name of a column as plotly shows it character by character; each is made safe once."""
    safe = {name: literal(str(name)) for name in names.unique()}
    return names.map(safe).astype(object)
