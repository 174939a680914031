"""Task x layer heatmaps, one panel per variant on one colour scale: drift, CKA, and shares of the final drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, room_beside, titled, whole
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.layer_curves import layer_data
from driftlens_reports.charts.marks import Trace, bar, cell_rows, cells, colour_bar
from driftlens_reports.charts.picking import layer_rows
from driftlens_reports.charts.theme import (
    SHARE,
    SMALL,
    TICK_NUMBER,
    apply_theme,
    palette,
    readable,
    scale,
    shade,
)
from driftlens_reports.charts.words import (
    gap_notes,
    literal,
    peak_sentence,
    peak_share,
    sample_notes,
    short,
    shown,
    themed,
)

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
        extra: a column of cells behind the head: a value per task and variant that belongs to no layer.
    """

    title: str
    low: float
    high: float
    colours: Sequence[str]
    cell: Callable[[float], str]
    hover: str = TICK_NUMBER
    extra: str = ""


def task_layer_heatmap(
    run: DriftRun, rows: pd.DataFrame, column: str, shades: Scale, *, dark: bool, key: str
) -> go.Figure:
    """One panel per variant, tasks down, layers across; a cell without a number shows the theme's gap colour.

    Args:
        run: the run.
        rows: rows of the layer table, in the order in which tasks and variants are to stand.
        column: what is coloured.
        shades: the colours, the same for every panel.
        dark: which theme.
        key: names the data shown, as for `apply_theme`.
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
        drawn = _panel(run, rows[rows["variant"] == variant], column, tasks, shades)
        figure.add_trace(drawn, row=at, col=1)
        figure.add_trace(_numbers(drawn, shades), row=at, col=1)
    apply_theme(figure, dark=dark, key=key, height=max(inner + _TOP + _BOTTOM, 190))
    _finish(figure, run, tasks, shades, palette(dark).gap, palette(dark).ink)
    return figure


def _panel(run: DriftRun, rows: pd.DataFrame, column: str, tasks: Sequence[str], shades: Scale) -> Trace:
    # Layers without rows are gaps too: left out, their neighbours' cells would grow over them.
    layers = [layer.index for layer in run.manifest.layers]
    values = rows.pivot(index="task", columns="layer", values=column).reindex(index=tasks, columns=layers)
    numbers = values.to_numpy(dtype=float)
    places = [
        f"layer {layer.index}: {literal(layer.role)}, {literal(layer.path)}" for layer in run.manifest.layers
    ]
    if shades.extra:
        beside = rows.groupby("task")[shades.extra].max().reindex(tasks).to_numpy(dtype=float)
        numbers = np.column_stack([numbers, beside])
        layers, places = [*layers, layers[-1] + 1], [*places, shades.extra]
    return cells(
        numbers,
        layers,
        coloraxis="coloraxis",
        text=[[f"{literal(task)}, {place}" for place in places] for task in tasks],
        hovertemplate=f"%{{text}}<br>%{{z:{shades.hover}}}<extra></extra>",
    )


def _numbers(drawn: Trace, shades: Scale) -> Trace:
    """The numbers in the cells, on unseen bars: a heatmap's own have one colour and run over narrow cells."""
    span = (shades.high - shades.low) or 1.0
    written = [
        (layer, at, value)
        for at, row in enumerate(drawn.z)
        for layer, value in zip(drawn.x, row, strict=True)
        if not np.isnan(value)
    ]
    behind = [shade(shades.colours, (value - shades.low) / span) for _, _, value in written]
    return bar(
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
    figure: go.Figure, run: DriftRun, tasks: Sequence[str], shades: Scale, gap: str, ink: str
) -> None:
    axis, rows = layer_axis(run), cell_rows(tasks, "task (name)")
    if shades.extra:
        last = axis["tickvals"][-1]
        axis["autorangeoptions"] = whole(0.5, last + 1.5)
        axis["ticktext"] = [*map(str, axis["tickvals"]), shades.extra]
        axis["tickvals"] = [*axis["tickvals"], last + 1]
    figure.update_xaxes(**axis, showgrid=False)
    figure.update_xaxes(title_text=layer_title(run), row=len(figure.data) // 2, col=1)
    figure.update_yaxes(**rows, zeroline=False)
    figure.update_annotations(font={"size": SMALL + 1, "color": ink})
    figure.update_layout(
        # Numbers that don't fit into their cell are left out; hovering tells.
        uniformtext={"minsize": SMALL - 2, "mode": "hide"},
        bargap=0,
        plot_bgcolor=gap,
        margin={"t": _TOP, **room_beside(rows["ticktext"])},
        coloraxis={
            "cmin": shades.low,
            "cmax": shades.high,
            "colorscale": scale(shades.colours),
            "colorbar": colour_bar(title={"text": shades.title, "side": "right"}, tickformat=shades.hover),
        },
    )


@chart(
    "heatmap",
    title="Drift by task and layer",
    section="tasks",
    rank=20,
    presets=("overview", "standard", "calibration"),
    needs=("layers", ("drift_l2_mean",)),
    caption="Drift from the task's expert leaving each layer, mean over diagnosis samples without a band, tasks down "
    "and layers across, one panel per variant on one colour scale.",
    hint="Look for rows that darken early (tasks that suffer throughout) and for columns that darken at once (layers "
    "that hurt every task). In feature units, later layers may look worse only because their features are larger; "
    "relative drift removes that.",
)
def heatmap(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale begins at zero and ends at the largest value shown."""
    source = "drift_rel" if options.relative else "drift_l2_mean"
    column = "relative drift" if options.relative else "mean drift"
    words = "drift / expert norm" if options.relative else "mean L2 drift"
    rows = layer_rows(run, options).rename(columns={source: column})
    highest = rows[column].astype(float).max()
    colours, highest = palette(options.dark).sequential, highest if highest > 0 else 1.0
    shades = Scale(titled(words, "layers", source), 0.0, highest, colours, short)
    return Drawn(
        task_layer_heatmap(run, rows, column, shades, **themed(run, "heatmap", options)),
        alt=f"Heatmap of the {column} by task and layer. {peak_sentence(rows, column)}",
        data=layer_data(rows, column),
        notes=(*sample_notes(run, rows), *gap_notes(run, rows, column)),
    )


@chart(
    "cka",
    title="CKA with the expert",
    section="similarity",
    rank=40,
    needs=("layers", ("cka",)),
    caption="Debiased linear CKA between the features leaving each layer and the expert's, one number over all "
    "diagnosis samples of a task without a band, tasks down and layers across, one panel per variant on one scale.",
    hint="1 means the same geometry up to rotation and scale; cells that stand out from the background are less alike. "
    "CKA does not see rotations, which do harm a head, so a high value does not mean a small drift.",
)
def cka(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale runs from the lowest value shown, or 0, to 1."""
    rows = layer_rows(run, options)
    lowest = min(0.0, float(rows["cka"].astype(float).min()))
    colours = palette(options.dark).sequential[::-1]  # what is unlike stands out, as drift does
    shades = Scale(titled("CKA", "layers", "cka"), lowest, 1.0, colours, lambda value: f"{value:.2f}")
    return Drawn(
        task_layer_heatmap(run, rows, "cka", shades, **themed(run, "cka", options)),
        alt=f"Heatmap of CKA with the expert by task and layer. {peak_sentence(rows, 'cka', lowest=True)}",
        data=layer_data(rows, "cka"),
        notes=(*sample_notes(run, rows), *gap_notes(run, rows, "cka")),
    )


_SHARE, _REST = "share of final drift", "remainder"


@chart(
    "contributions-heatmap",
    title="Contributions by task and layer",
    section="contributions",
    rank=20,
    presets=("standard",),
    needs=("layers", ("final_share",)),
    caption="Signed share of the final drift that each layer's local mismatch ends up as, a ratio of sums over "
    "diagnosis samples without a band, tasks down, layers and remainder across, one panel per variant on one scale.",
    hint="Orange layers make the final drift, blue ones work against it. Each row sums to 100 % with its remainder, "
    "which no layer accounts for; a large one means that the quadrature of the Jacobians was too coarse.",
)
def contributions_heatmap(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale is symmetric around zero."""
    rows = layer_rows(run, options).rename(columns={"final_share": _SHARE, "remainder_share": _REST})
    rows = rows[rows[_SHARE].notna().groupby(rows["variant"]).transform("any")]
    highest = rows[[_SHARE, _REST]].astype(float).abs().max().max()
    shades = Scale(
        title="share of final drift (%)",
        low=-highest,
        high=highest,
        colours=palette(options.dark).diverging,
        cell=lambda value: f"{round(value, 2) + 0.0:.0%}",
        hover=SHARE,
        extra=_REST,
    )
    return Drawn(
        task_layer_heatmap(run, rows, _SHARE, shades, **themed(run, "contributions-heatmap", options)),
        alt=f"Heatmap of signed shares of the final drift by task and layer. {peak_share(rows, _SHARE)}",
        data=layer_data(rows, _SHARE, _REST),
        notes=(*sample_notes(run, rows), *gap_notes(run, rows, _SHARE)),
    )
