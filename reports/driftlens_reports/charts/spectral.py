"""How much a layer could enlarge a drift in the worst direction, beside what it does to the actual one."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, titled, value_axis
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.curves import companion, curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.picking import ANALYZE, layer_rows, needs
from driftlens_reports.charts.words import data_key, label, peak_sentence, ranged, sample_notes
from driftlens_reports.wording import error

_NAMES = {
    "spectral_norm_mean": "spectral norm",
    "spectral_residual_max": "residual",
    "jacobian_samples": "jacobian samples",
}


@chart(
    "spectral",
    title="Spectral norm",
    section="causes",
    caption="Largest gain of each layer's path-averaged Jacobian in any direction: mean over the diagnosis samples it "
    "was taken on, with error bars of the power iteration's largest relative residual; open markers: amplification of "
    "the actual drift.",
    hint="The gap between the two says how far the drift is from the worst direction: small where layers happen to "
    "enlarge just what merging breaks. A residual that is not small means that the power iteration had not "
    "settled, so the norm is too low.",
    missing=needs("layers", ["spectral_norm_mean"], f"{ANALYZE} --set metrics.jacobian.spectral=true"),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves with a line at 1; all panels have one y axis range."""
    rows = layer_rows(run, options).rename(columns=_NAMES)
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title=layer_title(run),
        y_titles=[titled("gain", "layers", "spectral_norm_mean")],
        legend=legend_names(rows),
        dark=options.dark,
        key=data_key(run, "spectral", options),
    )
    rows = rows.assign(error=rows["spectral norm"].astype(float) * rows["residual"].astype(float))
    for part in parts(run, rows, dark=options.dark):
        errors = [None if pd.isna(value) else value for value in part.rows["error"]]
        bars = {"type": "data", "array": errors, "thickness": 1, "width": 3}
        norm = curve(
            part.rows, "spectral norm", part.marks, what="spectral norm", legend=part.is_first, error_y=bars
        )
        grid.add(part.at, norm, companion(part.rows, "amplification", part.marks, what="amplification"))
    reference_line(grid, 1.0, dark=options.dark)
    grid.set_axes(x=layer_axis(run), y=value_axis(options, include=[1.0]))
    largest = rows["residual"].astype(float).max()
    taken = f"Jacobians are of {ranged(rows['jacobian samples'], 'diagnosis sample')} per task."
    keep = ["spectral norm", "residual", "error", "amplification", "jacobian samples"]
    return Drawn(
        grid.figure,
        alt="Spectral norm by layer beside the amplification of the actual drift. "
        + peak_sentence(rows, "spectral norm"),
        data=rows[["task", "variant", "layer", "role", "path", "n", *keep]],
        notes=(*sample_notes(run, rows), taken, f"Largest residual {error(float(largest))}."),
    )
