"""Drift measured in the distance from base to expert: beyond 1, merging has undone what fine-tuning gained."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title, titled, value_axis
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.curves import curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.picking import layer_rows, needs
from driftlens_reports.charts.words import data_key, final_sentence, label, sample_notes

_COLUMN = "drift / base distance"


@chart(
    "base-distance",
    title="Drift against the base's distance",
    section="layers",
    caption="Drift leaving each layer against the distance from base to expert there, a ratio of sums over diagnosis "
    "samples without a band; the line at 1 is the base itself.",
    hint="At 0 features are the expert's, at 1 they are no nearer to them than the base's, above 1 they are farther. "
    "Unlike drift in feature units, this compares across layers and tasks.",
    missing=needs("layers", ["drift_vs_base"]),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of curves with a line at 1; all panels have one y axis range."""
    rows = layer_rows(run, options).rename(columns={"drift_vs_base": _COLUMN})
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title=layer_title(run),
        y_titles=[titled(_COLUMN, "layers", "drift_vs_base")],
        legend=legend_names(rows),
        dark=options.dark,
        key=data_key(run, "base-distance", options),
    )
    for part in parts(run, rows, dark=options.dark):
        grid.add(part.at, curve(part.rows, _COLUMN, part.marks, what=_COLUMN, legend=part.is_first))
    reference_line(grid, 1.0, dark=options.dark)
    grid.set_axes(x=layer_axis(run), y=value_axis(options, include=[1.0]))
    return Drawn(
        grid.figure,
        alt="Drift against the distance from base to expert, by layer, with a line at 1. "
        + final_sentence(rows, _COLUMN),
        data=rows[["task", "variant", "layer", "role", "path", "n", _COLUMN]],
        notes=tuple(sample_notes(run, rows)),
    )
