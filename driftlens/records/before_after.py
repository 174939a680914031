"""A calibration's before and after, with the anchor alone between them, and how its settings were chosen.

With rho other than 1 the anchor is another merge of the same experts. Its variant, the control, is analysed like any
other, so that every gain splits exactly: merged to anchor is rescaling, anchor to calibrated is calibration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.compare import accuracy_of, drift_changes, paired_accuracy
from driftlens.records.intervals import (
    Interval,
    MeanChange,
    Paired,
    mean_interval,
    mean_over_tasks,
    unpaired_difference,
)
from driftlens.records.run import DriftRun
from driftlens.records.split import Split
from driftlens.variants import calibrated, is_control


@dataclass(frozen=True)
class Outcome:
    """How one variant does on one task; NaN where not measured.

    Attributes:
        task: the task.
        variant: merged, the control, the calibrated variant or `expert`; the expert has an accuracy only.
        drift: mean norm of the final drift.
        drift_error: half the 95 % interval of that mean over diagnosis samples (Student's t).
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
        change: from merged to calibrated, with its 95 % interval over samples; the tasks are those of the run.
    """

    measure: str
    merged: float
    control: float
    calibrated: float
    change: Interval

    @property
    def rescaling(self) -> float:
        """What the anchor alone changes."""
        return self._split.rescaling

    @property
    def calibration(self) -> float:
        """What the calibration changes beyond its anchor."""
        return self._split.calibration

    @property
    def _split(self) -> Split:
        return Split(self.merged, self.control, self.calibrated)


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
            known = 0 if math.isnan(samples) else int(samples)
            error = mean_interval(drift, std, known).high - drift
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
    found = (accuracy_change(run, task, ("merged", after)) for task in run.tasks)
    return [entry for entry in found if entry.n or entry.paired is not None]


def final_drift_changes(run: DriftRun, name: str) -> dict[str, MeanChange]:
    """How a calibration changes the mean final drift of each task, paired by sample; none without a merged model.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    after = compared_variants(run, name)[-2]
    if not {"merged", after} <= set(run.variants) or not run.manifest.layers:
        return {}
    last = run.layer_index("final")
    found = {task: drift_changes(run, run, task, ("merged", after)) for task in run.tasks}
    return {task: changes[last] for task, changes in found.items() if last in changes}


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
    merged = {entry.task: entry for entry in found if entry.variant == "merged"}
    by_measure = {
        "accuracy": [Interval(at.change, at.low, at.high) for at in accuracy_changes(run, name) if at.n],
        # The expert's norm, by which drift is divided, is taken as known.
        "relative drift": [
            at.difference.scaled(merged[task].relative / merged[task].drift)
            for task, at in final_drift_changes(run, name).items()
            if merged[task].drift
        ],
    }
    of_run = [
        _credit(found, name, measure, mean_over_tasks(changes) if len(changes) == len(run.tasks) else None)
        for measure, changes in by_measure.items()
    ]
    return [credit for credit in of_run if not math.isnan(credit.calibrated - credit.merged)]


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


def accuracy_change(run: DriftRun, task: str, variants: tuple[str, str]) -> AccuracyChange:
    """How the accuracy on one task changes from one variant to another.

    Raises:
        DataError: no such task or variant.
        RunError: a table can't be read.
    """
    paired, split = paired_accuracy(run, run, task, variants) or (None, "")
    before, n_before = accuracy_of(run, task, variants[0])
    value, n = accuracy_of(run, task, variants[1])
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


def _credit(found: list[Outcome], name: str, measure: str, change: Interval | None) -> Credit:
    def mean(variant: str) -> float:
        values = [
            entry.accuracy if measure == "accuracy" else entry.relative
            for entry in found
            if entry.variant == variant
        ]
        return sum(values) / len(values) if values else math.nan

    controls = [entry.variant for entry in found if is_control(entry.variant)]
    merged, after = mean("merged"), mean(calibrated(name))
    control = mean(controls[0]) if controls else merged
    return Credit(measure, merged, control, after, change or Interval(after - merged))


def _sentence(credit: Credit, has_control: bool) -> str:
    is_accuracy = credit.measure == "accuracy"
    values = [f"{100 * value:.1f} %" for value in (credit.merged, credit.calibrated)]
    change = credit.calibrated - credit.merged
    moved = "stays at" if values[0] == values[1] else "rises to" if change > 0 else "falls to"
    text = f"Mean {credit.measure} is {values[0]} merged and {moved} {values[1]} calibrated"
    unit = "points" if is_accuracy else "points of the expert's norm"
    if not math.isnan(credit.change.low):
        text += f" (95 % interval {_points(credit.change.low)} to {_points(credit.change.high)} {unit})"
    if not has_control:
        return f"{text}."
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


_SETTINGS = {"lam": "lambda", "rho": "rho", "alpha": "alpha"}
_TOLD = {
    *("score", "start", "chosen", "is_start_kept", "found"),
    *("advantage", "standard_error", "candidates", "seconds"),
}
"""Entries of the record that the sentence is made from."""


def selection_sentences(run: DriftRun, name: str) -> list[str]:
    """What was chosen instead of what, by which held-out advantage and at what cost; none where nothing was chosen.

    Args:
        run: with the finished calibration.
        name: of the calibration.

    Raises:
        DataError: the run has no finished calibration of that name.
    """
    known = run.manifest.calibrations
    if name not in known:
        raise DataError(f"the run has no calibration {name!r}; it has {', '.join(known) or 'none'}")
    if not known[name].automatic:
        return []
    if not known[name].selection.keys() >= _TOLD:
        # A run from before the manifest told, or a chooser of the caller's own, which may keep any record.
        return [
            f"Settings were chosen from the calibration samples; calibrations/{name}/config.yaml says how."
        ]
    return [_selection_sentence(known[name].selection)]


def _selection_sentence(record: Mapping[str, Any]) -> str:
    tried = {tuple(trial[key] for key in _SETTINGS) for trial in record["candidates"]}
    cost = f"{len(tried)} settings tried in {record['seconds']:.0f} s"
    preset = record.get("preset", "")
    if record.get("is_merged_kept"):
        return (
            "Settings were compared on held-out calibration samples and the merged model was kept as it is, as no "
            f"calibration was clearly better: with {_named(record['found'])}, {_gap(record, 'over_merged')}; {cost}."
        )
    if not record["is_start_kept"]:
        origin = f"{preset}'s" if preset else "the given"
        return (
            f"Settings were chosen on held-out calibration samples: {_named(record['chosen'])} instead of {origin} "
            f"{_values(record['start'])}; {_gap(record)}; {cost}."
        )
    kept = f"{preset} was kept" if preset else f"the given {_named(record['start'])} were kept"
    if record["found"] == record["start"]:
        reason = "no other candidate did better"
    else:
        reason = (
            f"the best other candidate, {_named(record['found'])}, was not clearly better: {_gap(record)}"
        )
    return f"Settings were compared on held-out calibration samples and {kept}, as {reason}; {cost}."


def _gap(record: Mapping[str, Any], over: str = "") -> str:
    """The held-out advantage of what was found over the start, with as many decimals as its error deserves."""
    has_heads = record["score"].startswith("KL")
    what, unit = ("KL", " nat") if has_heads else ("relative drift", "")
    told = record[over] if over else record
    advantage, error = told["advantage"], told["standard_error"]
    if advantage is None or error is None:
        return "it could not be solved for without the deciding samples"
    decimals = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 3
    moved = f"{'higher' if advantage < 0 else 'lower'} by {abs(advantage):.{decimals}f}{unit}"
    return f"held-out {what} {moved} (standard error {error:.{decimals}f})"


def _named(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{title} {settings[key]:g}" for key, title in _SETTINGS.items())


def _values(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{settings[key]:g}" for key in _SETTINGS)
