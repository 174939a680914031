"""Signed share of the final drift that every layer accounts for, on every task, one panel per variant."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.picking import ANALYZE, layer_rows, needs
from driftlens_reports.charts.task_layer import Extra, Scale, task_layer_heatmap
from driftlens_reports.charts.theme import SHARE, palette
from driftlens_reports.charts.words import data_key, gap_notes, peak_share, sample_notes

_COLUMN = "share of final drift"


@chart(
    "contributions-heatmap",
    title="Contributions by task and layer",
    section="causes",
    caption="Signed share of the final drift that each layer's local mismatch ends up as, a ratio of sums over "
    "diagnosis samples without a band, tasks down, layers and remainder across, one panel per variant on one scale.",
    hint="Orange layers make the final drift, blue ones work against it. Each row sums to 100 % with its remainder, "
    "which no layer accounts for; a large one means that the quadrature of the Jacobians was too coarse.",
    missing=needs("layers", ["final_share"], f"{ANALYZE} --set metrics.contributions=true"),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale is symmetric around zero."""
    rows = layer_rows(run, options).rename(columns={"final_share": _COLUMN, "remainder_share": "remainder"})
    rows = rows[rows[_COLUMN].notna().groupby(rows["variant"]).transform("any")]
    highest = rows[[_COLUMN, "remainder"]].astype(float).abs().max().max()
    shades = Scale(
        title="share of final drift (%)",
        low=-highest,
        high=highest,
        colours=palette(options.dark).diverging,
        cell=lambda value: f"{round(value, 2) + 0.0:.0%}",
        hover=SHARE,
    )
    figure = task_layer_heatmap(
        run,
        rows,
        _COLUMN,
        shades,
        dark=options.dark,
        key=data_key(run, "contributions-heatmap", options),
        extra=Extra("remainder", "remainder"),
    )
    return Drawn(
        figure,
        alt=f"Heatmap of signed shares of the final drift by task and layer. {peak_share(rows, _COLUMN)}",
        data=rows[["task", "variant", "layer", "role", "path", "n", _COLUMN, "remainder"]],
        notes=(*sample_notes(run, rows), *gap_notes(run, rows, _COLUMN)),
    )
