"""What a run is scored by, and what single results of a metric say together: its value and change, with intervals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from driftlens.base.intervals import RESAMPLES, Array, Interval, wilson
from driftlens.base.metrics import METRICS, Metric, metric_called
from driftlens.runs.run import DriftRun, remembered


@remembered
def main_metrics(run: DriftRun) -> Mapping[str, Metric]:
    """What each scored task is judged by: accuracy where it was measured, else the first metric of the list.

    Raises:
        RunError: the table can't be read.
    """
    rows, order = run.accuracy(), [*METRICS]
    rows = rows[rows["value"].notna() & rows["task"].isin(run.tasks)]
    found: dict[str, Metric] = {}
    for task, names in rows.groupby("task", sort=False)["metric"].unique().items():
        own = [metric for metric in map(metric_called, names) if not metric.is_attached]
        own.sort(key=lambda metric: order.index(metric.name) if metric.name in order else len(order))
        found |= {str(task): own[0]} if own else {}
    return found


def results(run: DriftRun, task: str, variant: str, metric: Metric) -> pd.DataFrame:
    """The single results of a task's test samples by sample id; empty where none are stored. Errors as for `scores`."""
    rows = run.scores(task, variant)
    return rows[rows["metric"] == metric.name].dropna(subset="value").set_index("sample_id")


def interval_of(metric: Metric, values: Array, references: Array) -> Interval:
    """The metric of single results, as the table `scores` holds them, with its 95 % interval.

    Args:
        metric: of the results.
        values: [n], at least one.
        references: [n]; of shares nothing is asked of them.
    """
    n = len(values)
    if metric.kind == "share":
        right = round(float(values.sum()))
        return Interval(right / n, *wilson(right, n), n)
    value, *drawn = _statistic(metric, values, references, _draws(n))
    # Numbers that are all alike are correlated with nothing.
    return Interval(float(np.nan_to_num(value)), *_ends(np.array(drawn)), n)


def change_of(metric: Metric, before: Array, after: Array, references: Array) -> Interval:
    """How a metric of the same samples changes, with a 95 % interval by drawing them again, both sides alike.

    Args:
        metric: of the results, not a share: for these `mcnemar` is exact.
        before: [n].
        after: [n], of the same samples in the same order.
        references: [n].
    """
    counts = _draws(len(before))
    start, end = (np.nan_to_num(_statistic(metric, side, references, counts)) for side in (before, after))
    value, *drawn = end - start
    return Interval(float(value), *_ends(np.array(drawn)), len(before))


def _draws(n: int) -> Array:
    """How often each of n samples counts: first once each, then as drawn again, the same for the same n."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES if n > 1 else 0)
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
