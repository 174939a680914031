"""Each layer's own part in the drift and what it passes on: local mismatch, propagation, and their cross term."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, titled, value_axis
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.curves import curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.picking import layer_rows, needs
from driftlens_reports.charts.theme import TICK_NUMBER
from driftlens_reports.charts.words import (
    LONGEST_OF_TWO,
    data_key,
    label,
    peak_sentence,
    sample_notes,
)

_PARTS = {
    "mismatch": ("mismatch_l2_mean", "|m|"),
    "propagation": ("propagation_l2_mean", "|p|"),
    "cross term": ("cross_term", "2⟨m, p⟩ / |e|²"),
}


@chart(
    "decomposition",
    title="Mismatch and propagation",
    section="causes",
    caption="What each layer adds to the drift by itself (local mismatch m) and passes on from below (propagation p), "
    "both mean norms over diagnosis samples without a band, and the cross term, a ratio of sums over them.",
    hint="Where m is large, the layer's own weights are at fault; where p is, it hands on what earlier layers broke. A "
    "positive cross term means that the two point the same way, a negative one that they cancel in part. Norms "
    "of m and p do not add up to the norm of the drift; contributions show parts that do.",
    missing=needs("layers", ["mismatch_l2_mean", "propagation_l2_mean", "cross_term"]),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """A row of three panels per task; both norms have one y axis range, the cross term another."""
    rows = layer_rows(run, options).rename(columns={source: name for name, (source, _) in _PARTS.items()})
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [f"{label(task, LONGEST_OF_TWO)}: {name}" for task in tasks for name in _PARTS],
        x_title=layer_title(run),
        y_titles=[titled(words, "layers", source) for source, words in _PARTS.values()],
        legend=legend_names(rows),
        dark=options.dark,
        key=data_key(run, "decomposition", options),
        columns=len(_PARTS),
        height=150,
    )
    for part in parts(run, rows, dark=options.dark):
        for at, name in enumerate(_PARTS):
            trace = curve(part.rows, name, part.marks, what=name, legend=part.is_first and at == 0)
            grid.add(part.at * len(_PARTS) + at, trace)
    reference_line(grid, 0.0, dark=options.dark, column=2)
    norms = value_axis(options)
    shares = {"tickformat": TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
    grid.set_axes(
        x=layer_axis(run), y=[norms, {**norms, "matches": "y"}, shares]
    )  # norms in one unit compare
    return Drawn(
        grid.figure,
        alt=f"Local mismatch, propagation and cross term by layer. Mismatch: {peak_sentence(rows, 'mismatch')} "
        f"Propagation: {peak_sentence(rows, 'propagation')}",
        data=rows[["task", "variant", "layer", "role", "path", "n", "reference", *_PARTS]],
        notes=tuple(sample_notes(run, rows)),
    )
