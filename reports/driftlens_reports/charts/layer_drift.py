"""Mean drift by layer, before and after: one panel per task, one line per variant, a band for the samples."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, titled, value_axis
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.curves import band, band_opacity, curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid
from driftlens_reports.charts.picking import layer_rows, needs
from driftlens_reports.charts.words import data_key, final_sentence, label, sample_notes

_BANDS = {
    "q10-q90": ("10 % quantile", "90 % quantile", "Band: 10 % to 90 % quantiles over samples."),
    "q25-q75": ("25 % quantile", "75 % quantile", "Band: 25 % to 75 % quantiles over samples."),
    "std": ("mean - std", "mean + std", "Band: one standard deviation over samples around the mean."),
}
_NAMES = {
    **{"drift_l2_mean": "mean drift", "drift_rel": "relative drift"},
    **{f"drift_l2_q{level}": f"{level} % quantile" for level in (10, 25, 75, 90)},
}


@chart(
    "layer-drift",
    title="Drift by layer",
    section="layers",
    caption="Drift from the task's expert leaving each layer: mean over diagnosis samples, with the band that "
    "the notes name, one panel per task.",
    hint="Compare lines within a panel: calibration helps where its line lies below both merged and its anchor alone. "
    "Layers differ in feature scale, so a rise along the axis need not mean that a layer is bad; see the relative "
    "drift, and amplification for what layers do to what they inherit.",
    missing=needs("layers", ["drift_l2_mean"]),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves; all panels have one y axis range, so that tasks compare."""
    rows = _with_band(layer_rows(run, options))
    source = "drift_rel" if options.relative else "drift_l2_mean"
    words = "drift / expert norm" if options.relative else "mean L2 drift"
    column = _NAMES[source]
    edges = None if options.relative or options.band == "none" else _BANDS[options.band]
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title=layer_title(run),
        y_titles=[titled(words, "layers", source)],
        legend=legend_names(rows),
        dark=options.dark,
        key=data_key(run, "layer-drift", options),
    )
    opacity = band_opacity(rows)
    for part in parts(run, rows, dark=options.dark):
        traces = [curve(part.rows, column, part.marks, what=column, legend=part.is_first)]
        if edges:
            traces.insert(0, band(part.rows, *edges[:2], part.marks, opacity=opacity))
        grid.add(part.at, *traces)
    grid.set_axes(x=layer_axis(run), y=value_axis(options))
    keep = ["task", "variant", "layer", "role", "path", "n", column, *(edges[:2] if edges else ())]
    return Drawn(
        grid.figure,
        alt=f"{words[0].upper()}{words[1:]} by layer. {final_sentence(rows, column)}",
        data=rows[keep],
        notes=(*sample_notes(run, rows), *([edges[2]] if edges else _no_band(options))),
    )


def _with_band(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.rename(columns=_NAMES)
    spread = rows["drift_l2_std"].astype(float)
    return rows.assign(
        **{"mean - std": rows["mean drift"] - spread, "mean + std": rows["mean drift"] + spread}
    )


def _no_band(options: ChartOptions) -> list[str]:
    if options.relative:
        return ["Relative drift is one ratio of sums over the samples; it has no band."]
    return []
