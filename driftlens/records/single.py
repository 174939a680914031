"""Single numbers of a run, NaN where they were not measured."""

from __future__ import annotations

import math

import numpy as np

from driftlens.records.run import DriftRun


def final_value(run: DriftRun, task: str, variant: str, column: str) -> float:
    """One number of the layer table's last row of a task and variant; the expert has no rows.

    Raises:
        DataError: no such task or variant.
        RunError: the table can't be read.
    """
    rows = run.layers(task, variant, "final")
    return float(rows[column].iloc[0]) if len(rows) else math.nan


def flip_share(run: DriftRun, task: str, variant: str) -> float:
    """Share of diagnosis samples that the variant decides otherwise than the expert. Errors as above."""
    flipped = run.outputs(task, variant)["flipped"].dropna().to_numpy(dtype=bool)
    return float(np.mean(flipped)) if len(flipped) else math.nan


def accuracy_of(run: DriftRun, task: str, variant: str) -> tuple[float, int]:
    """Accuracy on test samples, a fraction, and how many they are; NaN and 0 without. Errors as above."""
    rows = run.accuracy(task, variant)
    rows = rows[(rows["metric"] == "accuracy") & rows["value"].notna() & rows["n"].notna()]
    return (float(rows["value"].iloc[0]), int(rows["n"].iloc[0])) if len(rows) else (math.nan, 0)


def ratio(part: float, whole: float) -> float:
    """`part / whole`; NaN over 0, as every ratio of the tables."""
    return part / whole if whole else math.nan
