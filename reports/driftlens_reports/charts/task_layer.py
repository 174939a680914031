"""Task x layer heatmaps, one panel per variant on one colour scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, room_beside, whole
from driftlens_reports.charts.theme import SMALL, apply_theme, palette, readable, scale, shade
from driftlens_reports.charts.words import label, literal, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ROW, _GAP, _TOP, _BOTTOM = 26, 44, 30, 56


@dataclass(frozen=True)
class Scale:
    """What colours stand for.

    Attributes:
        title: of the colour bar, with the unit.
        low: value of the first colour.
        high: value of the last one.
        colours: of the theme.
        cell: writes the number in a cell.
        hover: format of the hovered number.
    """

    title: str
    low: float
    high: float
    colours: Sequence[str]
    cell: Callable[[float], str]
    hover: str


@dataclass(frozen=True)
class Extra:
    """A column of cells behind the head: a value per task and variant that belongs to no layer."""

    column: str
    title: str


def task_layer_heatmap(
    run: DriftRun,
    rows: pd.DataFrame,
    column: str,
    shades: Scale,
    *,
    dark: bool,
    key: str,
    extra: Extra | None = None,
) -> go.Figure:
    """One panel per variant, tasks down, layers across; a cell without a number shows the theme's gap colour.

    Args:
        run: the run.
        rows: rows of the layer table, in the order in which tasks and variants are to stand.
        column: what is coloured.
        shades: the colours, the same for every panel.
        dark: which theme.
        key: names the data shown, as for `apply_theme`.
        extra: a further column of cells.
    """
    from plotly.subplots import make_subplots

    tasks, variants = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    panel = _ROW * len(tasks) + 8
    inner = len(variants) * panel + (len(variants) - 1) * _GAP
    figure = make_subplots(
        len(variants),
        1,
        subplot_titles=[shown(variant) for variant in variants],
        vertical_spacing=_GAP / inner if len(variants) > 1 else 0,
    )
    for at, variant in enumerate(variants, start=1):
        part = rows[rows["variant"] == variant]
        cells = _panel(run, part, column, tasks, shades, extra)
        figure.add_trace(cells, row=at, col=1)
        figure.add_trace(_numbers(cells, shades), row=at, col=1)
    apply_theme(figure, dark=dark, key=key, height=max(inner + _TOP + _BOTTOM, 190))
    # Numbers that don't fit into their cell are left out; hovering tells.
    figure.update_layout(uniformtext={"minsize": SMALL - 2, "mode": "hide"}, bargap=0)
    _finish(figure, run, len(variants), tasks, shades, dark, extra)
    return figure


def _panel(
    run: DriftRun, rows: pd.DataFrame, column: str, tasks: Sequence[str], shades: Scale, extra: Extra | None
) -> go.Heatmap:
    import plotly.graph_objects as go

    # Layers without rows are gaps too: left out, their neighbours' cells would grow over them.
    layers = [layer.index for layer in run.manifest.layers]
    values = rows.pivot(index="task", columns="layer", values=column).reindex(index=tasks, columns=layers)
    cells = values.to_numpy(dtype=float)
    places = [
        f"layer {layer.index}: {literal(layer.role)}, {literal(layer.path)}" for layer in run.manifest.layers
    ]
    if extra:
        beside = rows.groupby("task")[extra.column].max().reindex(tasks).to_numpy(dtype=float)
        cells = np.column_stack([cells, beside])
        layers, places = [*layers, layers[-1] + 1], [*places, extra.title]
    return go.Heatmap(
        x=layers,
        y=list(range(len(tasks))),
        z=cells,
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
        hoverongaps=False,
        text=[[f"{literal(task)}, {place}" for place in places] for task in tasks],
        hovertemplate=f"%{{text}}<br>%{{z:{shades.hover}}}<extra></extra>",
    )


def _numbers(cells: go.Heatmap, shades: Scale) -> go.Bar:
    """The numbers in the cells, on unseen bars: a heatmap's own have one colour and run over narrow cells."""
    import plotly.graph_objects as go

    span = (shades.high - shades.low) or 1.0
    written = [
        (layer, at, value)
        for at, row in enumerate(cells.z)
        for layer, value in zip(cells.x, row, strict=True)
        if not np.isnan(value)
    ]
    behind = [shade(shades.colours, (value - shades.low) / span) for _, _, value in written]
    return go.Bar(
        x=[layer for layer, _, _ in written],
        base=[at - 0.5 for _, at, _ in written],
        y=[1.0] * len(written),
        width=1,
        marker={"color": "rgba(0, 0, 0, 0)", "line_width": 0},
        text=[shades.cell(value) for _, _, value in written],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"size": SMALL - 1, "color": [readable(colour) for colour in behind]},
        hoverinfo="skip",
        showlegend=False,
    )


def _finish(
    figure: go.Figure,
    run: DriftRun,
    num_panels: int,
    tasks: Sequence[str],
    shades: Scale,
    dark: bool,
    extra: Extra | None,
) -> None:
    colours = palette(dark)
    axis, names = layer_axis(run), [label(task) for task in tasks]
    if extra:
        last = axis["tickvals"][-1]
        axis["autorangeoptions"] = whole(0.5, last + 1.5)
        axis["ticktext"] = [*map(str, axis["tickvals"]), extra.title]
        axis["tickvals"] = [*axis["tickvals"], last + 1]
    figure.update_xaxes(**axis, showgrid=False)
    figure.update_xaxes(title_text=layer_title(run), row=num_panels, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(tasks))),
        ticktext=names,
        range=[len(tasks) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        title_text="task (name)",
    )
    figure.update_annotations(font={"size": SMALL + 1, "color": colours.ink})
    figure.update_layout(
        plot_bgcolor=colours.gap,
        margin={"t": _TOP, **room_beside(names)},
        coloraxis={
            "cmin": shades.low,
            "cmax": shades.high,
            "colorscale": scale(shades.colours),
            "colorbar": {
                "title": {"text": shades.title, "side": "right"},
                "thickness": 14,
                "outlinewidth": 0,
                "tickformat": shades.hover,
            },
        },
    )
