"""What a calibration gains, split by its anchor-only control into rescaling and the calibration's own part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.records.single import accuracy_of, final_value
from driftlens.variants import control_of, part_of

_COLUMNS = (
    *("task", "before", "control", "after", "quantity", "value_before", "value_control", "value_after"),
    *("by_rescaling", "by_calibration"),
)


def gains(
    first: DriftRun, second: DriftRun, tasks: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> pd.DataFrame:
    """One row per task and quantity (drift, cos, accuracy) of every pair that has a control between its two.

    `by_rescaling` + `by_calibration` is the change, all in the quantity's own unit: where the two work against each
    other, a small change has large parts, and shares of it would say nothing.

    Args:
        first: the run of the variants before.
        second: the run of the variants after, and of their controls.
        tasks: tasks of both.
        pairs: variants (before, after); only (merged, a calibration) can have a control.

    Raises:
        DataError: no such task or variant.
        RunError: a table can't be read.
    """
    rows: list[dict[str, Any]] = []
    for before, after in pairs:
        control = control_of(after.partition(":")[2])
        if before != "merged" or part_of(after) != "calibrated" or control not in second.variants:
            continue
        names = {"before": before, "control": control, "after": after}
        places = ((first, before), (second, control), (second, after))
        rows += [{"task": task, **names, **row} for task in tasks for row in _of_task(task, places)]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _of_task(task: str, places: Sequence[tuple[DriftRun, str]]) -> Iterator[dict[str, Any]]:
    values = {
        "drift": [final_value(run, task, variant, "drift_l2_mean") for run, variant in places],
        "cos": [final_value(run, task, variant, "cos_mean") for run, variant in places],
        "accuracy": [accuracy_of(run, task, variant)[0] for run, variant in places],
    }
    for quantity, (before, control, after) in values.items():
        if math.isnan(before + control + after):
            continue
        yield {
            "quantity": quantity,
            "value_before": before,
            "value_control": control,
            "value_after": after,
            "by_rescaling": control - before,
            "by_calibration": after - control,
        }
