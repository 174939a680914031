"""Scores and drift of the variants of a run by task, their changes between variants, and means over tasks.

Entry points: `value_on_task`, `change_on_task`, `mean_on_tasks`, `mean_change`, `findings_frame`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pandas as pd

from driftlens.results.formatting import Kind, format_interval, format_points, format_signed, is_measured
from driftlens.runs.run import DriftRun, cache_on_run
from driftlens.utils import intervals
from driftlens.utils.errors import DriftLensError
from driftlens.utils.intervals import (
    Array,
    Interval,
    MeanChange,
    PairedChange,
    mean_over_tasks,
    share_interval,
)
from driftlens.utils.variants import ACCURACY, METRICS, Metric, metric_by_name, metrics_title, variant_kind


@dataclass(frozen=True)
class Measure:
    """A quantity that models are compared by, such as drift or accuracy, and the data split it uses.

    `name` is drift, relative, cosine, flips or the name of a metric; "score" for a mean over several metrics.
    """

    title: str
    kind: Kind
    worse: Literal["higher", "lower"]
    split: Literal["diagnosis", "test"] = "diagnosis"
    name: str = ""

    @property
    def role(self) -> str:
        """The lookup key of the measure: its name, or "score" for the main metric of any task."""
        return "score" if self.split == "test" else self.name

    @property
    def sign(self) -> int:
        """+1 if higher values are better, else -1."""
        return 1 if self.worse == "lower" else -1


@dataclass(frozen=True)
class MeasuredValue(Interval):
    """The value of a variant, or its change against another one, with its interval; NaN if not measured.

    Attributes:
        task: empty for a mean over `tasks`.
        paired: for a change, True if its interval is paired by sample; None for others.
        answers: for a change of a share, counts of changed answers on samples with stored answers of both.
        answered: the split of those samples, "test" or "diagnosis".
    """

    about: Measure = field(kw_only=True)
    task: str = field(default="", kw_only=True)
    variant: str = field(default="", kw_only=True)
    against: str = field(default="", kw_only=True)
    paired: bool | None = field(default=None, kw_only=True)
    tasks: tuple[str, ...] = field(default=(), kw_only=True)
    answers: PairedChange | None = field(default=None, kw_only=True)
    answered: str = field(default="", kw_only=True)

    @property
    def is_measured(self) -> bool:
        """True if there is a number."""
        return not math.isnan(self.value)

    @property
    def interval(self) -> Interval:
        """The value and its interval without the description of what was measured."""
        return Interval(self.value, self.low, self.high, self.n)

    @property
    def side(self) -> int:
        """1 if the whole interval of a change is an improvement, -1 if a loss, 0 if it contains 0."""
        return self.about.sign * ((self.low > 0) - (self.high < 0))


def _measured_value(
    about: Measure,
    numbers: Interval,
    task: str,
    variant: str,
    against: str = "",
    *,
    paired: bool | None = None,
) -> MeasuredValue:
    return MeasuredValue(
        *numbers.ends, numbers.n, about=about, task=task, variant=variant, against=against, paired=paired
    )


_FRAME = ("measure", "task", "variant", "against", "value", "low", "high", "n", "paired", "kind", "worse")


def pairing_note(paired: Mapping[str, bool | None]) -> str:
    """Return a sentence on whether the intervals of changes are paired by sample."""
    apart = [name for name, is_paired in paired.items() if not is_paired]
    if not paired:
        return ""
    if not apart:
        return "95 % intervals of changes are paired by sample."
    where = "" if len(apart) == len(paired) else f" of {', '.join(apart)}"
    return (
        f"95 % intervals of changes{where} are not paired and too wide, as single answers are not stored; rerun the "
        "analysis to store them."
    )


def pairing_by_task(rows: Sequence[MeasuredValue]) -> dict[str, bool]:
    """Return by task True if all intervals of changes on it are paired by sample."""
    measured = [row for row in rows if is_measured(row.low)]
    return {row.task: all(other.paired for other in measured if other.task == row.task) for row in measured}


def describe_change(measure: Measure, before: float, change: Interval) -> str:
    """Format a change with its interval: points for shares, percent for lengths, else the measure's own unit.

    If the interval contains 0, no change is claimed. Empty without a change.

    Args:
        measure: the measure.
        before: its value before, to which a change of a length is relative.
        change: after minus before, with its interval.
    """
    if not is_measured(change.value):
        return ""
    if measure.kind == "share":
        text, ends = f"{format_points(change.value)} points", format_interval(change.low, change.high)
    elif measure.worse == "higher" and before:
        relative = change.scaled(1 / before)
        text, ends = f"{format_points(relative.value)} %", format_interval(relative.low, relative.high)
        ends = f"{ends} %" if ends else ""
    else:
        text = format_signed(change.value)
        ends = f"{format_signed(change.low)} to {format_signed(change.high)}" if is_measured(change.low) else ""
    # An interval that contains 0 leaves the direction open.
    claimed = "no clear change, " if change.low <= 0 <= change.high else ""
    return f"{claimed}{text}{f' ({ends})' if ends else ''}"


DRIFT = Measure("final drift", "number", "higher", name="drift")
DRIFT_CHANGE = Measure("final drift against that before", "share", "higher", name="drift_change")
RELATIVE = Measure("relative drift", "share", "higher", name="relative")
COSINE = Measure("cosine to the expert", "number", "lower", name="cosine")

# Values by role of the measure, task and variant.
_Levels = Mapping[tuple[str, str, str], MeasuredValue]
_COLUMNS = ["task", "variant", "drift_l2_mean", "drift_l2_std", "drift_rel", "cos_mean", "cos_std", "n"]
FLIPS = Measure("flipped decisions", "share", "higher", name="flips")
# The main metric of each task.
SCORE = Measure("score", "share", "lower", "test", "score")


@cache_on_run
def _drift_and_cosine_values(run: DriftRun) -> _Levels:
    """Return mean drift, relative drift and cosine with Student intervals, by measure, task and variant."""
    rows, levels = run.layers(layer="final") if run.manifest.layers else run.layers(), []
    numbers = rows[_COLUMNS[2:]].astype(float).to_numpy().tolist()
    for task, variant, values in zip(rows["task"], rows["variant"], numbers, strict=True):
        mean, std, share, cosine, cosine_std = values[:-1]
        n = 0 if math.isnan(values[-1]) else int(values[-1])
        drift = intervals.mean_interval(mean, std, n)
        # Scaled, as the norm of the expert is treated as exact: only the drift has sampling error.
        relative = replace(drift.scaled(share / mean) if mean else drift, value=share)
        by_measure = {DRIFT: drift, RELATIVE: relative}
        by_measure[COSINE] = intervals.mean_interval(cosine, cosine_std, n)
        levels += [_measured_value(about, value, str(task), str(variant)) for about, value in by_measure.items()]
    return _index_by_task_and_variant(levels)


def _index_by_task_and_variant(rows: Iterable[MeasuredValue]) -> _Levels:
    return {(row.about.role, row.task, row.variant): row for row in rows}


def feature_changes(before: DriftRun, after: DriftRun, task: str, pair: tuple[str, str]) -> dict[str, MeasuredValue]:
    """Return the changes of drift and cosine between two variants by measure; empty without stored samples."""
    rows: list[MeasuredValue] = []
    for about, column in ((DRIFT, "drift_l2"), (COSINE, "cos")) if after.manifest.layers else ():
        changes = drift_changes(before, after, task, pair, column=column, layer="final")
        for change in changes.values():
            numbers = {about: change.difference}
            if about is DRIFT:
                drift, relative = (value_on_task(before, other, task, pair[0]).value for other in (DRIFT, RELATIVE))
                # Relative drift by drift: the expert's norm, taken as known.
                scale = relative / drift if drift else math.nan
                numbers |= {RELATIVE: change.difference.scaled(scale), DRIFT_CHANGE: change.relative}
            rows += [
                _measured_value(measure, value, task, pair[1], pair[0], paired=change.is_paired)
                for measure, value in numbers.items()
            ]
    return {row.about.role: row for row in rows}


def has_same_samples(a: DriftRun, b: DriftRun, task: str, split: str = "diagnosis") -> bool | None:
    """Return True if two runs used the same samples of a task, by the data's origin; None if unknown.

    Ids alone are not enough, because two data sets may both count from 0.

    Args:
        a: one run.
        b: the other run; a run shares its samples with itself.
        task: the task.
        split: diagnosis, test or calibration.
    """
    if a.id == b.id:
        return True
    origins = [run.manifest.sample_origins.get(split, {}).get(task) for run in (a, b)]
    return None if None in origins else origins[0] == origins[1]


def drift_changes(
    before: DriftRun,
    after: DriftRun,
    task: str,
    variants: tuple[str, str],
    *,
    column: str = "drift_l2",
    layer: int | str | None = None,
) -> dict[int, MeanChange]:
    """Return per layer the mean change of a column of the sample table; only layers that both runs stored.

    They are paired if both runs measured exactly the same samples.

    Args:
        before: the run before.
        after: the run after; may be the same.
        task: the task.
        variants: variant before, in the first run, and after, in the second.
        column: column of the sample table.
        layer: only this layer; None for all.
    """
    sides = [
        {layer: rows.set_index("sample_id")[column] for layer, rows in measured.groupby("layer")}
        for measured in (
            run.samples(task, variant, layer)[["layer", "sample_id", column]].dropna()
            for run, variant in zip((before, after), variants, strict=True)
        )
    ]
    is_same = has_same_samples(before, after, task)
    changes: dict[Any, MeanChange] = {}
    for index in sides[0].keys() & sides[1].keys():
        start, end = (side[index] for side in sides)
        # Equal ids of unknown origin count as different samples: unpaired intervals are wider, never wrong.
        is_paired = bool(is_same) and set(start.index) == set(end.index)
        values = (start, end.reindex(start.index) if is_paired else end)
        changes[index] = intervals.mean_change(
            *(column.to_numpy(dtype=float) for column in values), is_paired=is_paired
        )
    return changes


def _measure_of_metric(metric: Metric) -> Measure:
    return Measure(metric.title, metric.kind, metric.worse, "test", metric.name)


@cache_on_run
def _main_metric_scores(run: DriftRun) -> _Levels:
    """Return the score of every variant by each task's main metric, with its interval."""
    metrics, rows = main_metrics(run), run.accuracy()
    rows = rows[rows["metric"] == rows["task"].map({task: metric.name for task, metric in metrics.items()})]
    numbers = rows[["value", "ci_low", "ci_high", "n"]].astype(float).to_numpy().tolist()
    levels = []
    for task, variant, (value, low, high, n) in zip(rows["task"], rows["variant"], numbers, strict=True):
        score = Interval(value, low, high, 0 if math.isnan(n) else int(n))
        levels.append(_measured_value(_measure_of_metric(metrics[task]), score, str(task), str(variant)))
    return _index_by_task_and_variant(levels)


def score_change(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str], metric: Metric
) -> MeasuredValue:
    """Return the change of a score between two variants, paired by test sample if results are stored.

    Without single results the interval of a share assumes independent samples and is too wide.

    Args:
        before: the run before.
        after: the run after; may be the same.
        task: the task.
        variants: variant before, in the first run, and after, in the second.
        metric: the metric of both scores.
    """
    sides = list(zip((before, after), variants, strict=True))
    start, end = (variant_score(run, task, variant, metric) for run, variant in sides)
    answers, split = paired_correctness(before, after, task, variants, metric) or (None, "")
    change, is_paired = Interval(end.value - start.value), False
    # Paired results count only if they cover every test sample of both scores.
    if answers is not None and split == "test" and answers.n == start.n == end.n:
        is_paired, change = True, Interval(answers.difference, answers.ci_low, answers.ci_high)
    elif start.n and end.n and metric.kind == "share":
        counts = (round(start.value * start.n), start.n, round(end.value * end.n), end.n)
        # Rounding recovers the count of right answers from the stored share.
        change = Interval(change.value, *intervals.unpaired_difference(*counts))
    elif start.n and end.n and has_same_samples(before, after, task, "test"):
        rows, partner = (_per_sample_scores(run, task, variant, metric) for run, variant in sides)
        if len(rows) and set(rows.index) == set(partner.index):
            columns = rows["value"], partner["value"].reindex(rows.index), rows["reference"]
            change = bootstrap_change(metric, *(column.to_numpy(dtype=float) for column in columns))
            is_paired = is_measured(change.low)
    change = replace(change, n=end.n if is_measured(change.value) else 0)
    row = _measured_value(_measure_of_metric(metric), change, task, variants[1], variants[0], paired=is_paired)
    return replace(row, answers=answers, answered=split)


def paired_correctness(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str], metric: Metric = ACCURACY
) -> tuple[PairedChange, str] | None:
    """Return the paired comparison of right answers on samples that both variants answered, and their split.

    None if the metric is no share, no sample has both answers, or the runs may have different samples. The split is
    "test" if single results of test samples are stored, else "diagnosis", as in older runs.

    Args:
        before: the run before.
        after: the run after; may be the same.
        task: the task.
        variants: variant before, in the first run, and after, in the second.
        metric: a share of right answers.
    """
    splits = ("test", "diagnosis") if metric == ACCURACY else ("test",)
    for split in splits if metric.kind == "share" else ():
        if not has_same_samples(before, after, task, split):
            continue
        sides = zip((before, after), variants, strict=True)
        start, end = (_correctness_by_sample(run, task, variant, metric, split) for run, variant in sides)
        # Both usually answered the same samples, so that this is much faster than a join.
        shared = start.index.intersection(end.index)
        if len(shared):
            return intervals.mcnemar_test(*(side.reindex(shared).to_numpy(dtype=bool) for side in (start, end))), split
    return None


@cache_on_run
def _correctness_by_sample(run: DriftRun, task: str, variant: str, metric: Metric, split: str) -> pd.Series[Any]:
    """Return by sample id True if the variant predicted the label; test or labelled diagnosis samples."""
    if split == "test":
        return _per_sample_scores(run, task, variant, metric)["value"] == 1
    rows = run.outputs(task=task, variant=None if variant == "expert" else variant)
    answer = "expert_pred" if variant == "expert" else "pred"
    # The expert's answer is repeated on the row of every variant.
    rows = rows[rows["label"].notna() & rows[answer].notna()].drop_duplicates("sample_id")
    return pd.Series((rows["label"] == rows[answer]).to_numpy(dtype=bool), index=rows["sample_id"])


@cache_on_run
def variant_score(run: DriftRun, task: str, variant: str, metric: Metric) -> Interval:
    """Return the test score of a variant with its interval and sample count; NaN without a score.

    Args:
        run: the run.
        task: the task.
        variant: the variant, or "expert".
        metric: any metric of the accuracy table.
    """
    rows = run.accuracy(task, variant)
    rows = rows[(rows["metric"] == metric.name) & rows["value"].notna() & rows["n"].notna()]
    if rows.empty:
        return Interval(math.nan)
    value, low, high, n = rows[["value", "ci_low", "ci_high", "n"]].astype(float).iloc[0]
    return Interval(value, low, high, int(n))


@cache_on_run
def main_metrics(run: DriftRun) -> Mapping[str, Metric]:
    """Return the main metric of each scored task: accuracy if it was measured, else the first of the list."""
    rows, order = run.accuracy(), [*METRICS]
    rows = rows[rows["value"].notna() & rows["task"].isin(run.tasks)]
    mains: dict[str, Metric] = {}
    for task, names in rows.groupby("task", sort=False)["metric"].unique().items():
        metrics = [metric for metric in map(metric_by_name, names) if not metric.is_external]
        # Metrics that are not built in come last.
        metrics.sort(key=lambda metric: order.index(metric.name) if metric.name in order else len(order))
        mains |= {str(task): metrics[0]} if metrics else {}
    return mains


@cache_on_run
def _flip_rates(run: DriftRun) -> _Levels:
    """Return the share of diagnosis samples whose decision differs from the expert's, with Wilson's interval."""
    rows = run.outputs()
    rows = rows[rows["flipped"].notna()]
    groups = rows.groupby(["task", "variant"], sort=False)["flipped"]
    return _index_by_task_and_variant(
        _measured_value(FLIPS, share_of_true(flipped), str(task), str(variant)) for (task, variant), flipped in groups
    )


def share_of_true(column: pd.Series[Any]) -> Interval:
    """Return the share of samples for which the column is true, with Wilson's interval."""
    n = int(column.count())
    return share_interval(int(column.sum()) / n if n else math.nan, n)


_LEVELS: Mapping[str, Callable[[DriftRun], _Levels]] = {
    **dict.fromkeys(("drift", "drift_change", "relative", "cosine"), _drift_and_cosine_values),
    **{"score": _main_metric_scores, "flips": _flip_rates},
}


def value_on_task(run: DriftRun, measure: Measure, task: str, variant: str) -> MeasuredValue:
    """Return the value of a measure for one variant and task; NaN if it was not measured.

    Args:
        run: the run.
        measure: the measure; `SCORE` takes the task's main metric.
        task: the task.
        variant: the variant, or "expert" for the task's own.
    """
    row = _LEVELS[measure.role](run).get((measure.role, task, variant))
    metric = main_metrics(run).get(task, ACCURACY) if measure is SCORE else None
    return row or _measured_value(_measure_of_metric(metric) if metric else measure, Interval(math.nan), task, variant)


@cache_on_run
def _changes_by_measure(run: DriftRun, role: str, task: str, pair: tuple[str, str]) -> Mapping[str, MeasuredValue]:
    """Return the changes between two variants on a task, by measure; flips have none."""
    if role == FLIPS.role:
        return {}
    if role == SCORE.role:
        return {role: score_change(run, run, task, pair, main_metrics(run).get(task, ACCURACY))}
    return feature_changes(run, run, task, pair)


def change_on_task(run: DriftRun, measure: Measure, task: str, pair: tuple[str, str]) -> MeasuredValue:
    """Return the change of a measure between two variants on one task.

    Args:
        run: the run.
        measure: the measure.
        task: the task.
        pair: variant before and after; without stored samples of either, the change has no interval.
    """
    # Features of a layer are compared once for all of their measures.
    role = measure.role if measure.role in (SCORE.role, FLIPS.role) else DRIFT.role
    # A paired change has a narrower interval than the difference of two means.
    if row := _changes_by_measure(run, role, task, pair).get(measure.role):
        return row
    start, end = (value_on_task(run, measure, task, variant) for variant in pair)
    return _measured_value(end.about, Interval(end.value - start.value), task, pair[1], pair[0], paired=False)


def mean_on_tasks(run: DriftRun, measure: Measure, tasks: Sequence[str], variant: str) -> MeasuredValue:
    """Return the mean of a measure over tasks for one variant.

    Args:
        run: the run.
        measure: the measure; means of scores need metrics of one kind.
        tasks: tasks on which the variant was measured.
        variant: the variant.
    """
    over = mean_over_tasks([value_on_task(run, measure, task, variant) for task in tasks])
    return replace(_measured_value(measure, over, "", variant), tasks=tuple(tasks))


def mean_change(run: DriftRun, measure: Measure, tasks: Sequence[str], pair: tuple[str, str]) -> MeasuredValue:
    """Return the change between two variants of the mean over tasks, with its interval.

    Args:
        run: the run.
        measure: the measure.
        tasks: tasks on which both variants were measured.
        pair: variant before and after.
    """
    by_task = [change_on_task(run, measure, task, pair) for task in tasks]
    start, end = (mean_on_tasks(run, measure, tasks, variant).value for variant in pair)
    # The printed change must equal the difference of the printed means.
    over = replace(mean_over_tasks(by_task), value=end - start)
    row = _measured_value(measure, over, "", pair[1], pair[0], paired=all(row.paired for row in by_task))
    return replace(row, tasks=tuple(tasks))


@cache_on_run
def accuracy_by_class_means(run: DriftRun, task: str) -> Interval:
    """Return how often the nearest class mean of the expert's final features is the sample's class, without its head.

    The sample itself is left out of its class's mean. NaN if features or labels are not stored.
    """
    try:
        features, ids, rows = run.features(task, "expert", "final"), run.sample_ids(task), run.samples()
    except DriftLensError:
        return Interval(math.nan)
    # The file of a damaged run may hold anything.
    if features.ndim != 2 or len(features) != len(ids) or features.dtype.kind != "f":
        return Interval(math.nan)
    features = features.astype(float)
    labels = rows[rows["task"] == task].drop_duplicates("sample_id").set_index("sample_id")["label"].reindex(ids)
    is_labelled = labels.notna().to_numpy()
    names, at = np.unique(labels[is_labelled].astype(str), return_inverse=True)
    if len(names) < 2:
        return Interval(math.nan)
    features = features[is_labelled]
    features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    sizes, each = np.bincount(at), np.arange(len(at))
    means = np.stack([features[at == place].mean(axis=0) for place in range(len(names))])
    distances = (means**2).sum(axis=1) - 2 * features @ means.T + (features**2).sum(axis=1, keepdims=True)
    # Without the sample, its class's mean is farther away by n / (n - 1); a class of one sample has none.
    others = np.maximum(sizes[at] - 1, 1)
    own = np.where(sizes[at] > 1, distances[each, at] * (sizes[at] / others) ** 2, np.inf)
    distances[each, at] = np.inf
    return share_interval(float((own < distances.min(axis=1)).mean()), len(at))


def common_measures(run: DriftRun, variants: Sequence[str]) -> list[tuple[Measure, tuple[str, ...]]]:
    """Return each measure that all these variants have, with the tasks on which all were measured."""
    groups = [(about, run.tasks) for about in (DRIFT, RELATIVE, COSINE)]
    by_kind: dict[str, dict[str, Metric]] = {}
    # Scores have a mean only if their metrics are of one kind.
    for task, metric in main_metrics(run).items():
        by_kind.setdefault("" if metric.is_averaged else metric.name, {})[task] = metric
    for like in by_kind.values():
        kinds, main = {metric.kind for metric in like.values()}, next(iter(like.values()))
        name = main.name if len(set(like.values())) == 1 else SCORE.name
        # A mean with correlations in it is no share of samples, yet reads as the paper's tables do.
        kind: Kind = "number" if kinds == {"number"} else "share"
        groups.append((Measure(metrics_title(like.values()), kind, main.worse, "test", name), tuple(like)))
    measured = []
    for about, tasks in groups:
        shared = [
            task for task in tasks if all(value_on_task(run, about, task, name).is_measured for name in variants)
        ]
        measured += [(about, tuple(shared))] if shared and variants else []
    return measured


def findings_frame(run: DriftRun) -> pd.DataFrame:
    """Return all values and changes as a tidy data frame: by task, then means over tasks.

    Means are over the tasks on which all variants were measured. Changes are from base to merged model, and from that
    to every calibrated one. An empty task is the mean, an empty `against` no change.
    """
    variants = [*dict.fromkeys(("expert", *run.variants))]
    starts = {"merged": "base", "calibrated": "merged"}
    ends = [(starts.get(variant_kind(name), ""), name) for name in variants]
    pairs = [(start, end) for start, end in ends if start in variants]
    levels = (_drift_and_cosine_values, _main_metric_scores, _flip_rates)
    rows = [row for source in levels for row in source(run).values() if row.variant in variants]
    for task, pair, role in itertools.product(run.tasks, pairs, (DRIFT.role, SCORE.role)):
        rows += _changes_by_measure(run, role, task, pair).values()
    for about, tasks in common_measures(run, [name for name in variants if name != "expert"]):
        rows += [mean_on_tasks(run, about, tasks, variant) for variant in variants]
        rows += [mean_change(run, about, tasks, pair) for pair in pairs]
    cells = [
        (
            *(row.about.name, row.task, row.variant, row.against, *row.ends, row.n),
            *(row.paired, row.about.kind, row.about.worse),
        )
        for row in rows
        if row.is_measured
    ]
    return pd.DataFrame(cells, columns=[*_FRAME]).astype({"paired": "boolean"})


def _per_sample_scores(run: DriftRun, task: str, variant: str, metric: Metric) -> pd.DataFrame:
    """Return one metric of every test sample of a task, by sample id; empty if none are stored."""
    rows = run.scores(task, variant)
    return rows[rows["metric"] == metric.name].dropna(subset="value").set_index("sample_id")


def metric_interval(metric: Metric, values: Array, references: Array) -> Interval:
    """Compute a metric from per-sample results with its 95 % interval.

    Args:
        metric: the metric.
        values: results `[n]` as in the table `scores`.
        references: references `[n]` as in that table.
    """
    n = len(values)
    if metric.kind == "share":
        return share_interval(round(float(values.sum())) / n, n)
    # The first row of draws has each sample once: the value itself.
    value, *drawn = _metric_per_resample(metric, values, references, _sample_and_resamples(n))
    # Numbers that are all alike are correlated with nothing.
    return Interval(float(np.nan_to_num(value)), *_percentile_interval(np.array(drawn)), n)


def bootstrap_change(metric: Metric, before: Array, after: Array, references: Array) -> Interval:
    """Compute the change of a metric on the same samples with a paired bootstrap interval.

    Not for shares, for which `mcnemar_test` is exact.

    Args:
        metric: the metric.
        before: results `[n]` before.
        after: results `[n]` after.
        references: references `[n]`.
    """
    # The same draws for both sides make the interval paired.
    counts = _sample_and_resamples(len(before))
    start, end = (np.nan_to_num(_metric_per_resample(metric, side, references, counts)) for side in (before, after))
    value, *drawn = end - start
    return Interval(float(value), *_percentile_interval(np.array(drawn)), len(before))


def _sample_and_resamples(n: int) -> Array:
    """Return how often each sample is drawn, one row per resample; the first row is the original sample."""
    return np.concatenate([np.ones((1, n)), *([intervals.bootstrap_counts(n)] if n > 1 else [])])


def _percentile_interval(drawn: Array) -> tuple[float, float]:
    finite = drawn[np.isfinite(drawn)]
    if not len(finite):  # of a single sample, or of numbers that are all alike
        return float("nan"), float("nan")
    low, high = np.quantile(finite, (0.025, 0.975))
    return float(low), float(high)


def _metric_per_resample(metric: Metric, values: Array, references: Array, counts: Array) -> Array:
    """Compute the metric of every bootstrap resample, [r]; NaN where it is undefined."""
    # A resample of equal numbers has no correlation; NaN is dropped by `_interval_columns`.
    with np.errstate(all="ignore"):
        if metric.name == "spearman":
            return _weighted_correlations(
                _resampled_ranks(values, counts), _resampled_ranks(references, counts), counts
            )
        if metric.needs == "passages":
            mean: Array = counts @ values / counts.sum(axis=1)
            return mean
        if metric.name == "perplexity":
            # Sum of losses over the number of tokens: texts weigh by their length.
            value: Array = np.exp(counts @ values / (counts @ references))
            return value
    raise ValueError(f"{metric.name} has no single results to draw from")


def _resampled_ranks(values: Array, counts: Array) -> Array:
    """Return the ranks of the values within each bootstrap resample, [r, n]; ties share their mean."""
    # Sorting once instead of once per resample.
    _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ordered = counts[:, np.argsort(place, kind="stable")]
    drawn = np.add.reduceat(ordered, np.cumsum(sizes) - sizes, axis=1)
    middle = drawn.cumsum(axis=1) - (drawn - 1) / 2
    ranks: Array = middle[:, place]
    return ranks


def _weighted_correlations(x: Array, y: Array, counts: Array) -> Array:
    """Return Pearson's correlation of every row of x and y, [r, n] each, weighted by counts."""
    whole = counts.sum(axis=1, keepdims=True)
    x, y = (side - (counts * side).sum(axis=1, keepdims=True) / whole for side in (x, y))
    both = (counts * x * y).sum(axis=1)
    correlation: Array = both / np.sqrt((counts * x * x).sum(axis=1) * (counts * y * y).sum(axis=1))
    return correlation


# Every outcome with its explanation, the most important first; "wrong" only without a repair.
OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "still wrong": "Broken by the merge, and still wrong after the repair.",
        "wrong": "Broken by the merge: right by the expert and, if measured, the base.",
        "broken": "Wrong after the repair, right before it.",
        "repaired": "Fixed by the repair.",
        "never gained": "Right by the expert alone: the base is wrong, too, so the merge broke nothing.",
        "right": "All models are right.",
        "expert wrong": "The expert is wrong, so nearness to it is no gain.",
    }
)


@cache_on_run
def sample_outcomes(run: DriftRun, task: str, merged: str = "merged", repaired: str = "") -> pd.DataFrame:
    """Return a row per sample: whether expert, merged and repaired model are right, and the outcome.

    Indexed by sample_id; columns: expert, merged, repaired (True if the answer is right) and outcome, one of
    `OUTCOMES`. Empty if right answers are unknown.

    Args:
        run: the run.
        task: the task.
        merged: the model before the repair.
        repaired: the model after it; if empty, outcomes are those of the merge alone.
    """
    models = {"expert": "expert", "merged": merged} | ({"repaired": repaired} if repaired else {})
    metric = main_metrics(run).get(task, ACCURACY)
    # Diagnosis first: only these samples have stored features and drift.
    for split in ("diagnosis", "test") if metric.kind == "share" else ("diagnosis",):
        columns = {name: _correctness_by_sample(run, task, variant, metric, split) for name, variant in models.items()}
        # Only samples that all models answered are comparable.
        rows = pd.DataFrame(columns, dtype=object).dropna().astype(bool).rename_axis("sample_id")
        if len(rows):
            break
    is_base_wrong = pd.Series(data=False, index=rows.index)
    if "base" in run.variants and len(rows):
        is_base_wrong = _correctness_by_sample(run, task, "base", metric, split).reindex(rows.index).eq(False)
    is_right = rows["repaired"] if repaired else rows["merged"]
    broken, mended = ("broken", "repaired") if repaired else ("wrong", "right")
    lost = "still wrong" if repaired else "wrong"
    missed = np.where(is_base_wrong, "never gained", lost)
    after = np.where(rows["merged"], np.where(is_right, "right", broken), np.where(is_right, mended, missed))
    return rows.assign(outcome=np.where(rows["expert"], after, "expert wrong"))
