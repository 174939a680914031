"""What variants score on each task's test samples and how that changes, as rows; metrics of single results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from driftlens.base import intervals
from driftlens.base.intervals import Array, Interval, Paired, wilson
from driftlens.base.metrics import ACCURACY, METRICS, Metric, metric_called
from driftlens.findings.features import same_samples
from driftlens.findings.frame import Finding, Measure, finding
from driftlens.findings.reading import is_measured
from driftlens.runs.run import DriftRun, remembered


def measure_of(metric: Metric) -> Measure:
    """The measure of the frame that a metric is."""
    return Measure(metric.title, metric.kind, metric.worse, "test", metric.name)


def score_levels(run: DriftRun) -> Iterator[Finding]:
    """What every variant scores by what each task is judged by, with the table's interval."""
    metrics, rows = main_metrics(run), run.accuracy()
    rows = rows[rows["metric"] == rows["task"].map({task: metric.name for task, metric in metrics.items()})]
    numbers = rows[["value", "ci_low", "ci_high", "n"]].astype(float).to_numpy().tolist()
    for task, variant, (value, low, high, n) in zip(rows["task"], rows["variant"], numbers, strict=True):
        score = Interval(value, low, high, 0 if math.isnan(n) else int(n))
        yield finding(measure_of(metrics[task]), score, str(task), str(variant))


def changed_score(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str], metric: Metric
) -> Finding:
    """How a score changes: by the single results of the same test samples where they are stored, else by the counts.

    Without single results the interval of a share takes both for independent, and is wider than it need be.
    """
    sides = list(zip((before, after), variants, strict=True))
    start, end = (score_of(run, task, variant, metric) for run, variant in sides)
    answers, split = paired_answers(before, after, task, variants, metric) or (None, "")
    change, is_paired = Interval(end.value - start.value), False
    if answers is not None and split == "test" and answers.n == start.n == end.n:
        is_paired, change = True, Interval(answers.difference, answers.ci_low, answers.ci_high)
    elif start.n and end.n and metric.kind == "share":
        counts = (round(start.value * start.n), start.n, round(end.value * end.n), end.n)
        change = Interval(change.value, *intervals.unpaired_difference(*counts))
    elif start.n and end.n and same_samples(before, after, task, "test"):
        rows, others = (results(run, task, variant, metric) for run, variant in sides)
        if len(rows) and set(rows.index) == set(others.index):
            columns = rows["value"], others["value"].reindex(rows.index), rows["reference"]
            change = change_of(metric, *(column.to_numpy(dtype=float) for column in columns))
            is_paired = is_measured(change.low)
    change = replace(change, n=end.n if is_measured(change.value) else 0)
    row = finding(measure_of(metric), change, task, variants[1], variants[0], paired=is_paired)
    return replace(row, answers=answers, answered=split)


def paired_answers(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str], metric: Metric = ACCURACY
) -> tuple[Paired, str] | None:
    """The change of a share of right answers on the samples that both stored, and which split these are.

    None where the metric is no share, no sample has both answers, or the runs are not known to have the same samples.
    The split reads "test" where single results of test samples are stored, or, by runs older than these, where the
    labelled diagnosis samples are exactly the test samples; else "diagnosis".
    """
    splits = ("test", "diagnosis") if metric == ACCURACY else ("test",)
    for split in splits if metric.kind == "share" else ():
        if not same_samples(before, after, task, split):
            continue
        sides = zip((before, after), variants, strict=True)
        start, end = (_right(run, task, variant, metric, split) for run, variant in sides)
        answers = start.to_frame("before").join(end.rename("after"), how="inner")
        if len(answers):
            origins = [before.manifest.sample_origins.get(of, {}).get(task) for of in ("test", "diagnosis")]
            tested = set(before.manifest.sample_ids.get("test", {}).get(task, ()))
            is_test = origins[0] == origins[1] and tested == set(answers.index)
            both = intervals.mcnemar(*(answers[side].to_numpy(dtype=bool) for side in answers))
            return both, "test" if is_test else split
    return None


@remembered
def _right(run: DriftRun, task: str, variant: str, metric: Metric, split: str) -> pd.Series[Any]:
    """Whether each test sample, or each labelled diagnosis sample, was answered rightly, by sample id."""
    if split == "test":
        return results(run, task, variant, metric)["value"] == 1
    rows = run.outputs(task=task, variant=None if variant == "expert" else variant)
    answer = "expert_pred" if variant == "expert" else "pred"
    rows = rows[rows["label"].notna() & rows[answer].notna()].drop_duplicates("sample_id")
    return pd.Series((rows["label"] == rows[answer]).to_numpy(dtype=bool), index=rows["sample_id"])


@remembered
def score_of(run: DriftRun, task: str, variant: str, metric: Metric) -> Interval:
    """A variant's score on test samples with its interval and their number; NaN and 0 without."""
    rows = run.accuracy(task, variant)
    rows = rows[(rows["metric"] == metric.name) & rows["value"].notna() & rows["n"].notna()]
    if rows.empty:
        return Interval(math.nan)
    value, low, high, n = rows[["value", "ci_low", "ci_high", "n"]].astype(float).iloc[0]
    return Interval(value, low, high, int(n))


@remembered
def main_metrics(run: DriftRun) -> Mapping[str, Metric]:
    """What each scored task is judged by: accuracy where it was measured, else the first metric of the list."""
    rows, order = run.accuracy(), [*METRICS]
    rows = rows[rows["value"].notna() & rows["task"].isin(run.tasks)]
    found: dict[str, Metric] = {}
    for task, names in rows.groupby("task", sort=False)["metric"].unique().items():
        own = [metric for metric in map(metric_called, names) if not metric.is_attached]
        own.sort(key=lambda metric: order.index(metric.name) if metric.name in order else len(order))
        found |= {str(task): own[0]} if own else {}
    return found


def results(run: DriftRun, task: str, variant: str, metric: Metric) -> pd.DataFrame:
    """The single results of a task's test samples by sample id; empty where none are stored."""
    rows = run.scores(task, variant)
    return rows[rows["metric"] == metric.name].dropna(subset="value").set_index("sample_id")


def interval_of(metric: Metric, values: Array, references: Array) -> Interval:
    """The metric of single results, [n] each, as the table `scores` holds them, with its 95 % interval."""
    n = len(values)
    if metric.kind == "share":
        right = round(float(values.sum()))
        return Interval(right / n, *wilson(right, n), n)
    value, *drawn = _statistic(metric, values, references, _draws(n))
    # Numbers that are all alike are correlated with nothing.
    return Interval(float(np.nan_to_num(value)), *_ends(np.array(drawn)), n)


def change_of(metric: Metric, before: Array, after: Array, references: Array) -> Interval:
    """How a metric of the same samples, [n] each, changes, with a 95 % interval by drawing them again, both alike.

    Not for shares: for these `mcnemar` is exact.
    """
    counts = _draws(len(before))
    start, end = (np.nan_to_num(_statistic(metric, side, references, counts)) for side in (before, after))
    value, *drawn = end - start
    return Interval(float(value), *_ends(np.array(drawn)), len(before))


def _draws(n: int) -> Array:
    """How often each of n samples counts: first once each, then as drawn again, the same for the same n."""
    drawn = np.random.default_rng(0).multinomial(
        n, np.full(n, 1 / n), size=intervals.RESAMPLES if n > 1 else 0
    )
    return np.concatenate([np.ones((1, n)), drawn])


def _ends(drawn: Array) -> tuple[float, float]:
    found = drawn[np.isfinite(drawn)]
    if not len(found):  # of a single sample, or of numbers that are all alike
        return float("nan"), float("nan")
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _statistic(metric: Metric, values: Array, references: Array, counts: Array) -> Array:
    """The metric for every row of counts, [r]; NaN where it has no value."""
    with np.errstate(all="ignore"):
        if metric.name == "spearman":
            return _correlations(_ranks(values, counts), _ranks(references, counts), counts)
        if metric.name == "perplexity":
            found: Array = np.exp(counts @ values / (counts @ references))
            return found
    raise ValueError(f"{metric.name} has no single results to draw from")


def _ranks(values: Array, counts: Array) -> Array:
    """Rank of every sample among those drawn, equal ones sharing the mean of theirs, [r, n]; without sorting again."""
    _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ordered = counts[:, np.argsort(place, kind="stable")]
    drawn = np.add.reduceat(ordered, np.cumsum(sizes) - sizes, axis=1)
    middle = drawn.cumsum(axis=1) - (drawn - 1) / 2
    ranks: Array = middle[:, place]
    return ranks


def _correlations(x: Array, y: Array, counts: Array) -> Array:
    """Pearson's correlation of every row of x and y, [r, n] each, samples weighing as often as they were drawn."""
    whole = counts.sum(axis=1, keepdims=True)
    x, y = (side - (counts * side).sum(axis=1, keepdims=True) / whole for side in (x, y))
    both = (counts * x * y).sum(axis=1)
    found: Array = both / np.sqrt((counts * x * x).sum(axis=1) * (counts * y * y).sum(axis=1))
    return found
