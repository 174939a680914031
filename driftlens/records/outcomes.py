"""How each variant does on each task and on all of them, and what changes between two: numbers with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import pandas as pd

from driftlens.records.compare import accuracy_of, drift_changes, paired_accuracy
from driftlens.records.intervals import (
    Interval,
    Paired,
    mean_interval,
    mean_over_tasks,
    unpaired_difference,
)
from driftlens.records.reading import Kind, is_measured
from driftlens.records.run import DriftRun

_NOTHING = Interval(math.nan)


@dataclass(frozen=True)
class Measure:
    """What every variant is measured by."""

    title: str
    kind: Kind
    worse: Literal["higher", "lower"]


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "drift": Measure("final drift", "number", "higher"),
        "relative": Measure("relative drift", "share", "higher"),
        "cosine": Measure("cosine to the expert", "number", "lower"),
        "accuracy": Measure("accuracy", "share", "lower"),
    }
)
"""By the attribute of `Outcome` that holds it."""


@dataclass(frozen=True)
class Outcome:
    """How one variant does on one task, with 95 % intervals; NaN where not measured.

    Attributes:
        task: the task.
        variant: a variant of the run, or `expert`, which has an accuracy only.
        drift: mean norm of the final drift, over diagnosis samples (Student's interval).
        relative: the same against the expert's feature norm, which the interval takes as known.
        cosine: mean cosine of the final feature to the expert's.
        accuracy: on test samples (Wilson's interval).
    """

    task: str
    variant: str
    drift: Interval
    relative: Interval
    cosine: Interval
    accuracy: Interval


@dataclass(frozen=True)
class AccuracyChange:
    """How the accuracy on one task changes; NaN where not measured.

    Attributes:
        task: the task.
        change: after minus before on test samples, a fraction.
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
class TaskMeans:
    """A measure's mean over the tasks on which every compared variant was measured, with 95 % intervals over samples.

    Attributes:
        measure: a key of `MEASURES`.
        tasks: those tasks.
        means: by variant, in the order compared.
        change: from the first of several variants to the last; NaN with one.
    """

    measure: str
    tasks: tuple[str, ...]
    means: Mapping[str, Interval]
    change: Interval


def outcomes(run: DriftRun, variants: Sequence[str] | None = None) -> list[Outcome]:
    """One entry per task and variant, in the order of the run; of all variants and the expert unless some are named.

    Raises:
        RunError: a table can't be read.
    """
    columns = ("drift_l2_mean", "drift_l2_std", "drift_rel", "cos_mean", "cos_std", "n")
    final = _by_key(run.layers(layer="final") if run.manifest.layers else run.layers(), columns)
    accuracy = run.accuracy()
    scores = _by_key(accuracy[accuracy["metric"] == "accuracy"], ("value", "ci_low", "ci_high", "n"))
    wanted = dict.fromkeys([*run.variants, "expert"] if variants is None else variants)
    unknown = (math.nan,) * len(columns)
    found = []
    for task in run.tasks:
        for variant in wanted:
            mean, std, share, cosine, cosine_std, n = final.get((task, variant), unknown)
            drift = mean_interval(mean, std, _count(n))
            relative = replace(drift.scaled(share / mean) if mean else drift, value=share)
            value, low, high, tests = scores.get((task, variant), unknown[:4])
            found.append(
                Outcome(
                    task,
                    variant,
                    drift,
                    relative,
                    mean_interval(cosine, cosine_std, _count(n)),
                    Interval(value, low, high, _count(tests)),
                )
            )
    return found


def task_means(run: DriftRun, variants: Sequence[str]) -> list[TaskMeans]:
    """The mean over tasks of every measure that was taken of all these variants on at least one task.

    Raises:
        DataError: no such variant.
        RunError: a table can't be read.
    """
    found = {(entry.task, entry.variant): entry for entry in outcomes(run, variants)}
    means = []
    for measure in MEASURES if variants else ():
        rows = {task: [getattr(found[task, name], measure) for name in variants] for task in run.tasks}
        whole = {task: row for task, row in rows.items() if all(is_measured(entry.value) for entry in row)}
        if not whole:
            continue
        columns = [mean_over_tasks(column) for column in zip(*whole.values(), strict=True)]
        change = _NOTHING
        if len(variants) > 1:
            ends = variants[0], variants[-1]
            by_task = [_change(run, measure, *(found[task, name] for name in ends)) for task in whole]
            change = replace(mean_over_tasks(by_task), value=columns[-1].value - columns[0].value)
        by_variant = dict(zip(variants, columns, strict=True))
        means.append(TaskMeans(measure, tuple(whole), by_variant, change))
    return means


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


def _change(run: DriftRun, measure: str, start: Outcome, end: Outcome) -> Interval:
    """The change of one measure on one task; without ends where its samples are not stored."""
    variants = (start.variant, end.variant)
    if measure == "accuracy":
        at = accuracy_change(run, start.task, variants)
        return Interval(at.change, at.low, at.high, at.n)
    column = "cos" if measure == "cosine" else "drift_l2"
    changes = drift_changes(run, run, start.task, variants, column=column, layer="final")
    if not changes:
        return Interval(getattr(end, measure).value - getattr(start, measure).value)
    (change,) = changes.values()
    if measure != "relative":
        return change.difference
    # The expert's norm, by which drift is divided, is taken as known.
    scale = start.relative.value / start.drift.value if start.drift.value else math.nan
    return change.difference.scaled(scale)


def _by_key(rows: pd.DataFrame, columns: Sequence[str]) -> dict[tuple[str, str], tuple[float, ...]]:
    """The numbers of every row by task and variant."""
    values = rows[list(columns)].astype(float).to_numpy().tolist()
    keys = zip(rows["task"].tolist(), rows["variant"].tolist(), strict=True)
    return {key: tuple(row) for key, row in zip(keys, values, strict=True)}


def _count(n: float) -> int:
    return 0 if math.isnan(n) else int(n)
