"""Where drift must grow: gain excess against mismatch ratio by layer, and how many samples meet the condition."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, titled, whole
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.curves import companion, curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.picking import layer_rows, needs
from driftlens_reports.charts.theme import SHARE, TICK_NUMBER, TICK_SHARE
from driftlens_reports.charts.words import LONGEST_OF_TWO, data_key, label, peak_sentence, sample_notes

_NAMES = {
    "gain_excess_mean": "gain excess",
    "mismatch_ratio_mean": "mismatch ratio",
    "growth_holds": "share that grows",
}


@chart(
    "growth",
    title="Growth condition",
    section="causes",
    caption="Gain excess gamma (curve: amplification minus 1) and mismatch ratio eta (open markers: |m| against the "
    "inherited drift), means over diagnosis samples without a band, and the share of samples with gamma above eta.",
    hint="Where gamma exceeds eta on a sample, its drift grows through the layer whichever way the local mismatch "
    "points. The condition is sufficient, not necessary: drift may also grow where it fails. The means compare less "
    "sharply than the share, which counts sample by sample. The stem inherits nothing and has no value.",
    missing=needs("layers", ["gain_excess_mean", "mismatch_ratio_mean", "growth_holds"]),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A row of two panels per task; each column has one y axis range."""
    rows = layer_rows(run, options).rename(columns=_NAMES)
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [
            f"{label(task, LONGEST_OF_TWO)}: {name}"
            for task in tasks
            for name in ("gamma and eta", "samples with gamma above eta")
        ],
        x_title=layer_title(run),
        y_titles=[titled("gamma, eta", "layers", "gain_excess_mean"), "share of samples (%)"],
        legend=legend_names(rows),
        dark=options.dark,
        key=data_key(run, "growth", options),
        columns=2,
        height=150,
    )
    for part in parts(run, rows, dark=options.dark):
        grid.add(
            2 * part.at,
            curve(part.rows, "gain excess", part.marks, what="gamma", legend=part.is_first),
            companion(part.rows, "mismatch ratio", part.marks, what="eta"),
        )
        share = curve(
            part.rows, "share that grows", part.marks, what="samples with gamma above eta", number=SHARE
        )
        grid.add(2 * part.at + 1, share)
    reference_line(grid, 0.0, dark=options.dark, column=0)
    ratios = {"tickformat": TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
    shares = {"tickformat": TICK_SHARE, "autorangeoptions": whole(-0.03, 1.03)}
    grid.set_axes(x=layer_axis(run), y=[ratios, shares])
    return Drawn(
        grid.figure,
        alt="Gain excess, mismatch ratio and the share of samples whose drift must grow, by layer. "
        f"Share: {peak_sentence(rows, 'share that grows')}",
        data=rows[["task", "variant", "layer", "role", "path", "n", *_NAMES.values()]],
        notes=tuple(sample_notes(run, rows)),
    )
