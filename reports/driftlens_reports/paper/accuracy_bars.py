"""A panel of accuracy bars: a group per task, a bar per variant, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.paper.captions import span
from driftlens_reports.paper.plate import Plate
from driftlens_reports.paper.series import draw_bars, name_axis, percent_axis
from driftlens_reports.paper.style import hairline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_ACCURACY = "no accuracy was measured; `driftlens analyze` measures it where test data have labels"


def accuracy_rows(run: DriftRun, tasks: Sequence[str]) -> pd.DataFrame:
    """The run's accuracies on `tasks`, without other metrics."""
    rows = run.accuracy()
    return rows[(rows["metric"] == "accuracy") & rows["task"].isin(tasks) & rows["value"].notna()]


def draw_accuracy(
    plate: Plate, axes: Axes, run: DriftRun, tasks: Sequence[str], variants: Sequence[str], panel: str
) -> None:
    """Draw and record accuracy per task with Wilson intervals, or a note where none was measured."""
    rows = accuracy_rows(run, tasks).set_index(["task", "variant"])
    if rows.empty:
        plate.note(axes, f"({panel}) accuracy per task", NO_ACCURACY)
        return
    table = {
        variant: rows.reindex([(task, variant) for task in tasks])[["value", "ci_low", "ci_high"]]
        for variant in variants
    }
    table = {variant: found for variant, found in table.items() if found["value"].notna().any()}
    places = draw_bars(axes, {variant: list(found["value"]) for variant, found in table.items()}, tasks)
    for variant, found in table.items():
        axes.vlines(places[variant], found["ci_low"], found["ci_high"], color="#222222", linewidth=hairline())
        for quantity, column in (("accuracy", "value"), ("ci_low", "ci_low"), ("ci_high", "ci_high")):
            values = found[column].to_numpy(dtype=float)
            plate.record(panel, run, quantity, values, task=list(tasks), variant=variant)
    name_axis(axes, tasks)
    axes.set(ylabel="accuracy", ylim=(0, 1), yticks=np.linspace(0, 1, 5))
    percent_axis(axes.yaxis)


def accuracy_sentence(run: DriftRun, tasks: Sequence[str], panel: str) -> str:
    """What the bars are, with the number of test samples; empty where nothing was measured."""
    counts = accuracy_rows(run, tasks)["n"].dropna().astype(int)
    if counts.empty:
        return ""
    return f"{panel} Accuracy on {span(counts)} test samples per task; vertical lines: 95 % Wilson intervals."
