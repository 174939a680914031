"""What every variant of a run is measured by, as rows of the frame: by task, from one to another, and over tasks.

A measure comes with a function that yields its rows of a run, and one that yields those of a change; both stand in the
table `_SOURCES`, and then in every table, sentence and page that shows what variants are measured by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from driftlens.base.intervals import Interval, mean_over_tasks, wilson
from driftlens.base.metrics import ACCURACY, title_of
from driftlens.base.variants import part_of
from driftlens.findings.features import COSINE, DRIFT, DRIFT_CHANGE, RELATIVE, feature_changes, feature_levels
from driftlens.findings.frame import Finding, Measure, finding
from driftlens.findings.reading import Kind
from driftlens.findings.scores import changed_score, main_metrics, measure_of, score_levels
from driftlens.runs.run import DriftRun, remembered

FLIPS = Measure("flipped decisions", "share", "higher", name="flips")
SCORE = Measure("score", "share", "lower", "test", "score")
"""Asks for what each task is judged by, whatever its metric."""


def _flips(run: DriftRun) -> Iterator[Finding]:
    """The share of diagnosis samples that a variant decides otherwise than the expert, with Wilson's interval."""
    rows = run.outputs()
    rows = rows[rows["flipped"].notna()]
    for (task, variant), flipped in rows.groupby(["task", "variant"], sort=False)["flipped"]:
        count, n = int(flipped.sum()), len(flipped)
        yield finding(FLIPS, Interval(count / n, *wilson(count, n), n), str(task), str(variant))


def _score_changes(
    before: DriftRun, after: DriftRun, task: str, pair: tuple[str, str], _: float
) -> Iterator[Finding]:
    yield changed_score(before, after, task, pair, main_metrics(before).get(task, ACCURACY))


@dataclass(frozen=True)
class _Source:
    """Where rows of some measures come from: those of a run, and those of a change on one task."""

    measures: tuple[Measure, ...]
    levels: Callable[[DriftRun], Iterator[Finding]]
    changes: Callable[[DriftRun, DriftRun, str, tuple[str, str], float], Iterator[Finding]] | None = None


_SOURCES = (
    _Source((DRIFT, DRIFT_CHANGE, RELATIVE, COSINE), feature_levels, feature_changes),
    _Source((SCORE,), score_levels, _score_changes),
    _Source((FLIPS,), _flips),
)
_BY_ROLE = {about.role: source for source in _SOURCES for about in source.measures}
_AVERAGED = (DRIFT, RELATIVE, COSINE)
"""What has a mean over any tasks; scores have one with their like only: nats and shares have no common mean."""


@remembered
def _levels(run: DriftRun, source: _Source) -> Mapping[tuple[str, str, str], Finding]:
    return {(row.about.role, row.task, row.variant): row for row in source.levels(run)}


def level(run: DriftRun, of: Measure, task: str, variant: str) -> Finding:
    """What a variant has on a task; NaN where that was not measured."""
    row = _levels(run, _BY_ROLE[of.role]).get((of.role, task, variant))
    metric = main_metrics(run).get(task, ACCURACY) if of is SCORE else None
    return row or finding(measure_of(metric) if metric else of, Interval(math.nan), task, variant)


@remembered
def _changes(run: DriftRun, source: _Source, task: str, pair: tuple[str, str]) -> Mapping[str, Finding]:
    return changes_between(run, run, source.measures[0], task, pair)


def changes_between(
    before: DriftRun, after: DriftRun, of: Measure, task: str, pair: tuple[str, str]
) -> Mapping[str, Finding]:
    """What changes from a variant of one run to a variant of another, by `Measure.role`, for `of` and its kin."""
    source = _BY_ROLE[of.role]
    if source.changes is None:
        return {}
    drift, relative = (level(before, about, task, pair[0]).value for about in (DRIFT, RELATIVE))
    scale = relative / drift if drift else math.nan
    return {row.about.role: row for row in source.changes(before, after, task, pair, scale)}


def change(run: DriftRun, of: Measure, task: str, pair: tuple[str, str]) -> Finding:
    """How a measure changes on a task from one variant to another; without ends where its samples are not stored."""
    if row := _changes(run, _BY_ROLE[of.role], task, pair).get(of.role):
        return row
    start, end = (level(run, of, task, variant) for variant in pair)
    return finding(end.about, Interval(end.value - start.value), task, pair[1], pair[0], paired=False)


def mean(run: DriftRun, of: Measure, tasks: Sequence[str], variant: str) -> Finding:
    """The mean of what a variant has on these tasks."""
    over = mean_over_tasks([level(run, of, task, variant) for task in tasks])
    return replace(finding(of, over, "", variant), tasks=tuple(tasks))


def mean_change(run: DriftRun, of: Measure, tasks: Sequence[str], pair: tuple[str, str]) -> Finding:
    """How the mean over these tasks changes: the difference of both means, with the error of changes by task."""
    by_task = [change(run, of, task, pair) for task in tasks]
    start, end = (mean(run, of, tasks, variant).value for variant in pair)
    over = replace(mean_over_tasks(by_task), value=end - start)
    row = finding(of, over, "", pair[1], pair[0], paired=all(at.paired for at in by_task))
    return replace(row, tasks=tuple(tasks))


def common(run: DriftRun, variants: Sequence[str]) -> list[tuple[Measure, tuple[str, ...]]]:
    """Every measure that was taken of all these variants on at least one task, and those tasks."""
    groups = [(about, run.tasks) for about in _AVERAGED]
    metrics = main_metrics(run)
    for group in dict.fromkeys("" if metric.is_averaged else metric.name for metric in metrics.values()):
        like = {
            task: metric
            for task, metric in metrics.items()
            if group == ("" if metric.is_averaged else metric.name)
        }
        kinds, first = {metric.kind for metric in like.values()}, next(iter(like.values()))
        name = first.name if len(set(like.values())) == 1 else SCORE.name
        # A mean with correlations in it is no share of samples, yet reads as the paper's tables do.
        kind: Kind = "number" if kinds == {"number"} else "share"
        groups.append((Measure(title_of(like.values()), kind, first.worse, "test", name), tuple(like)))
    measured = [
        (
            about,
            tuple(task for task in tasks if all(level(run, about, task, of).is_measured for of in variants)),
        )
        for about, tasks in groups
    ]
    return [(about, tasks) for about, tasks in measured if tasks and variants]


def findings(
    run: DriftRun,
    variants: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[Finding]:
    """All rows of these variants and changes: by task, then their means over the tasks on which all were measured.

    `variants` None is all, and the expert; `pairs` None is from base to merged model, and from that to every
    calibrated one.
    """
    wanted = [*dict.fromkeys(("expert", *run.variants) if variants is None else variants)]
    if pairs is None:
        starts = {"merged": "base", "calibrated": "merged"}
        ends = [(starts.get(part_of(name), ""), name) for name in wanted]
        pairs = [(start, end) for start, end in ends if start in wanted]
    rows = [row for source in _SOURCES for row in _levels(run, source).values() if row.variant in wanted]
    for task, pair, source in itertools.product(run.tasks, pairs, _SOURCES):
        rows += _changes(run, source, task, pair).values()
    for about, tasks in common(run, [name for name in wanted if name != "expert"]):
        rows += [mean(run, about, tasks, variant) for variant in wanted]
        rows += [mean_change(run, about, tasks, pair) for pair in pairs]
    return [row for row in rows if row.is_measured]
