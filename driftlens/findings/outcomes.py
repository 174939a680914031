"""How each variant does on each task and on all of them, and what changes between two: numbers with intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd

from driftlens.base.intervals import Interval, MeanChange, mean_interval, mean_over_tasks
from driftlens.base.metrics import ACCURACY, Metric, title_of
from driftlens.base.variants import part_of, title
from driftlens.findings.compare import ScoreChange, changed_score, drift_changes
from driftlens.findings.reading import Kind, Sheet, is_measured
from driftlens.findings.scores import main_metrics
from driftlens.runs.run import DriftRun, remembered

_NOTHING = Interval(math.nan)


@dataclass(frozen=True)
class Measure:
    """What every variant is measured by, on which samples."""

    title: str
    kind: Kind
    worse: Literal["higher", "lower"]
    split: Literal["diagnosis", "test"] = "diagnosis"


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "drift": Measure("final drift", "number", "higher"),
        "relative": Measure("relative drift", "share", "higher"),
        "cosine": Measure("cosine to the expert", "number", "lower"),
    }
)
"""What is measured on every task, by the attribute of `Outcome` that holds it; scores are the task's own."""


@dataclass(frozen=True)
class Outcome:
    """How one variant does on one task, with 95 % intervals; NaN where not measured.

    Attributes:
        task: the task.
        variant: a variant of the run, or `expert`, which has a score only.
        drift: mean norm of the final drift, over diagnosis samples (Student's interval).
        relative: the same against the expert's feature norm, which the interval takes as known.
        cosine: mean cosine of the final feature to the expert's.
        score: on test samples, with the metric's interval.
        metric: what the score is: what the task is judged by, see `main_metrics`.
    """

    task: str
    variant: str
    drift: Interval
    relative: Interval
    cosine: Interval
    score: Interval
    metric: Metric = ACCURACY


@dataclass(frozen=True)
class TaskMeans:
    """A measure's mean over the tasks on which every compared variant was measured, with 95 % intervals over samples.

    Attributes:
        measure: a key of `MEASURES`; of scores the name of their metric, or "score" where it is a mean of several.
        tasks: those tasks.
        means: by variant, in the order compared.
        change: from the first of several variants to the last; NaN with one.
        about: what it is a mean of, for a reader.
    """

    measure: str
    tasks: tuple[str, ...]
    means: Mapping[str, Interval]
    change: Interval
    about: Measure


def outcomes(run: DriftRun, variants: Sequence[str] | None = None) -> list[Outcome]:
    """One entry per task and variant, in the order of the run; of all variants and the expert unless some are named.

    Raises:
        RunError: a table can't be read.
    """
    columns = ("drift_l2_mean", "drift_l2_std", "drift_rel", "cos_mean", "cos_std", "n")
    final = _by_key(run.layers(layer="final") if run.manifest.layers else run.layers(), columns)
    metrics, scored = main_metrics(run), run.accuracy()
    is_main = scored["metric"] == scored["task"].map({task: metric.name for task, metric in metrics.items()})
    scores = _by_key(scored[is_main], ("value", "ci_low", "ci_high", "n"))
    wanted = dict.fromkeys([*run.variants, "expert"] if variants is None else variants)
    unknown = (math.nan,) * len(columns)
    found = []
    for task, variant in itertools.product(run.tasks, wanted):
        mean, std, share, cosine, cosine_std, n = final.get((task, variant), unknown)
        drift = mean_interval(mean, std, _count(n))
        relative = replace(drift.scaled(share / mean) if mean else drift, value=share)
        angle = mean_interval(cosine, cosine_std, _count(n))
        value, low, high, tests = scores.get((task, variant), unknown[:4])
        score = Interval(value, low, high, _count(tests))
        found.append(Outcome(task, variant, drift, relative, angle, score, metrics.get(task, ACCURACY)))
    return found


def task_means(run: DriftRun, variants: Sequence[str]) -> list[TaskMeans]:
    """The mean over tasks of every measure that was taken of all these variants on at least one task.

    Raises:
        DataError: no such variant.
        RunError: a table can't be read.
    """
    found = {(entry.task, entry.variant): entry for entry in outcomes(run, variants)}
    means = []
    for name, measure, tasks in _groups(run) if variants else ():
        of = "score" if measure.split == "test" else name
        rows = {task: [getattr(found[task, variant], of) for variant in variants] for task in tasks}
        whole = {task: row for task, row in rows.items() if all(is_measured(entry.value) for entry in row)}
        if not whole:
            continue
        columns = [mean_over_tasks(column) for column in zip(*whole.values(), strict=True)]
        change = _NOTHING
        if len(variants) > 1:
            ends = variants[0], variants[-1]
            by_task = [outcome_change(run, of, *(found[task, name] for name in ends)) for task in whole]
            change = replace(mean_over_tasks(by_task), value=columns[-1].value - columns[0].value)
        by_variant = dict(zip(variants, columns, strict=True))
        means.append(TaskMeans(name, tuple(whole), by_variant, change, measure))
    return means


def _groups(run: DriftRun) -> Iterator[tuple[str, Measure, Sequence[str]]]:
    """What is averaged, over which tasks. Scores are with their like only: nats and shares have no common mean."""
    for name, measure in MEASURES.items():
        yield name, measure, run.tasks
    metrics = main_metrics(run)
    for group in dict.fromkeys("" if at.is_averaged else at.name for at in metrics.values()):
        own = {task: at for task, at in metrics.items() if group == ("" if at.is_averaged else at.name)}
        kinds, first = {at.kind for at in own.values()}, next(iter(own.values()))
        name = first.name if len(set(own.values())) == 1 else "score"
        # A mean with correlations in it is no share of samples, yet reads as the paper's tables do.
        kind: Kind = "number" if kinds == {"number"} else "share"
        yield name, Measure(title_of(own.values()), kind, first.worse, "test"), [*own]


@remembered
def score_change(run: DriftRun, task: str, variants: tuple[str, str]) -> ScoreChange:
    """How what a task is judged by changes from one variant to another.

    Raises:
        DataError: no such task or variant.
        RunError: a table can't be read.
    """
    return changed_score(run, run, task, variants, main_metrics(run).get(task, ACCURACY))


@remembered
def final_change(run: DriftRun, task: str, variants: tuple[str, str], column: str) -> MeanChange | None:
    """How the mean of a column of the sample table changes at the final layer on one task; None where not stored.

    Raises:
        DataError: no such task or variant.
        RunError: the sample table can't be read.
    """
    return next(iter(drift_changes(run, run, task, variants, column=column, layer="final").values()), None)


def outcome_change(run: DriftRun, measure: str, start: Outcome, end: Outcome) -> Interval:
    """The change of one measure on one task, by its attribute; without ends where its samples are not stored."""
    variants = (start.variant, end.variant)
    if measure == "score":
        at = score_change(run, start.task, variants)
        return Interval(at.change, at.low, at.high, at.n)
    change = final_change(run, start.task, variants, "cos" if measure == "cosine" else "drift_l2")
    if change is None:
        return Interval(getattr(end, measure).value - getattr(start, measure).value)
    if measure != "relative":
        return change.difference
    # The expert's norm, by which drift is divided, is taken as known.
    scale = start.relative.value / start.drift.value if start.drift.value else math.nan
    return change.difference.scaled(scale)


def summary_sheet(run: DriftRun) -> Sheet:
    """A row per task, then their mean: what base, experts, merged and calibrated models score, and their final drift.

    Scores have 95 % intervals; a model that was not measured has no columns.

    Raises:
        RunError: a table can't be read.
    """
    listed = dict.fromkeys(("base", "expert", *run.variants))
    named = {name: title(name) for name in listed if part_of(name) != "baseline"}
    heads = {name: name if [*named.values()].count(head) > 1 else head for name, head in named.items()}
    found = outcomes(run, [*named])
    metrics = [main_metrics(run).get(task, ACCURACY) for task in run.tasks]
    names = [*run.tasks]
    has_mean = len(names) > 1 and len(set(metrics)) == 1
    if has_mean:
        names.append(f"mean of {len(names)}")

    def measured(of: str) -> dict[str, list[Interval]]:
        """By heading, what was measured of every model on the tasks, and its mean."""
        columns = {}
        for variant, head in heads.items():
            cells = [getattr(entry, of) for entry in found if entry.variant == variant]
            if any(is_measured(cell.value) for cell in cells):
                columns[head] = [*cells, mean_over_tasks(cells)] if has_mean else cells
        return columns

    scores, drifts = measured("score"), measured("relative")
    kind: Kind = "share" if all(metric.kind == "share" for metric in metrics) else "number"
    kinds: dict[str, Kind] = {"task": "text", "metric": "text", "test samples": "count"}
    kinds |= {f"{head}{end}": kind for head in scores for end in ("", " low", " high")}
    kinds |= {f"drift of {head}": "share" for head in drifts}
    rows: list[list[Any]] = []
    for at, (name, metric) in enumerate(zip(names, [*metrics, *metrics[:1]], strict=False)):
        cells = [column[at] for column in scores.values()]
        ends = [end for cell in cells for end in (cell.value, cell.low, cell.high)]
        n = max((cell.n for cell in cells), default=0) or None
        rows.append([name, metric.title, n, *ends, *(column[at].value for column in drifts.values())])
    note = "95 % intervals over samples. Drift is that of the final feature, against the expert's norm."
    return Sheet("summary", f"{run.name} ({run.id})", kinds, rows, note)


def _by_key(rows: pd.DataFrame, columns: Sequence[str]) -> dict[tuple[str, str], tuple[float, ...]]:
    """The numbers of every row by task and variant."""
    values = rows[list(columns)].astype(float).to_numpy().tolist()
    keys = zip(rows["task"].tolist(), rows["variant"].tolist(), strict=True)
    return {key: tuple(row) for key, row in zip(keys, values, strict=True)}


def _count(n: float) -> int:
    return 0 if math.isnan(n) else int(n)
