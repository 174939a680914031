"""A calibration's before and after, with the anchor alone between them: what did the calibration itself gain?

With rho other than 1 the anchor is another merge of the same experts. Its variant, the control, is analysed like any
other, so that every gain splits exactly: merged to anchor is rescaling, anchor to calibrated is calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens.records.variants import calibrated, is_control


@dataclass(frozen=True)
class Outcome:
    """How one variant does on one task; NaN where not measured.

    Attributes:
        task: the task.
        variant: merged, the control, the calibrated variant or `expert`; the expert has an accuracy only.
        drift: mean norm of the final drift.
        relative: final drift norm against the expert's feature norm.
        cosine: mean cosine of the final feature to the expert's.
        accuracy: on test samples.
        low: lower end of its 95 % interval.
        high: upper end of its 95 % interval.
        n: test samples behind it; 0 without.
    """

    task: str
    variant: str
    drift: float
    relative: float
    cosine: float
    accuracy: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Credit:
    """How a measure's mean over tasks changes, and what changes it; NaN where a variant was not measured.

    Attributes:
        measure: "accuracy", a share; or "relative drift", of the expert's feature norm.
        merged: before.
        control: with the anchor alone; the merged value where the anchor is the merged model.
        calibrated: after.
    """

    measure: str
    merged: float
    control: float
    calibrated: float

    @property
    def rescaling(self) -> float:
        """What the anchor alone changes."""
        return self.control - self.merged

    @property
    def calibration(self) -> float:
        """What the calibration changes beyond its anchor."""
        return self.calibrated - self.control


def compared_variants(run: DriftRun, name: str) -> tuple[str, ...]:
    """The variants of a calibration's table: merged, the control where there is one, calibrated, expert.

    Raises:
        DataError: the run has no finished calibration of that name.
    """
    known = run.manifest.calibrations
    if name not in known:
        there = ", ".join(known) or "none"
        raise DataError(f"the run has no calibration {name!r}; it has {there}")
    control = known[name].control
    return ("merged", *([control] if control else []), calibrated(name), "expert")


def outcomes(run: DriftRun, name: str) -> list[Outcome]:
    """One entry per task and compared variant, in the order of the run.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    drifts = _by_key(run.layers(layer="final"), ("drift_l2_mean", "drift_rel", "cos_mean"))
    accuracy = run.accuracy()
    accuracy = accuracy[accuracy["metric"] == "accuracy"]
    scores = _by_key(accuracy, ("value", "ci_low", "ci_high", "n"))
    unknown = (math.nan,) * 4
    found = []
    for task in run.tasks:
        for variant in compared_variants(run, name):
            drift, relative, cosine = drifts.get((task, variant), unknown[:3])
            value, low, high, n = scores.get((task, variant), unknown)
            count = 0 if math.isnan(n) else int(n)
            found.append(Outcome(task, variant, drift, relative, cosine, value, low, high, count))
    return found


def credits_of(run: DriftRun, name: str) -> list[Credit]:
    """What calibration and rescaling each change, for every measure that was taken on all tasks.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    found = outcomes(run, name)
    found_credits = [_credit(found, name, "accuracy"), _credit(found, name, "relative drift")]
    return [credit for credit in found_credits if not math.isnan(credit.calibrated - credit.merged)]


def credit_sentences(run: DriftRun, name: str) -> list[str]:
    """How much of each gain is calibration and how much is rescaling, in sentences; losses are named too.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    has_control = any(is_control(variant) for variant in compared_variants(run, name))
    lines = [_sentence(credit, has_control) for credit in credits_of(run, name)]
    if not has_control:
        lines.append("No anchor other than the merged model was used, so none of this is rescaling.")
    return lines + _losses(outcomes(run, name), name)


def _by_key(rows: pd.DataFrame, columns: Sequence[str]) -> dict[tuple[str, str], tuple[float, ...]]:
    """The numbers of every row by task and variant."""
    values = rows[list(columns)].astype(float).to_numpy().tolist()
    keys = zip(rows["task"].tolist(), rows["variant"].tolist(), strict=True)
    return {key: tuple(row) for key, row in zip(keys, values, strict=True)}


def _credit(found: list[Outcome], name: str, measure: str) -> Credit:
    def mean(variant: str) -> float:
        values = [
            entry.accuracy if measure == "accuracy" else entry.relative
            for entry in found
            if entry.variant == variant
        ]
        return sum(values) / len(values) if values else math.nan

    controls = [entry.variant for entry in found if is_control(entry.variant)]
    merged = mean("merged")
    return Credit(measure, merged, mean(controls[0]) if controls else merged, mean(calibrated(name)))


def _sentence(credit: Credit, has_control: bool) -> str:
    is_accuracy = credit.measure == "accuracy"
    values = [f"{100 * value:.1f} %" for value in (credit.merged, credit.calibrated)]
    change = credit.calibrated - credit.merged
    moved = "stays at" if values[0] == values[1] else "rises to" if change > 0 else "falls to"
    text = f"Mean {credit.measure} is {values[0]} merged and {moved} {values[1]} calibrated"
    if not has_control:
        return f"{text}."
    unit = "points" if is_accuracy else "points of the expert's norm"
    return (
        f"{text}: {100 * credit.rescaling:+.1f} {unit} come from the anchor alone (rescaling), "
        f"{100 * credit.calibration:+.1f} from calibration."
    )


def _losses(found: list[Outcome], name: str) -> list[str]:
    """Tasks on which the calibrated model is less accurate than the merged one: a mean would hide them."""
    before = {entry.task: entry.accuracy for entry in found if entry.variant == "merged"}
    after = {entry.task: entry.accuracy for entry in found if entry.variant == calibrated(name)}
    lost = [task for task in before if after[task] < before[task]]
    listed = ", ".join(f"{task} ({100 * (after[task] - before[task]):+.1f} points)" for task in lost)
    return [f"Less accurate than before on {listed}."] if lost else []
