"""What changes from one model to another, layer by layer: one panel per task, zero where nothing does."""

from __future__ import annotations

import pandas as pd

from driftlens.records.compare import Comparison
from driftlens_reports.charts.axes import layer_axis, layer_title
from driftlens_reports.charts.chart import Drawn
from driftlens_reports.charts.curves import curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.theme import TICK_NUMBER
from driftlens_reports.charts.words import label
from driftlens_reports.wording import number

_CHANGE = "change of mean drift"


def change_curves(found: Comparison, *, dark: bool) -> Drawn:
    """Change of mean drift by layer, after minus before: one panel per task, one line per compared pair."""
    run = found.after
    rows = _rows(found)
    tasks = list(dict.fromkeys(rows["task"]))
    grid = panel_grid(
        [label(task) for task in tasks],
        x_title=layer_title(run),
        y_titles=["change of L2 drift (feature units)"],
        legend=legend_names(rows),
        dark=dark,
        key=f"{found.before.id} {found.after.id} {found.pairs}",
    )
    for part in parts(run, rows, dark=dark):
        grid.add(part.at, curve(part.rows, _CHANGE, part.marks, what=_CHANGE, legend=part.is_first))
    reference_line(grid, 0.0, dark=dark)
    grid.set_axes(x=layer_axis(run), y={"tickformat": TICK_NUMBER})
    return Drawn(
        grid.figure,
        alt=f"Change of mean drift by layer. {_in_words(rows)}",
        data=found.layers,
        notes=("Mean over diagnosis samples, after minus before: below zero is an improvement.",),
    )


def _rows(found: Comparison) -> pd.DataFrame:
    """The compared layers as rows of a layer table, each pair under the name of the variant after."""
    rows = found.layers.rename(columns={"after": "variant", "drift_change": _CHANGE})
    roles = {entry.index: entry.role for entry in found.after.manifest.layers}
    return rows.assign(role=rows["layer"].map(roles))[["task", "variant", "layer", "role", "path", _CHANGE]]


def _in_words(rows: pd.DataFrame) -> str:
    last = rows[(rows["layer"] == rows["layer"].max()) & rows[_CHANGE].notna()]
    if last.empty:
        return "Nothing was measured at the last layer."
    fewer = int((last[_CHANGE] < 0).sum())
    mean = number(float(last[_CHANGE].mean()))
    return f"At the last layer it falls in {fewer} of {len(last)} comparisons; the mean change is {mean}."
