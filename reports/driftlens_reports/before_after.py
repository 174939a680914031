"""A calibration's table in plain text: merged, anchor alone, calibrated and expert, task by task."""

from __future__ import annotations

import math

import pandas as pd

from driftlens.records.before_after import (
    AccuracyChange,
    Outcome,
    accuracy_change_note,
    accuracy_changes,
    credit_sentences,
    final_drift_changes,
    outcomes,
    selection_sentences,
)
from driftlens.records.run import DriftRun
from driftlens.variants import calibrated, title
from driftlens_reports.columns import aligned, printable
from driftlens_reports.wording import number, percent, percent_interval, points, points_interval, with_error

_HEADER = ("task", "model", "L2 drift, 95 %", "relative", "cosine", "accuracy", "95 % interval")
_CHANGE_HEADER = (
    *("task", "test samples", "change", "95 % interval"),
    *("answered by both", "to right", "to wrong", "change", "95 % interval", "McNemar p"),
)


def before_after(run: DriftRun, name: str) -> pd.DataFrame:
    """The numbers of a calibration's table, one row per task and model, for showing and downloading.

    Columns: task, variant, model (what a reader calls the variant), drift (mean norm of the final drift), drift_error
    (half its 95 % interval), relative, cosine, accuracy, low, high, n. The expert has an accuracy only; what was not
    measured is NaN.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    rows = pd.DataFrame(outcomes(run, name), columns=[*Outcome.__dataclass_fields__])
    rows.insert(2, "model", rows["variant"].map(title))
    return rows


def before_after_text(run: DriftRun, name: str) -> str:
    """The table, the changes of drift and accuracy, what calibration and rescaling gain, how settings were chosen.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    found = outcomes(run, name)
    rows = [list(_HEADER)]
    for at, entry in enumerate(found):
        is_first = at == 0 or found[at - 1].task != entry.task
        rows.append([entry.task if is_first else "", title(entry.variant), *_cells(entry)])
    said = [*credit_sentences(run, name), *selection_sentences(run, name)]
    changes = [*_drift_lines(run, name), *_change_lines(run, name)]
    return "\n".join([*aligned(rows, num_names=2), "", *changes, *map(printable, said)])


def _drift_lines(run: DriftRun, name: str) -> list[str]:
    """How the mean final drift of each task changes, with its interval, and an empty line."""
    rows = [
        [
            *(task, str(at.n), number(at.difference.value), f"{100 * at.relative.value:+.1f} %"),
            percent_interval(at.relative.low, at.relative.high),
        ]
        for task, at in final_drift_changes(run, name).items()
    ]
    heading = f"Change of the final L2 drift from merged to {title(calibrated(name))}, paired by sample"
    header = ["task", "samples", "change", "relative", "95 % interval"]
    return [printable(heading), *aligned([header, *rows], num_names=1), ""] if rows else []


def _change_lines(run: DriftRun, name: str) -> list[str]:
    """How the accuracy of each task changes, with intervals, and an empty line; none where it was not measured."""
    found = accuracy_changes(run, name)
    if not found:
        return []
    heading = f"Change of accuracy from merged to {title(calibrated(name))}, in points"
    rows = [list(_CHANGE_HEADER), *(_change_cells(entry) for entry in found)]
    return [printable(heading), *aligned(rows, num_names=1), accuracy_change_note(found), ""]


def _change_cells(entry: AccuracyChange) -> list[str]:
    tested = (
        [str(entry.n), points(entry.change), points_interval(entry.low, entry.high)] if entry.n else [""] * 3
    )
    paired = entry.paired
    if paired is None:
        return [entry.task, *tested, *[""] * 6]
    return [
        *(entry.task, *tested, f"{paired.n} {entry.split}", str(paired.gained), str(paired.lost)),
        *(points(paired.difference), points_interval(paired.ci_low, paired.ci_high), f"{paired.p_value:.2g}"),
    ]


def _cells(entry: Outcome) -> list[str]:
    if entry.variant == "expert":  # its drift is zero by definition
        features = ["", "", ""]
    else:
        features = [with_error(entry.drift, entry.drift_error), number(entry.relative), number(entry.cosine)]
    known = not math.isnan(entry.accuracy) and not math.isnan(entry.low)
    interval = f"{100 * entry.low:.1f} to {100 * entry.high:.1f} %" if known else ""
    return [*features, percent(entry.accuracy), interval]
