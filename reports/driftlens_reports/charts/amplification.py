"""What layers make of the drift they inherit: grow or shrink it, and how random directions would fare."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, titled, value_axis
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.curves import band, band_opacity, companion, curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.picking import layer_rows, needs
from driftlens_reports.charts.words import data_key, label, peak_sentence, sample_notes
from driftlens_reports.wording import error


@chart(
    "amplification",
    title="Amplification",
    section="causes",
    caption="Norm of the drift a layer passes on against that of the drift it inherits, a ratio of sums over diagnosis "
    "samples; band: relative error of the path-averaged Jacobian; open markers: its mean gain on random directions.",
    hint="Above 1 a layer enlarges inherited drift, below 1 it damps it. Far above the open markers, it enlarges the "
    "drift's own direction more than a random one. The stem inherits nothing and has no value. A visible "
    "band means that the Jacobian does not explain what the layer does; then trust the other charts of causes.",
    missing=needs("layers", ["amplification"]),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves with a line at 1; all panels have one y axis range."""
    rows = _with_band(layer_rows(run, options))
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title=layer_title(run),
        y_titles=[titled("amplification", "layers", "amplification")],
        legend=legend_names(rows),
        dark=options.dark,
        key=data_key(run, "amplification", options),
    )
    opacity = band_opacity(rows)
    for part in parts(run, rows, dark=options.dark):
        grid.add(
            part.at,
            band(part.rows, "lower", "upper", part.marks, opacity=opacity),
            curve(part.rows, "amplification", part.marks, what="amplification", legend=part.is_first),
            companion(part.rows, "random gain", part.marks, what="mean gain on random directions"),
        )
    reference_line(grid, 1.0, dark=options.dark)
    grid.set_axes(x=layer_axis(run), y=value_axis(options, zero=False, include=[1.0]))
    keep = ["amplification", "lower", "upper", "random gain", "Jacobian error", "jacobian samples"]
    return Drawn(
        grid.figure,
        alt=f"Amplification by layer, with a line at 1. {peak_sentence(rows, 'amplification')}",
        data=rows[["task", "variant", "layer", "role", "path", "n", *keep]],
        notes=(*sample_notes(run, rows), _error_note(rows)),
    )


def _with_band(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.rename(
        columns={
            "random_gain_mean": "random gain",
            "jacobian_error": "Jacobian error",
            "jacobian_samples": "jacobian samples",
        }
    )
    center, spread = rows["amplification"].astype(float), rows["Jacobian error"].astype(float)
    return rows.assign(lower=center * (1 - spread), upper=center * (1 + spread))


def _error_note(rows: pd.DataFrame) -> str:
    largest = rows["Jacobian error"].astype(float).max()
    if pd.isna(largest):
        return "Without Jacobians there is no band and no random gain."
    return f"Largest Jacobian error {error(float(largest))}, relative to the propagation."
