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
from driftlens.records.compare import paired_accuracy
from driftlens.records.intervals import Paired, unpaired_difference
from driftlens.records.run import DriftRun
from driftlens.records.single import accuracy_of
from driftlens.variants import calibrated, is_control

_Z = 1.96
"""Standard errors either way of a mean that hold 95 % of a normal variable."""


@dataclass(frozen=True)
class Outcome:
    """How one variant does on one task; NaN where not measured.

    Attributes:
        task: the task.
        variant: merged, the control, the calibrated variant or `expert`; the expert has an accuracy only.
        drift: mean norm of the final drift.
        drift_error: 1.96 standard errors of that mean over diagnosis samples, half its 95 % interval.
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
    drift_error: float
    relative: float
    cosine: float
    accuracy: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class AccuracyChange:
    """How a calibration changes the accuracy on one task; NaN where not measured.

    Attributes:
        task: the task.
        change: calibrated minus merged on test samples, a fraction.
        low: lower end of its 95 % interval.
        high: upper end of its 95 % interval.
        n: test samples behind it; 0 without.
        is_paired: whether the interval counts samples gained and lost. Without answers sample by sample it comes from
            the two accuracies alone, as if of different samples, and is wider than it need be.
        paired: the change on samples whose answers are stored; None where none is.
        split: which samples those are, "test" or "diagnosis"; empty without.
    """

    task: str
    change: float
    low: float
    high: float
    n: int
    is_paired: bool
    paired: Paired | None
    split: str


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
    columns = ("drift_l2_mean", "drift_l2_std", "n", "drift_rel", "cos_mean")
    drifts = _by_key(run.layers(layer="final"), columns)
    accuracy = run.accuracy()
    accuracy = accuracy[accuracy["metric"] == "accuracy"]
    scores = _by_key(accuracy, ("value", "ci_low", "ci_high", "n"))
    unknown = (math.nan,) * len(columns)
    found = []
    for task in run.tasks:
        for variant in compared_variants(run, name):
            drift, std, samples, relative, cosine = drifts.get((task, variant), unknown)
            error = _Z * std / math.sqrt(samples) if samples > 1 else math.nan
            value, low, high, n = scores.get((task, variant), unknown[:4])
            count = 0 if math.isnan(n) else int(n)
            found.append(Outcome(task, variant, drift, error, relative, cosine, value, low, high, count))
    return found


def accuracy_changes(run: DriftRun, name: str) -> list[AccuracyChange]:
    """One entry per task whose accuracy was measured before and after, or whose answers are stored.

    A run that has no merged model, or not this variant, has none.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    after = compared_variants(run, name)[-2]
    if not {"merged", after} <= set(run.variants):
        return []
    found = (_accuracy_change(run, task, after) for task in run.tasks)
    return [entry for entry in found if entry.n or entry.paired is not None]


def accuracy_change_note(found: Sequence[AccuracyChange]) -> str:
    """What a reader must know about the intervals of these changes."""
    if all(entry.is_paired for entry in found if entry.n):
        return "Both models answered the same test samples; intervals count the answers that changed."
    text = (
        "Single answers are not stored for all test samples: the interval there takes the two accuracies for "
        "independent and is wider than it need be, as both models answered the same samples."
    )
    if any(entry.split == "diagnosis" for entry in found):
        text += " Answers that changed are counted on the diagnosis samples."
    return text


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


def _accuracy_change(run: DriftRun, task: str, after: str) -> AccuracyChange:
    paired, split = paired_accuracy(run, run, task, ("merged", after)) or (None, "")
    before, n_before = accuracy_of(run, task, "merged")
    value, n = accuracy_of(run, task, after)
    if not n_before or not n:
        return AccuracyChange(task, math.nan, math.nan, math.nan, 0, False, paired, split)
    if paired is not None and split == "test":
        return AccuracyChange(task, paired.difference, paired.ci_low, paired.ci_high, n, True, paired, split)
    low, high = unpaired_difference(round(before * n_before), n_before, round(value * n), n)
    return AccuracyChange(task, value - before, low, high, n, False, paired, split)


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
        f"{text}: {_points(credit.rescaling)} {unit} come from the anchor alone (rescaling), "
        f"{_points(credit.calibration)} from calibration."
    )


def _points(value: float) -> str:
    # Adding zero takes the minus off a zero that was rounded from below.
    return f"{round(100 * value, 1) + 0.0:+.1f}"


def _losses(found: list[Outcome], name: str) -> list[str]:
    """Tasks on which the calibrated model is less accurate than the merged one: a mean would hide them."""
    before = {entry.task: entry.accuracy for entry in found if entry.variant == "merged"}
    after = {entry.task: entry.accuracy for entry in found if entry.variant == calibrated(name)}
    lost = [task for task in before if after[task] < before[task]]
    listed = ", ".join(f"{task} ({100 * (after[task] - before[task]):+.1f} points)" for task in lost)
    return [f"Less accurate than before on {listed}."] if lost else []
