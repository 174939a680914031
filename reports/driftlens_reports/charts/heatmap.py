"""Drift of every task at every layer, one panel per variant on one colour scale."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import titled
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.picking import layer_rows, needs
from driftlens_reports.charts.task_layer import Scale, task_layer_heatmap
from driftlens_reports.charts.theme import TICK_NUMBER, palette
from driftlens_reports.charts.words import data_key, gap_notes, peak_sentence, sample_notes, short


@chart(
    "heatmap",
    title="Drift by task and layer",
    section="layers",
    caption="Drift from the task's expert leaving each layer, mean over diagnosis samples without a band, tasks down "
    "and layers across, one panel per variant on one colour scale.",
    hint="Look for rows that darken early (tasks that suffer throughout) and for columns that darken at once (layers "
    "that hurt every task). In feature units, later layers may look worse only because their features are larger; "
    "relative drift removes that.",
    missing=needs("layers", ["drift_l2_mean"]),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale begins at zero and ends at the largest value shown."""
    source = "drift_rel" if options.relative else "drift_l2_mean"
    column = "relative drift" if options.relative else "mean drift"
    words = "drift / expert norm" if options.relative else "mean L2 drift"
    rows = layer_rows(run, options).rename(columns={source: column})
    highest = rows[column].astype(float).max()
    shades = Scale(
        title=titled(words, "layers", source),
        low=0.0,
        high=highest if highest > 0 else 1.0,
        colours=palette(options.dark).sequential,
        cell=short,
        hover=TICK_NUMBER,
    )
    figure = task_layer_heatmap(
        run, rows, column, shades, dark=options.dark, key=data_key(run, "heatmap", options)
    )
    return Drawn(
        figure,
        alt=f"Heatmap of the {column} by task and layer. {peak_sentence(rows, column)}",
        data=rows[["task", "variant", "layer", "role", "path", "n", column]],
        notes=(*sample_notes(run, rows), *gap_notes(run, rows, column)),
    )
