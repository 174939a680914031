"""A chart without a script: its plotly figure drawn with matplotlib, panel by panel."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from driftlens_reports.paper import marks
from driftlens_reports.paper.marks import Panel
from driftlens_reports.paper.style import settle

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_PANELS = 12
"""Panels beyond which a page only grows longer."""

_WIDTH, _FONT = 960.0, 11.0
"""Pixels: width and letters of a chart on a screen, from which its height follows on paper."""
_LETTER = 0.52
"""Width of an average letter, in parts of its height."""
_SAID = re.compile(r" \((%|ratio|count)\)$")
"""Units that ticks or words show anyway, which titles of axes on paper go without."""
_SAMPLE = 8
"""Letters that would fit into the room of a legend's sample and its gaps."""

Pair = tuple[str, str]
"""Names of a panel's x and y axis."""


def draw_static(chart: go.Figure, width: float) -> Figure:
    """The chart as a figure `width` inches wide, in the colours it has and otherwise in the current sheet's look."""
    figure = Figure(figsize=(width, height_of(chart, width)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = draw_panels(chart, figure)
    add_legend(figure, [chart])
    finish(figure, panels)
    return figure


def draw_panels(chart: go.Figure, figure: Figure | SubFigure) -> list[Panel]:
    """Draw lines, bands, points, bars and heatmaps into an empty figure or a part of one, without a legend."""
    places = _places(chart)
    panels = _empty_panels(figure, places[:MOST_PANELS])
    for pair, panel in panels.items():
        _fill(chart, pair, panel)
    for shape in chart.layout.shapes:
        panel = _panel_of(panels, shape)
        if panel is not None and shape.type == "line":
            _add_line(panel, shape)
    for panel in panels.values():
        for letter in ("x", "y"):
            _set_axis(panel, letter)
    _add_words(chart, figure, panels, places)
    _add_scales(chart, figure, panels)
    for panel in panels.values():
        _fit_words(panel)
    return list(panels.values())


def finish(figure: Figure, panels: Iterable[Panel]) -> None:
    """Lay the figure out for good, and leave out numbers that would run over the edges of their bars and cells."""
    settle(figure)
    for panel in panels:
        # Rows of cells touch each other, bars don't.
        part = 0.6 if any(isinstance(mark, QuadMesh) for mark in panel.axes.collections) else 1.2
        for text, box in panel.inside:
            room, needed = box.transformed(panel.axes.transData), text.get_window_extent()
            fits = needed.width <= 0.96 * abs(room.width) and needed.height <= part * abs(room.height)
            text.set_visible(fits)


def add_legend(figure: Figure, charts: Iterable[go.Figure]) -> None:
    """One legend for all charts of a figure, above its panels."""
    entries: dict[str, Any] = {}
    for chart in charts:
        is_wanted = chart.layout.showlegend is not False and (len(chart.data) > 1 or chart.layout.showlegend)
        for trace in chart.data:
            if is_wanted and trace.name and trace.showlegend is not False and trace.type != "heatmap":
                entries.setdefault(marks.plain(trace.name), trace)
    if not entries:
        return
    room = figure.get_figwidth() * 72 / (_LETTER * rcParams["legend.fontsize"])
    is_one_row = sum(len(name) + _SAMPLE for name in entries) <= room
    in_row = int(room / (max(map(len, entries)) + _SAMPLE))
    figure.legend(
        [marks.legend_sample(trace) for trace in entries.values()],
        list(entries),
        loc="outside upper left",
        ncols=len(entries) if is_one_row else max(1, in_row),
    )


def height_of(chart: go.Figure, width: float) -> float:
    """In inches: what is written as high as its letters ask for, panels between that and what the width asks for."""
    written = rcParams["font.size"] / 72 / _FONT
    drawn = (width / _WIDTH * written) ** 0.5
    places = _places(chart)[:MOST_PANELS]
    margins, height = chart.layout.margin, chart.layout.height
    inner = height - (margins.t or 0) - (margins.b or 0)
    panels = inner * sum({place.row: place.height for place in places}.values())
    left_out = inner * min(place.bottom for place in places)
    return float(drawn * panels + written * (height - panels - left_out))


def rough_size(axes: Axes) -> tuple[float, float]:
    """Width and height of axes before the layout, in inches."""
    box, part = axes.get_position(), axes.figure.bbox
    return box.width * part.width / axes.figure.dpi, box.height * part.height / axes.figure.dpi


class _Place:
    """Where a panel of a chart stands, in parts of the chart; `pair` names its axes."""

    def __init__(self, chart: go.Figure, pair: Pair) -> None:
        self.pair = pair
        self.settings = {name[0]: chart.layout[f"{name[0]}axis{name[1:]}"] for name in pair}
        (left, right), (self.bottom, self.top) = (
            axis.domain or (0.0, 1.0) for axis in self.settings.values()
        )
        self.row, self.column = -round(self.top, 3), round(left, 3)
        self.width, self.height, self.middle = right - left, self.top - self.bottom, (left + right) / 2


def _places(chart: go.Figure) -> list[_Place]:
    """Where every panel stands, in reading order."""
    axes = [axis for axis in chart.select_xaxes() if axis.visible is not False]
    pairs = [(axis.plotly_name.replace("axis", ""), axis.anchor or "y") for axis in axes]
    pairs += [_pair(trace) for trace in chart.data]
    places = [_Place(chart, pair) for pair in dict.fromkeys(pairs)]
    return sorted(places, key=lambda place: (place.row, place.column))


def _pair(trace: Any) -> Pair:
    return trace.xaxis or "x", trace.yaxis or "y"


def _empty_panels(figure: Figure | SubFigure, places: Sequence[_Place]) -> dict[Pair, Panel]:
    """Axes where the chart has its own, sharing what the chart's share."""
    heights = {place.row: place.height for place in places}
    widths = {place.column: place.width for place in sorted(places, key=lambda place: place.column)}
    ratios = {"height_ratios": list(heights.values()), "width_ratios": list(widths.values())}
    grid = figure.add_gridspec(len(heights), len(widths), **ratios)
    panels: dict[Pair, Panel] = {}
    for place in places:
        axes = figure.add_subplot(grid[list(heights).index(place.row), list(widths).index(place.column)])
        for name, share in zip(place.pair, (axes.sharex, axes.sharey), strict=True):
            wanted = {name, place.settings[name[0]].matches}
            lead = next((panel.axes for other, panel in panels.items() if wanted & set(other)), None)
            if lead is not None:
                share(lead)
        panels[place.pair] = Panel(axes, place.settings)
    return panels


def _fill(chart: go.Figure, pair: Pair, panel: Panel) -> None:
    """Draw the traces of one panel; bars and points of one name stand side by side where the chart says so."""
    layout = chart.layout
    traces = [trace for trace in chart.data if _pair(trace) == pair]
    bars, points = ([trace for trace in traces if trace.type.startswith(kind)] for kind in ("bar", "scatter"))
    for trace in traces:
        if trace.type == "heatmap":
            panel.axes.set_facecolor(marks.colour(layout.plot_bgcolor))
            marks.add_cells(panel, trace, marks.shades_of(layout[trace.coloraxis]))
        elif trace.type == "bar":
            room = (0.8 if layout.bargap is None else 1 - layout.bargap) * _spacing(panel, bars)
            is_grouped = layout.barmode in (None, "group") and trace.base is None and trace.width is None
            shift, width = _apart(trace, bars, room) if is_grouped else (0.0, room)
            width *= 1 - (layout.bargroupgap or 0)
            marks.add_bars(panel, trace, shift, width, is_stacked=layout.barmode == "stack")
        else:
            is_grouped = layout.scattermode == "group"
            marks.add_scatter(
                panel, trace, _apart(trace, points, 1 - (layout.scattergap or 0))[0] if is_grouped else 0.0
            )


def _apart(trace: Any, alike: Sequence[Any], room: float) -> tuple[float, float]:
    """How far a trace stands off the middle, and how wide it may be, where several stand side by side."""
    groups = list(dict.fromkeys(other.offsetgroup or other.legendgroup or id(other) for other in alike))
    width = room / len(groups)
    place = groups.index(trace.offsetgroup or trace.legendgroup or id(trace))
    return (place - (len(groups) - 1) / 2) * width, width


def _spacing(panel: Panel, bars: Sequence[Any]) -> float:
    """How far apart bars of one trace stand."""
    letter = "y" if bars[0].orientation == "h" else "x"
    places = np.concatenate([panel.places(letter, trace[letter]) for trace in bars])
    places = np.unique(places[~np.isnan(places)])
    return float(np.diff(places).min()) if len(places) > 1 else 1.0


def _panel_of(panels: Mapping[Pair, Panel], placed: Any) -> Panel | None:
    """The panel of a shape or an annotation; None where it belongs to none, or to one that is left out."""
    return panels.get((placed.xref.removesuffix(" domain"), placed.yref.removesuffix(" domain")))


def _transform(panel: Panel, placed: Any) -> Any:
    axes = panel.axes
    return blended_transform_factory(
        *(axes.transAxes if ref.endswith("domain") else axes.transData for ref in (placed.xref, placed.yref))
    )


def _add_line(panel: Panel, shape: Any) -> None:
    """A line across a panel that stands for no measurement."""
    style = {**marks.line_style(shape.line), "transform": _transform(panel, shape), "label": marks.GUIDE}
    ends = (shape.x0, shape.x1), (shape.y0, shape.y1)
    (line,) = panel.axes.plot(*ends, marker="", scalex=False, scaley=False, **style)
    line.set_zorder(3 if shape.layer == "above" else 1)


def _set_axis(panel: Panel, letter: str) -> None:
    """Scale, range, ticks and their labels, as the chart has them."""
    settings, axis = panel.settings[letter], getattr(panel.axes, f"{letter}axis")
    is_log = settings.type == "log"
    if is_log:
        panel.axes.set(**{f"{letter}scale": "log"})
    _set_range(panel, letter)
    names, form = panel.names.get(letter), settings.tickformat or ".4~g"
    values = settings.tickvals if settings.tickvals is not None else names
    if values is not None and len(values):
        texts = settings.ticktext
        if texts is None:
            texts = values if names else [marks.number(value, form) for value in values]
        axis.set_major_locator(FixedLocator(list(panel.places(letter, values))))
        axis.set_ticklabels([marks.plain(text) for text in texts])
    else:
        width, height = rough_size(panel.axes)
        most = int(2.2 * width if letter == "x" else 3.5 * height)
        bins = MaxNLocator(min(max(most, 2), 6), steps=[1, 2, 2.5, 5, 10])
        subs = (1.0, 2.0, 5.0) if settings.dtick == "D2" else (1.0,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=6) if is_log else bins)
        axis.set_major_formatter(lambda value, _: marks.number(value, form))
    axis.set_minor_locator(NullLocator())
    side = "bottom" if letter == "x" else "left"
    is_named = bool(names) or settings.ticktext is not None
    shown = {
        side: settings.ticks != "" and not is_named,
        f"label{side}": settings.showticklabels is not False,
    }
    panel.axes.tick_params(axis=letter, **shown)
    panel.axes.grid(settings.showgrid is not False and not is_named, axis=letter)


def _set_range(panel: Panel, letter: str) -> None:
    settings = panel.settings[letter]
    low, high = getattr(panel.axes, f"{letter}axis").get_view_interval()
    if settings.scaleanchor:
        panel.axes.set_aspect("equal", adjustable="box")
    if settings.range is not None:
        low, high = (10.0**end if settings.type == "log" else end for end in settings.range)
    elif panel.names.get(letter):
        low, high = -0.5, len(panel.names[letter]) - 0.5
    else:
        options = settings.autorangeoptions
        ends = [low, high, *(options.include if options.include is not None else ())]
        ends = [end for end in ends if end is not None and (end > 0 or settings.type != "log")]
        low = max([min(ends), *filter(None, [options.clipmin])])
        high = min([max(ends), *filter(None, [options.clipmax])])
        if settings.rangemode == "tozero":
            sharing = getattr(panel.axes, f"get_shared_{letter}_axes")().get_siblings(panel.axes)
            lowest = min(getattr(axes.dataLim, f"{letter}min") for axes in sharing)
            low, high = 0.0 if lowest >= 0 else low, max(high, 0.0)
    panel.axes.set(**{f"{letter}lim": (high, low) if settings.autorange == "reversed" else (low, high)})


def _add_words(
    chart: go.Figure, figure: Figure | SubFigure, panels: Mapping[Pair, Panel], places: Sequence[_Place]
) -> None:
    """Titles of panels and axes, words in panels, and how many panels are left out."""
    for entry in chart.layout.annotations:
        panel, words = _panel_of(panels, entry), marks.plain(entry.text)
        if panel is not None:
            text = panel.axes.text(entry.x, entry.y, words, transform=_transform(panel, entry))
            text.set(ha=entry.xanchor or "center", va=entry.yanchor or "center")
            text.set(fontsize="medium", in_layout=False)
        for place in places[: len(panels)] if entry.xref == "paper" else ():
            if np.allclose((entry.x, entry.y), (place.middle, place.top), atol=1e-3):
                panels[place.pair].axes.set_title(words)
    names = {
        pair: [_SAID.sub("", marks.plain(panel.settings[letter].title.text)) for letter in "xy"]
        for pair, panel in panels.items()
    }
    below = {x for x, _ in names.values() if x}
    is_common = len(below) == 1 and len(panels) > 1
    for pair, (x, y) in names.items():
        panels[pair].axes.set(xlabel="" if is_common else x, ylabel=y)
    lines = list(below) if is_common else []
    if len(panels) < len(places):
        lines.append(f"{len(panels)} of {len(places)} panels are drawn; the JSON report has all numbers.")
    if lines:
        figure.supxlabel("\n".join(lines), fontsize="medium")


def _fit_words(panel: Panel) -> None:
    """Titles over as many lines as their panel or axis asks for; long names along the x axis are slanted."""
    axes = panel.axes
    for axis, inches in zip((axes.xaxis, axes.yaxis), rough_size(axes), strict=True):
        letters = max(int(1.1 * inches * 72 / (_LETTER * axis.label.get_fontsize())), 12)
        lines = axis.label.get_text().split("\n")
        axis.label.set_text("\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines))
    letters = max(int(rough_size(axes)[0] * 72 / (_LETTER * axes.title.get_fontsize())), 12)
    axes.set_title(textwrap.fill(axes.get_title(loc="left"), letters, break_long_words=False))
    names = axes.get_xticklabels() if panel.names.get("x") else []
    if sum(len(name.get_text()) + 2 for name in names) * 0.055 > rough_size(axes)[0]:
        # Letters are as high as their lines are apart; steeper where names stand closer than that.
        step = rough_size(axes)[0] * 72 / len(names) / (1.15 * rcParams["xtick.labelsize"])
        axes.tick_params(axis="x", rotation=30 if step > 2 else 60 if step > 1.16 else 90)
        for name in names:
            name.set(ha="right", va="top" if step > 1.16 else "center", rotation_mode="anchor")


def _add_scales(chart: go.Figure, figure: Figure | SubFigure, panels: Mapping[Pair, Panel]) -> None:
    """A colour bar beside the panels of every scale."""
    scales: dict[str, tuple[Any, list[Axes]]] = {}
    for trace in chart.data:
        panel = panels.get(_pair(trace))
        if trace.type == "heatmap" and panel is not None:
            scales.setdefault(trace.coloraxis, (chart.layout[trace.coloraxis], []))[1].append(panel.axes)
        elif trace.type.startswith("scatter") and trace.marker.showscale:
            scales["points"] = trace.marker, [entry.axes for entry in panels.values()]
    for scale, axes in scales.values():
        bar = figure.colorbar(
            marks.shades_of(scale), ax=axes, pad=0.02, aspect=25, ticks=scale.colorbar.tickvals
        )
        form = scale.colorbar.tickformat or ".4~g"
        bar.ax.yaxis.set_major_formatter(lambda value, _, form=form: marks.number(value, form))
        bar.set_label(_SAID.sub("", marks.plain(scale.colorbar.title.text)))
        bar.outline.set_visible(False)
        bar.solids.set_rasterized(False)  # shapes, where it would be a picture within the picture
