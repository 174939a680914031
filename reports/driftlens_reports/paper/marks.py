"""Traces of a chart as marks of matplotlib: lines and bands, points, bars, cells."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from driftlens_reports.charts.theme import readable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

_CURVE, _MARKER = 2.0, 6.0
"""Pixels of a chart's usual line and marker, which become those of the sheet."""
_DASHES: dict[str, Any] = {
    "solid": "-",
    "dot": (0, (1.2, 1.2)),
    "dash": (0, (4, 1.5)),
    "longdash": (0, (7, 2)),
    "dashdot": (0, (5, 1.5, 1, 1.5)),
    "longdashdot": (0, (9, 1.5, 1, 1.5)),
}
_SYMBOLS = {
    **{"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v"},
    **{"star": "*", "cross": "P", "x": "X", "hexagon": "h", "pentagon": "p", "bowtie": "d"},
}
_HATCHES = {"": "", "/": "////", "\\": "\\\\\\\\", "x": "xxx", "-": "---", "|": "|||", "+": "+++", ".": ".."}
_SIDES = {
    "left": "right",
    "right": "left",
    "top": "bottom",
    "bottom": "top",
    "center": "center",
    "middle": "center",
}
"""Which side of a text stands at its point, by where the text stands."""
_SHADES = 64
"""Of a continuous scale: more than an eye tells apart, few enough for a colour bar of shapes."""
_RGBA = re.compile(r"rgba?\(([^)]*)\)")


@dataclass
class Panel:
    """One pair of axes while it is being filled.

    Attributes:
        axes: where marks go.
        x: settings of the chart's x axis.
        y: those of its y axis.
        names: names along an axis of names, by its letter, in their order.
        inside: texts with the bar or cell that they have to fit into.
        stacked: how high bars of a stack are so far, by where they stand and their sign.
    """

    axes: Axes
    x: Any
    y: Any
    names: dict[str, list[str]] = field(default_factory=dict)
    inside: list[tuple[Text, Rectangle]] = field(default_factory=list)
    stacked: dict[tuple[float, bool], float] = field(default_factory=dict)

    def places(self, letter: str, values: Any) -> NDArray[np.float64]:
        """Values along an axis as numbers; NaN for gaps, and the place among names for a name."""
        given = [] if values is None else list(values)
        known = self.names.setdefault(letter, list((self.x if letter == "x" else self.y).categoryarray or ()))
        known += [name for name in dict.fromkeys(given) if isinstance(name, str) and name not in known]
        return np.array(
            [known.index(v) if isinstance(v, str) else math.nan if v is None else v for v in given], float
        )


def plain(text: str | None) -> str:
    """A chart's text as a reader sees it."""
    return html.unescape((text or "").replace("<br>", "\n"))


def colour(given: str) -> Any:
    """A colour of a chart as matplotlib takes it."""
    found = _RGBA.fullmatch(given)
    if not found:
        return given
    *channels, alpha = [float(part) for part in f"{found[1]},1".split(",")[:4]]
    return (*(channel / 255 for channel in channels), alpha)


def line_style(line: Any) -> dict[str, Any]:
    """Colour, width and dash of a chart's line."""
    dash = line.dash or "solid"
    lengths = [float(length.removesuffix("px")) / 2 for length in dash.split(",")] if "," in dash else []
    return {
        "color": colour(line.color) if line.color else None,
        "linewidth": _setting("lines.linewidth") * (_CURVE if line.width is None else line.width) / _CURVE,
        "linestyle": (0, tuple(lengths)) if lengths else _DASHES[dash],
    }


def marker_style(marker: Any) -> dict[str, Any]:
    """How all points of a trace are marked, for a line or a legend."""
    symbol = marker.symbol if isinstance(marker.symbol, str) else "circle"
    shown = colour(marker.color) if isinstance(marker.color, str) else "#000000"
    return {
        "marker": _SYMBOLS.get(symbol.removesuffix("-open"), "o"),
        "markersize": _setting("lines.markersize") * _size(marker) / _MARKER,
        "markerfacecolor": "none" if symbol.endswith("-open") else shown,
        "markeredgecolor": shown,
        "markeredgewidth": _setting("axes.linewidth"),
    }


def bar_style(marker: Any) -> dict[str, Any]:
    """Colour, edge and hatch of all bars of a trace."""
    pattern = marker.pattern
    fill = pattern.bgcolor or (marker.color if isinstance(marker.color, str) else None)
    return {
        "facecolor": colour(fill) if fill else None,
        # An edge of no width leaves the hatch in its colour.
        "edgecolor": pattern.fgcolor or (marker.line.color if marker.line.width else "white"),
        "linewidth": (marker.line.width or 0) * _setting("axes.linewidth"),
        "hatch": _HATCHES.get(pattern.shape or "", ""),
    }


def legend_sample(trace: Any) -> Artist:
    """How a legend shows a trace."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if trace.type == "bar":
        return Patch(**bar_style(trace.marker))
    mode = trace.mode or "lines"
    style = line_style(trace.line) if "lines" in mode else {"linestyle": ""}
    return Line2D([], [], **style, **(marker_style(trace.marker) if "markers" in mode else {}))


def add_scatter(panel: Panel, trace: Any, shift: float) -> None:
    """A line, a band or points, with whiskers and names; `shift` sets points of one name apart."""
    axes, mode = panel.axes, trace.mode or "lines"
    x, y = panel.places("x", trace.x) + shift, panel.places("y", trace.y)
    opacity = 1.0 if trace.opacity is None else trace.opacity
    if trace.fill == "toself":
        for part in np.split(np.column_stack([x, y]), np.flatnonzero(np.isnan(x))):
            corners = part[~np.isnan(part).any(axis=1)]
            axes.fill(corners[:, 0], corners[:, 1], color=colour(trace.fillcolor), linewidth=0)
    elif "lines" in mode:
        axes.plot(x, y, marker="", alpha=opacity, **line_style(trace.line))
    if "markers" in mode:
        _points(axes, x, y, trace.marker, opacity)
    if "text" in mode:
        _names(axes, x, y, trace)
    for letter, error in (("x", trace.error_x), ("y", trace.error_y)):
        _whiskers(axes, letter, x, y, error)


def add_bars(panel: Panel, trace: Any, shift: float, width: float, *, is_stacked: bool) -> None:
    """Bars, each with what is written in it; those of a stack go on from what stands there."""
    flat = trace.orientation == "h"
    along, across = ("y", "x") if flat else ("x", "y")
    given = {"x": trace.x, "y": trace.y}
    places, lengths = panel.places(along, given[along]), panel.places(across, given[across])
    starts = (
        np.zeros_like(lengths)
        if trace.base is None
        else np.broadcast_to(np.asarray(trace.base, float), lengths.shape)
    )
    if is_stacked:
        starts = np.array([_stack(panel, *pair) for pair in zip(places, lengths, strict=True)])
    style = bar_style(trace.marker)
    if style["facecolor"] is None:
        style["facecolor"] = [colour(entry) for entry in trace.marker.color]
    widths = width if trace.width is None else trace.width
    if flat:
        bars = panel.axes.barh(places + shift, lengths, widths, left=starts, **style)
    else:
        bars = panel.axes.bar(places + shift, lengths, widths, bottom=starts, **style)
    ends = starts + lengths
    _whiskers(
        panel.axes,
        across,
        *((ends, places + shift) if flat else (places + shift, ends)),
        getattr(trace, f"error_{across}"),
    )
    if trace.text is not None and trace.textposition == "inside":
        font = trace.insidetextfont
        inks = (
            font.color
            if isinstance(font.color, (list, tuple, np.ndarray))
            else [font.color or "#000000"] * len(ends)
        )
        for bar, text, ink in zip(bars, trace.text, inks, strict=True):
            _inside(panel, bar, text, ink)


def add_cells(panel: Panel, trace: Any, shades: Any) -> None:
    """Cells of a heatmap in the colours of `shades` (a ScalarMappable); a cell without a number stays empty."""
    from matplotlib.patches import Rectangle

    x, y = panel.places("x", trace.x), panel.places("y", trace.y)
    values = np.asarray(trace.z, float)
    gap = _setting("axes.linewidth")
    template = re.search(r"%\{z:(.*?)\}", trace.texttemplate or "")
    for at, value in np.ndenumerate(values):
        if math.isnan(value):
            continue
        fill = shades.to_rgba(value)
        cell = Rectangle(
            (x[at[1]] - 0.5, y[at[0]] - 0.5), 1, 1, facecolor=fill, edgecolor="white", linewidth=gap
        )
        panel.axes.add_patch(cell)
        if template:
            from matplotlib.colors import to_hex

            _inside(panel, cell, number(value, template[1]), readable(to_hex(fill)))
    panel.axes.update_datalim([(x.min() - 0.5, y.min() - 0.5), (x.max() + 0.5, y.max() + 0.5)])


def number(value: float, form: str) -> str:
    """A number as plotly writes it in a format such as `.3~g` or `.0~%`."""
    digits = int((re.search(r"\.(\d+)", form) or "03")[1])
    if form.endswith("%"):
        text, unit = f"{100 * value:.{digits}f}", " %"
        text = text.rstrip("0").rstrip(".") if "~" in form and "." in text else text
    else:
        is_long = abs(value) >= 10**digits
        text, unit = (f"{value:.0f}" if is_long and abs(value) < 1e6 else f"{value:.{digits}g}"), ""
    return f"{text}{unit}".replace("-", "\N{MINUS SIGN}")


def _points(axes: Axes, x: NDArray[Any], y: NDArray[Any], marker: Any, opacity: float) -> None:
    symbols = (
        marker.symbol
        if isinstance(marker.symbol, (list, tuple, np.ndarray))
        else [marker.symbol or "circle"] * len(x)
    )
    shades = None
    if marker.color is not None and not isinstance(marker.color, str):
        shades = np.array(point_colours(marker), dtype=object)
    edge = (
        _setting("axes.linewidth")
        if marker.line.width is None
        else marker.line.width * _setting("axes.linewidth")
    )
    for symbol in dict.fromkeys(symbols):
        chosen = np.array([entry == symbol for entry in symbols]) & ~np.isnan(x) & ~np.isnan(y)
        if not chosen.any():
            continue
        fill = colour(marker.color or "#000000") if shades is None else list(shades[chosen])
        is_open = symbol.endswith("-open")
        axes.scatter(
            x[chosen],
            y[chosen],
            s=(_setting("lines.markersize") * _size(marker) / _MARKER) ** 2,
            marker=_SYMBOLS.get(symbol.removesuffix("-open"), "o"),
            facecolor="none" if is_open else fill,
            edgecolor=fill if is_open else (marker.line.color or fill),
            linewidths=max(edge, _setting("axes.linewidth")) if is_open else edge,
            alpha=opacity * (1.0 if marker.opacity is None else marker.opacity),
            zorder=2.5,
        )


def point_colours(marker: Any) -> list[Any]:
    """The colour of each point of a trace whose points have colours of their own."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    if any(isinstance(entry, str) for entry in marker.color):
        return [colour(entry) for entry in marker.color]
    shades = ScalarMappable(Normalize(marker.cmin, marker.cmax), colour_map(marker.colorscale))
    return list(shades.to_rgba(np.asarray(marker.color, float)))


def colour_map(colourscale: Sequence[tuple[float, str]]) -> Any:
    """A chart's continuous scale."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = [(at, colour(shade)) for at, shade in colourscale]
    return LinearSegmentedColormap.from_list("chart", stops, N=_SHADES)


def _names(axes: Axes, x: NDArray[Any], y: NDArray[Any], trace: Any) -> None:
    sides = trace.textposition
    sides = [sides or "middle center"] * len(x) if sides is None or isinstance(sides, str) else sides
    for across, along, text, side in zip(x, y, trace.text, sides, strict=True):
        above, beside = side.split()
        offset = (
            3 * (beside == "right") - 3 * (beside == "left"),
            3 * (above == "top") - 3 * (above == "bottom"),
        )
        note = axes.annotate(plain(text), (across, along), offset, textcoords="offset points")
        note.set(ha=_SIDES[beside], va=_SIDES[above], fontsize="small")


def _whiskers(axes: Axes, letter: str, x: NDArray[Any], y: NDArray[Any], error: Any) -> None:
    if error is None or error.array is None:
        return
    up = np.array([math.nan if length is None else length for length in error.array], float)
    down = (
        up
        if error.arrayminus is None
        else np.array([math.nan if v is None else v for v in error.arrayminus], float)
    )
    style = {
        "color": error.color,
        "linewidth": (error.thickness or 1) * _setting("axes.linewidth"),
        "zorder": 2.6,
    }
    if letter == "x":
        axes.hlines(y, x - down, x + up, **style)
    else:
        axes.vlines(x, y - down, y + up, **style)


def _inside(panel: Panel, box: Rectangle, text: str, ink: str) -> None:
    x, y = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
    written = panel.axes.text(
        x, y, plain(text), ha="center", va="center_baseline", color=ink, fontsize="small"
    )
    written.set_in_layout(False)
    panel.inside.append((written, box))


def _stack(panel: Panel, place: float, length: float) -> float:
    """Where a bar of a stack begins."""
    key = (place, length < 0)
    start = panel.stacked.get(key, 0.0)
    panel.stacked[key] = start + (0.0 if math.isnan(length) else length)
    return start


def _size(marker: Any) -> float:
    return float(_MARKER if marker.size is None else np.max(marker.size))


def _setting(name: str) -> float:
    import matplotlib

    return float(matplotlib.rcParams[name])
