"""Traces of a chart as marks of matplotlib: lines and bands, points, bars, cells."""

from __future__ import annotations

import html
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

GUIDE = "_guide"
"""Label of lines that stand for no measurement: zero lines, diagonals, defaults."""

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
SYMBOLS = {
    **{"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v"},
    **{"star": "*", "cross": "P", "x": "X", "hexagon": "h", "pentagon": "p", "bowtie": "d"},
}
_HATCHES = {"": "", "/": "////", "\\": "\\\\\\\\", "x": "xxx", "-": "---", "|": "|||", "+": "+++", ".": ".."}
_SIDES = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
"""Which side of a text stands at its point, by where the text stands; else its middle."""
_INK = "#1B1B1B"
"""Of what a chart gives no colour."""
_BESIDE = 0.58
"""How far off the middle of a bar with a number whiskers stand, in parts of its width: outside, above and below it."""
_MANY = 12
"""Points beyond which long names are cut, which would run over others."""
_SHADES = 64
"""Of a continuous scale: more than an eye tells apart, few enough for a colour bar of shapes."""
_RGBA = re.compile(r"rgba?\(([^)]*)\)")


@dataclass
class Panel:
    """Axes while they are filled, with the chart's `settings`; `inside`: texts and the boxes they must fit into."""

    axes: Axes
    settings: Mapping[str, Any]
    names: dict[str, list[str]] = field(default_factory=dict)
    inside: list[tuple[Text, Bbox]] = field(default_factory=list)
    stacked: dict[tuple[float, bool], float] = field(default_factory=lambda: defaultdict(float))

    def places(self, letter: str, values: Any) -> NDArray[np.float64]:
        """Values along an axis as numbers; NaN for gaps, and the place among names for a name."""
        entries = [] if values is None else list(values)
        names = self.names.setdefault(letter, list(self.settings[letter].categoryarray or ()))
        names += [name for name in dict.fromkeys(entries) if isinstance(name, str) and name not in names]
        return np.array(
            [names.index(v) if isinstance(v, str) else math.nan if v is None else v for v in entries], float
        )


def plain(text: str | None) -> str:
    """A chart's text as a reader sees it."""
    return html.unescape((text or "").replace("<br>", "\n"))


def colour(css: str) -> Any:
    """A colour of a chart as matplotlib takes it."""
    rgba = _RGBA.fullmatch(css)
    if not rgba:
        return css
    *channels, alpha = [float(part) for part in f"{rgba[1]},1".split(",")[:4]]
    return (*(channel / 255 for channel in channels), alpha)


def line_style(line: Any) -> dict[str, Any]:
    """Colour, width and dash of a chart's line."""
    dash = line.dash or "solid"
    lengths = [float(length.removesuffix("px")) / 2 for length in dash.split(",")] if "," in dash else []
    return {
        "color": colour(line.color) if line.color else None,
        "linewidth": rcParams["lines.linewidth"] * (_CURVE if line.width is None else line.width) / _CURVE,
        "linestyle": (0, tuple(lengths)) if lengths else _DASHES[dash],
    }


def marker_style(marker: Any) -> dict[str, Any]:
    """How all points of a trace are marked, for a line or a legend."""
    symbol = marker.symbol if isinstance(marker.symbol, str) else "circle"
    shown = colour(marker.color) if isinstance(marker.color, str) else _INK
    return {
        "marker": SYMBOLS.get(symbol.removesuffix("-open"), "o"),
        "markersize": rcParams["lines.markersize"] * (marker.size or _MARKER) / _MARKER,
        "markerfacecolor": "none" if symbol.endswith("-open") else shown,
        "markeredgecolor": shown,
        "markeredgewidth": rcParams["axes.linewidth"],
    }


def bar_style(marker: Any) -> dict[str, Any]:
    """Colour, or one for each bar, edge and hatch of the bars of a trace."""
    pattern = marker.pattern
    fill = pattern.bgcolor or (_INK if marker.color is None else marker.color)
    return {
        "facecolor": colour(fill) if isinstance(fill, str) else [colour(entry) for entry in fill],
        # An edge of no width leaves the hatch in its colour.
        "edgecolor": pattern.fgcolor or (marker.line.color if marker.line.width else "white"),
        "linewidth": (marker.line.width or 0) * rcParams["axes.linewidth"],
        "hatch": _HATCHES.get(pattern.shape or "", ""),
    }


def legend_sample(trace: Any) -> Artist:
    """How a legend shows a trace."""
    return Patch(**bar_style(trace.marker)) if trace.type == "bar" else Line2D([], [], **_style(trace))


def _style(trace: Any) -> dict[str, Any]:
    """How a trace of lines, points or both is drawn."""
    mode = trace.mode or "lines"
    style = line_style(trace.line) if "lines" in mode else {"linestyle": ""}
    return {"marker": "", **style, **(marker_style(trace.marker) if "markers" in mode else {})}


def add_scatter(panel: Panel, trace: Any, shift: float) -> None:
    """A line, a band or points, with whiskers and names; `shift` sets points of one name apart."""
    axes, mode = panel.axes, trace.mode or "lines"
    x, y = panel.places("x", trace.x) + shift, panel.places("y", trace.y)
    for letter, error in (("x", trace.error_x), ("y", trace.error_y)):
        _whiskers(axes, letter, x, y, error)
    if trace.fill == "toself":
        for part in np.split(np.column_stack([x, y]), np.flatnonzero(np.isnan(x))):
            corners = part[~np.isnan(part).any(axis=1)]
            axes.fill(*corners.T, color=colour(trace.fillcolor), linewidth=0)
    elif "markers" in mode and not all(
        isinstance(part, str | None) for part in (trace.marker.color, trace.marker.symbol)
    ):
        _single_points(axes, x, y, trace.marker)
    else:
        axes.plot(x, y, alpha=(trace.opacity or 1) * (trace.marker.opacity or 1), **_style(trace))
    if "text" in mode:
        _names(axes, x, y, trace)


def add_bars(panel: Panel, trace: Any, shift: float, width: float, *, is_stacked: bool) -> None:
    """Bars, each with what is written in it; those of a stack go on from what stands there."""
    along, across = ("y", "x") if trace.orientation == "h" else ("x", "y")
    places, lengths = panel.places(along, trace[along]), panel.places(across, trace[across])
    starts = np.zeros_like(lengths) if trace.base is None else np.asarray(trace.base, float)
    if is_stacked:
        for index, (place, length) in enumerate(zip(places, lengths, strict=True)):
            starts[index] = panel.stacked[place, length < 0]
            panel.stacked[place, length < 0] += np.nan_to_num(length)
    style = bar_style(trace.marker)
    widths = width if trace.width is None else trace.width
    draw, begin = (panel.axes.barh, "left") if across == "x" else (panel.axes.bar, "bottom")
    bars = draw(places + shift, lengths, widths, **{begin: starts}, **style)
    is_written = trace.text is not None and trace.textposition == "inside"
    # Whiskers in one line could not be told apart, and would cross what is written.
    beside = _BESIDE * np.asarray(widths) * np.resize([-1, 1], len(lengths)) if is_written else 0.0
    ends = (starts + lengths, places + shift + beside)
    _whiskers(panel.axes, across, *(ends if across == "x" else ends[::-1]), trace[f"error_{across}"])
    if is_written:
        inks = trace.insidetextfont.color
        inks = np.broadcast_to("#000000" if inks is None else inks, len(bars))
        for bar, text, ink in zip(bars, trace.text, inks, strict=True):
            box = Bbox.from_bounds(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height())
            _write_inside(panel, box, plain(text), ink)


def add_cells(panel: Panel, trace: Any, shades: ScalarMappable) -> None:
    """Cells of a heatmap in the colours of `shades`; a cell without a number stays empty."""
    x, y, values = panel.places("x", trace.x), panel.places("y", trace.y), np.asarray(trace.z, float)
    edges = (np.append(places - 0.5, places[-1] + 0.5) for places in (x, y))
    panel.axes.pcolormesh(
        *edges,
        np.ma.masked_invalid(values),
        cmap=shades.cmap,
        norm=shades.norm,
        edgecolors="white",
        linewidth=rcParams["axes.linewidth"],
    )


def shades_of(scale: Any) -> ScalarMappable:
    """The colours that a chart's scale gives to numbers."""
    stops = [(stop, colour(shade)) for stop, shade in scale.colorscale]
    colours = LinearSegmentedColormap.from_list("chart", stops, N=_SHADES)
    return ScalarMappable(Normalize(scale.cmin, scale.cmax), colours)


def number(value: float, form: str) -> str:
    """A number as plotly writes it in a format such as `.3~g` or `.0~%`."""
    digits = int((re.search(r"\.(\d+)", form) or "03")[1])
    if form.endswith("%"):
        text = f"{100 * value:.{digits}f}"
        text = f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"
    else:
        is_long = 10**digits <= abs(value) < 1e6
        text = f"{value:.0f}" if is_long else f"{value:.{digits}g}"
    return re.sub(r"^-(?!0( %)?$)", "\N{MINUS SIGN}", text).removeprefix("-")


def _single_points(axes: Axes, x: NDArray[Any], y: NDArray[Any], marker: Any) -> None:
    """Points that have colours or symbols of their own."""
    symbols = np.broadcast_to(marker.symbol or "circle", x.shape)
    if marker.colorscale is None:
        colours = _INK if marker.color is None else marker.color
        inks = np.array([colour(ink) for ink in np.broadcast_to(colours, x.shape)], dtype=object)
    else:
        inks = shades_of(marker).to_rgba(np.asarray(marker.color, float))
    for symbol in dict.fromkeys(symbols):
        chosen = (symbols == symbol) & ~np.isnan(x) & ~np.isnan(y)
        style = marker_style(marker)
        axes.scatter(
            x[chosen],
            y[chosen],
            s=style["markersize"] ** 2,
            c=list(inks[chosen]),
            marker=SYMBOLS.get(symbol, "o"),
            linewidths=style["markeredgewidth"],
            alpha=marker.opacity,
        )


def _names(axes: Axes, x: NDArray[Any], y: NDArray[Any], trace: Any) -> None:
    """The name of every point on the side that the chart says."""
    for across, along, text, side in zip(
        x, y, trace.text, np.broadcast_to(trace.textposition, x.shape), strict=True
    ):
        above, beside = side.split()
        away = 6 if above == "middle" else 3  # at the height of the mark, or past its corner
        offset = {"left": -away, "right": away}.get(beside, 0), {"bottom": -3, "top": 3}.get(above, 0)
        name = plain(text)
        name = f"{name[:11]}…" if len(x) > _MANY and len(name) > 12 else name
        note = axes.annotate(name, (across, along), offset, textcoords="offset points")
        note.set(ha=_SIDES.get(beside, "center"), va=_SIDES.get(above, "center"))


def _whiskers(axes: Axes, letter: str, x: NDArray[Any], y: NDArray[Any], error: Any) -> None:
    if error.array is None:
        return
    up = np.array(error.array, float)
    down = up if error.arrayminus is None else np.array(error.arrayminus, float)
    style = {"color": error.color, "linewidth": (error.thickness or 1) * rcParams["axes.linewidth"]}
    if letter == "x":
        axes.hlines(y, x - down, x + up, **style)
    else:
        axes.vlines(x, y - down, y + up, **style)


def _write_inside(panel: Panel, box: Bbox, text: str, ink: str) -> None:
    middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    written = panel.axes.text(*middle, text, ha="center", va="center_baseline", color=ink)
    written.set_in_layout(False)
    panel.inside.append((written, box))
