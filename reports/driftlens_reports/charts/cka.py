"""Similarity of features to the expert's by CKA, for every task and layer, one panel per variant on one scale."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import titled
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.picking import ANALYZE, layer_rows, needs
from driftlens_reports.charts.task_layer import Scale, task_layer_heatmap
from driftlens_reports.charts.theme import TICK_NUMBER, palette
from driftlens_reports.charts.words import data_key, gap_notes, peak_sentence, sample_notes


@chart(
    "cka",
    title="CKA with the expert",
    section="layers",
    caption="Debiased linear CKA between the features leaving each layer and the expert's, one number over all "
    "diagnosis samples of a task without a band, tasks down and layers across, one panel per variant on one scale.",
    hint="1 means the same geometry up to rotation and scale; cells that stand out from the background are less alike. "
    "CKA does not see rotations, which do harm a head, so a high value does not mean a small drift.",
    missing=needs("layers", ["cka"], f"{ANALYZE} --set metrics.cka=true"),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of cells; the scale runs from the lowest value shown, or 0, to 1."""
    rows = layer_rows(run, options)
    shades = Scale(
        title=titled("CKA", "layers", "cka"),
        low=min(0.0, float(rows["cka"].astype(float).min())),
        high=1.0,
        colours=palette(options.dark).sequential[::-1],  # what is unlike stands out, as drift does
        cell=lambda value: f"{value:.2f}",
        hover=TICK_NUMBER,
    )
    figure = task_layer_heatmap(
        run, rows, "cka", shades, dark=options.dark, key=data_key(run, "cka", options)
    )
    return Drawn(
        figure,
        alt=f"Heatmap of CKA with the expert by task and layer. {peak_sentence(rows, 'cka', lowest=True)}",
        data=rows[["task", "variant", "layer", "role", "path", "n", "cka"]],
        notes=(*sample_notes(run, rows), *gap_notes(run, rows, "cka")),
    )
