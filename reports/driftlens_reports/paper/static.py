"""A chart without a script: its plotly figure drawn with matplotlib, panel by panel."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlens_reports.paper.marks import (
    Panel,
    add_bars,
    add_cells,
    add_scatter,
    colour,
    colour_map,
    legend_sample,
    line_style,
    number,
    plain,
)
from driftlens_reports.paper.style import settle

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
"""Panels beyond which a page only grows longer."""

_WIDTH, _FONT = 960.0, 11.0
"""Pixels: width and letters of a chart on a screen, from which its height follows on paper."""
_LETTER = 0.52
"""Width of an average letter, in parts of its height."""
_SAMPLE = 8
"""Letters that would fit into the room of a legend's sample and its gaps."""

Panels = Mapping[tuple[str, str], Panel]


def draw_static(chart: go.Figure, width: float) -> Figure:
    """The chart as a figure `width` inches wide, in the colours it has and otherwise in the current sheet's look.

    Traces are lines, bands, points, bars and heatmaps; of many panels, the first `MOST_PANELS` are drawn, which a line
    below them says.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pairs = _pairs(chart)
    shown = pairs[:MOST_PANELS]
    figure = Figure(figsize=(width, _height(chart, shown, width)), layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    FigureCanvasAgg(figure)
    panels = _panels(chart, figure, shown)
    _fill(chart, panels)
    _add_shapes(chart, panels)
    for pair, panel in panels.items():
        _set_axis(panel, "x")
        _set_axis(panel, "y")
        panel.axes.set_facecolor(colour(chart.layout.plot_bgcolor) if _has_cells(chart, pair) else "none")
    _add_words(chart, figure, panels, len(pairs))
    _add_scales(chart, figure, panels)
    _add_legend(chart, figure)
    for panel in panels.values():
        _fit_words(panel)
    settle(figure)
    for panel in panels.values():
        _hide_what_does_not_fit(panel)
    return figure


def _pairs(chart: go.Figure) -> list[tuple[str, str]]:
    """The x and y axis of every panel, in reading order."""
    layout = chart.layout.to_plotly_json()
    ids = [name.replace("axis", "") for name in layout if name.startswith("xaxis")]
    pairs = [(x, _axis(chart, x).anchor or "y") for x in ids if _axis(chart, x).visible is not False]
    pairs += [(trace.xaxis or "x", trace.yaxis or "y") for trace in chart.data]
    return sorted(
        dict.fromkeys(pairs),
        key=lambda pair: (-round(_domain(chart, pair[1])[1], 3), _domain(chart, pair[0])),
    )


def _axis(chart: go.Figure, name: str) -> Any:
    return chart.layout[f"{name[0]}axis{name[1:]}"]


def _domain(chart: go.Figure, name: str) -> tuple[float, float]:
    return tuple(_axis(chart, name).domain or (0.0, 1.0))


def _height(chart: go.Figure, shown: Sequence[tuple[str, str]], width: float) -> float:
    """Between what its letters would ask for and what its width would, without the room of what is not shown."""
    import matplotlib

    per_pixel = ((width / _WIDTH) * (matplotlib.rcParams["font.size"] / 72 / _FONT)) ** 0.5
    margins = chart.layout.margin
    inner = chart.layout.height - (margins.t or 0) - (margins.b or 0)
    lowest = min(_domain(chart, y)[0] for _, y in shown)
    return per_pixel * (chart.layout.height - inner * lowest)


def _panels(chart: go.Figure, figure: Figure, shown: Sequence[tuple[str, str]]) -> Panels:
    """Empty axes where the chart has its own, sharing what the chart's share."""
    columns = sorted({round(_domain(chart, x)[0], 3) for x, _ in shown})
    rows = sorted({-round(_domain(chart, y)[1], 3) for _, y in shown})
    heights = [
        max(_length(chart, y) for _, y in shown if -round(_domain(chart, y)[1], 3) == row) for row in rows
    ]
    widths = [
        min(_length(chart, x) for x, _ in shown if round(_domain(chart, x)[0], 3) == column)
        for column in columns
    ]
    grid = figure.add_gridspec(len(rows), len(columns), height_ratios=heights, width_ratios=widths)
    panels: dict[tuple[str, str], Panel] = {}
    for x, y in shown:
        at = rows.index(-round(_domain(chart, y)[1], 3)), columns.index(round(_domain(chart, x)[0], 3))
        axes = figure.add_subplot(grid[at])
        for name, share in ((x, axes.sharex), (y, axes.sharey)):
            leading = _axis(chart, name).matches
            lead = next((p.axes for pair, p in panels.items() if leading in pair or name in pair), None)
            if lead is not None:
                share(lead)
        panels[x, y] = Panel(axes, _axis(chart, x), _axis(chart, y))
    return panels


def _length(chart: go.Figure, name: str) -> float:
    low, high = _domain(chart, name)
    return high - low


def _fill(chart: go.Figure, panels: Panels) -> None:
    for pair, panel in panels.items():
        own = [trace for trace in chart.data if (trace.xaxis or "x", trace.yaxis or "y") == pair]
        bars = [trace for trace in own if trace.type == "bar"]
        points = [trace for trace in own if trace.type.startswith("scatter")]
        mode = chart.layout.barmode or "group"
        for trace in own:
            if trace.type == "heatmap":
                add_cells(panel, trace, _shades(chart.layout[trace.coloraxis]))
            elif trace.type == "bar":
                room = (1 - (0.2 if chart.layout.bargap is None else chart.layout.bargap)) * _spacing(
                    panel, bars
                )
                shift, width = _apart(trace, bars, room) if mode == "group" else (0.0, room)
                add_bars(
                    panel,
                    trace,
                    shift,
                    width * (1 - (chart.layout.bargroupgap or 0)),
                    is_stacked=mode == "stack",
                )
            else:
                room = 1 - (chart.layout.scattergap or 0)
                shift = _apart(trace, points, room)[0] if chart.layout.scattermode == "group" else 0.0
                add_scatter(panel, trace, shift)


def _apart(trace: Any, alike: Sequence[Any], room: float) -> tuple[float, float]:
    """How far a trace stands off the middle, and how wide it may be, where several stand side by side."""
    if trace.type == "bar" and (trace.base is not None or trace.width is not None):
        return 0.0, room
    groups = list(dict.fromkeys(_group(other) for other in alike))
    width = room / len(groups)
    return (groups.index(_group(trace)) - (len(groups) - 1) / 2) * width, width


def _group(trace: Any) -> str:
    return str(trace.offsetgroup or trace.legendgroup or trace.uid or id(trace))


def _spacing(panel: Panel, bars: Sequence[Any]) -> float:
    """How far apart bars of one trace stand."""
    letter = "y" if bars[0].orientation == "h" else "x"
    places = np.concatenate([panel.places(letter, trace[letter]) for trace in bars])
    places = np.unique(places[~np.isnan(places)])
    return float(np.diff(places).min()) if len(places) > 1 else 1.0


def _shades(scale: Any) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(scale.cmin, scale.cmax), colour_map(scale.colorscale))


def _has_cells(chart: go.Figure, pair: tuple[str, str]) -> bool:
    return any(
        trace.type == "heatmap" and (trace.xaxis or "x", trace.yaxis or "y") == pair for trace in chart.data
    )


def _add_shapes(chart: go.Figure, panels: Panels) -> None:
    """Lines across panels, in the units of the data or in parts of the panel."""
    for shape in chart.layout.shapes:
        found = _panel_of(panels, shape.xref, shape.yref)
        if shape.type == "line" and found is not None:
            style = {**line_style(shape.line), "marker": "", "zorder": 3 if shape.layer == "above" else 1}
            style["linewidth"] /= 1.5
            found.axes.plot(
                [shape.x0, shape.x1],
                [shape.y0, shape.y1],
                transform=_transform(found, shape),
                scalex=False,
                scaley=False,
                **style,
            )


def _panel_of(panels: Panels, xref: str, yref: str) -> Panel | None:
    return panels.get((xref.removesuffix(" domain"), yref.removesuffix(" domain")))


def _transform(panel: Panel, placed: Any) -> Any:
    from matplotlib.transforms import blended_transform_factory

    axes = panel.axes
    parts = [
        axes.transAxes if ref.endswith("domain") else axes.transData for ref in (placed.xref, placed.yref)
    ]
    return blended_transform_factory(*parts)


def _set_axis(panel: Panel, letter: str) -> None:
    """Scale, range, ticks and their labels, as the chart has them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    settings, axis = (panel.x, panel.axes.xaxis) if letter == "x" else (panel.y, panel.axes.yaxis)
    if settings.type == "log":
        axis.axes.set(**{f"{letter}scale": "log"})
    _set_range(panel, letter, settings)
    form = settings.tickformat or ".4~g"
    names = panel.names.get(letter)
    values = list(settings.tickvals) if settings.tickvals is not None else list(names or ())
    if values:
        texts = (
            settings.ticktext
            if settings.ticktext is not None
            else [v if isinstance(v, str) else number(v, form) for v in values]
        )
        axis.set_major_locator(FixedLocator(list(panel.places(letter, values))))
        axis.set_ticklabels([plain(text) for text in texts])
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, form)))
        if settings.type == "log":
            axis.set_major_locator(LogLocator(numticks=6))
        else:
            axis.set_major_locator(MaxNLocator(nbins=_bins(panel, letter), steps=[1, 2, 2.5, 5, 10]))
    axis.set_minor_locator(NullLocator())
    side = ("bottom", "labelbottom") if letter == "x" else ("left", "labelleft")
    ticks = {
        side[0]: settings.ticks != "" and not _is_named(panel, letter),
        side[1]: settings.showticklabels is not False,
    }
    panel.axes.tick_params(axis=letter, **ticks)
    is_ruled = settings.showgrid is not False and not _is_named(panel, letter)
    panel.axes.grid(is_ruled, axis=letter)


def _bins(panel: Panel, letter: str) -> int:
    """How many ticks an axis has room for."""
    box, size = panel.axes.get_position(), panel.axes.get_figure(root=True).get_size_inches()
    return max(2, min(6, int(2.2 * (box.width * size[0] if letter == "x" else 1.6 * box.height * size[1]))))


def _is_named(panel: Panel, letter: str) -> bool:
    settings = panel.x if letter == "x" else panel.y
    return bool(panel.names.get(letter)) or settings.ticktext is not None


def _set_range(panel: Panel, letter: str, settings: Any) -> None:
    low, high = (panel.axes.get_xlim if letter == "x" else panel.axes.get_ylim)()
    if settings.scaleanchor:
        panel.axes.set_aspect("equal", adjustable="box")
    if settings.range is not None:
        low, high = (10.0**end if settings.type == "log" else end for end in settings.range)
    elif panel.names.get(letter):
        low, high = -0.5, len(panel.names[letter]) - 0.5
    else:
        options = settings.autorangeoptions
        inside = [
            value for value in (options.include if options.include is not None else ()) if value is not None
        ]
        inside = [value for value in inside if value > 0 or settings.type != "log"]
        low, high = min([low, *inside]), max([high, *inside])
        low = low if options.clipmin is None else max(low, options.clipmin)
        high = high if options.clipmax is None else min(high, options.clipmax)
        if settings.rangemode == "tozero":
            low, high = min(low, 0.0) if high <= 0 or low < 0 else 0.0, max(high, 0.0)
    if settings.autorange == "reversed":
        low, high = high, low
    panel.axes.set(**{f"{letter}lim": (low, high)})


def _add_words(chart: go.Figure, figure: Figure, panels: Panels, there: int) -> None:
    """Titles of panels and axes, words in panels, and how many panels are left out."""
    for entry in chart.layout.annotations:
        if entry.xref == "paper":
            for pair, panel in panels.items():
                low, high = _domain(chart, pair[0])
                if (
                    abs(entry.x - (low + high) / 2) < 1e-3
                    and abs(entry.y - _domain(chart, pair[1])[1]) < 1e-3
                ):
                    panel.axes.set_title(plain(entry.text))
        elif (found := _panel_of(panels, entry.xref, entry.yref)) is not None:
            sides = {
                "ha": entry.xanchor or "center",
                "va": {"middle": "center"}.get(entry.yanchor, entry.yanchor or "center"),
            }
            text = found.axes.text(
                entry.x, entry.y, plain(entry.text), transform=_transform(found, entry), **sides
            )
            text.set(fontsize="small", in_layout=False)
    across = {plain(panel.x.title.text) for panel in panels.values() if panel.x.title.text}
    note = (
        f"{len(panels)} of {there} panels are drawn; the JSON report has all numbers."
        if len(panels) < there
        else ""
    )
    for panel in panels.values():
        panel.axes.set_ylabel(plain(panel.y.title.text))
    if len(across) == 1 and len(panels) > 1:
        note = "\n".join([*across, *filter(None, [note])])
    else:
        for panel in panels.values():
            panel.axes.set_xlabel(plain(panel.x.title.text))
    if note:
        figure.supxlabel(note, fontsize="medium")


def _fit_words(panel: Panel) -> None:
    """Titles of axes over as many lines as their axis asks for, fewer ticks on short axes, long names slanted."""
    axes, figure = panel.axes, panel.axes.get_figure(root=True)
    box = axes.get_position()  # before the layout, roughly
    width, height = box.width * figure.get_figwidth() * 72, box.height * figure.get_figheight() * 72
    for axis, room in ((axes.xaxis, width), (axes.yaxis, height)):
        letters = max(int(1.1 * room / (_LETTER * axis.label.get_fontsize())), 12)
        lines = axis.label.get_text().split("\n")
        axis.label.set_text("\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines))
    if _is_named(panel, "x"):
        labels = axes.get_xticklabels()
        letters = sum(len(label.get_text()) + 2 for label in labels)
        if letters * _LETTER * labels[0].get_fontsize() > width:
            axes.tick_params(axis="x", rotation=30)
            for label in labels:
                label.set(ha="right", rotation_mode="anchor")


def _add_scales(chart: go.Figure, figure: Figure, panels: Panels) -> None:
    """A colour bar beside the panels of every scale."""
    by_scale: dict[str, list[Axes]] = {}
    for trace in chart.data:
        panel = panels.get((trace.xaxis or "x", trace.yaxis or "y"))
        if trace.type == "heatmap" and panel is not None:
            by_scale.setdefault(trace.coloraxis, []).append(panel.axes)
        elif trace.type.startswith("scatter") and trace.marker.showscale and panel is not None:
            _add_bar(figure, trace.marker, [entry.axes for entry in panels.values()])
    for name, own in by_scale.items():
        _add_bar(figure, chart.layout[name], own)


def _add_bar(figure: Figure, scale: Any, axes: Sequence[Axes]) -> None:
    from matplotlib.ticker import FuncFormatter

    form = scale.colorbar.tickformat or ".4~g"
    bar = figure.colorbar(_shades(scale), ax=list(axes), pad=0.02, aspect=25, ticks=scale.colorbar.tickvals)
    bar.set_label(plain(scale.colorbar.title.text))
    bar.formatter = FuncFormatter(lambda value, _: number(value, form))
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(False)  # shapes, where it would be a picture within the picture
    bar.update_ticks()


def _add_legend(chart: go.Figure, figure: Figure) -> None:
    import matplotlib

    named = [
        trace
        for trace in chart.data
        if trace.name and trace.showlegend is not False and trace.type != "heatmap"
    ]
    if chart.layout.showlegend is False or (len(chart.data) == 1 and chart.layout.showlegend is None):
        return
    entries = {trace.legendgroup or trace.name: trace for trace in reversed(named)}
    shown = list(reversed(entries.values()))
    if not shown:
        return
    names = [plain(trace.name) for trace in shown]
    room = figure.get_figwidth() * 72 / (_LETTER * matplotlib.rcParams["legend.fontsize"])
    entries_in_row = int(room / (max(map(len, names)) + _SAMPLE))
    is_one_row = sum(len(name) + _SAMPLE for name in names) <= room
    figure.legend(
        [legend_sample(trace) for trace in shown],
        names,
        loc="outside upper left",
        ncols=len(names) if is_one_row else max(1, entries_in_row),
    )


def _hide_what_does_not_fit(panel: Panel) -> None:
    """Numbers in bars and cells that would run over their edges."""
    for text, box in panel.inside:
        room, needed = box.get_window_extent(), text.get_window_extent()
        text.set_visible(needed.width <= 0.96 * room.width and needed.height <= 1.2 * room.height)
