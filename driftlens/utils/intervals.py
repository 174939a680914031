"""Confidence intervals (95 %): score intervals of shares, Student's t of means, and their changes and ratios.

Score intervals cover the truth in about 95 % of cases from ten samples on; 1.96 standard errors do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_Z = NormalDist().inv_cdf(0.975)
# Of an interval no longer than 2: beyond double precision.
_HALVINGS = 60
# Number of bootstrap samples.
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate from `n` samples with its 95 % confidence interval; unknown numbers are NaN."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0

    @property
    def ends(self) -> tuple[float, float, float]:
        """The estimate, its lower end and its upper end."""
        return self.value, self.low, self.high

    def scaled(self, factor: float) -> Interval:
        """Return the estimate and its interval multiplied by a positive factor."""
        return Interval(self.value * factor, self.low * factor, self.high * factor, self.n)


@dataclass(frozen=True)
class MeanChange:
    """The change of a mean over samples, absolute and relative to the mean before, with 95 % intervals."""

    difference: Interval
    relative: Interval
    is_paired: bool


@dataclass(frozen=True)
class PairedChange:
    """The change of accuracy on the same samples: paired difference, 95 % interval, p-value and counts.

    The ends are Tango's 95 % score interval for paired proportions, extended to 0 if McNemar's two-sided mid-p does
    not reject it.
    """

    difference: float
    ci_low: float
    ci_high: float
    p_value: float
    gained: int
    lost: int
    n: int


def interval_ratio(change: Interval, whole: Interval) -> Interval:
    """Compute the confidence interval of a ratio of two estimates by Fieller's theorem (MOVER).

    Both are assumed independent. A model's change and the gap it starts from share that model's error, so the interval
    may be too wide, never too narrow. NaN if `whole` is not clearly above 0.
    """
    # NaN, a missing interval, is unequal to itself.
    half = max(whole.value - whole.low, whole.high - whole.value) if whole.low == whole.low else math.nan
    if not whole.value > 0 or half >= whole.value:
        return Interval(math.nan)
    value = change.value / whole.value
    if not (half == half and change.low == change.low):
        return Interval(value, n=change.n)
    product, rest = change.value * whole.value, whole.value**2 - half**2
    down, up = (
        math.sqrt(max(0.0, product**2 - rest * (change.value**2 - side**2)))
        for side in (change.value - change.low, change.high - change.value)
    )
    return Interval(value, (product - down) / rest, (product + up) / rest, change.n)


def wilson_interval(k: int, n: int) -> tuple[float, float]:
    """Compute the 95 % Wilson confidence interval of the proportion `k` of `n`."""
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"expected 0 <= k <= n and n >= 1, got k = {k}, n = {n}")
    share, weight = k / n, _Z**2 / n
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * math.sqrt(share * (1 - share) / n + weight / (4 * n)) / (1 + weight)
    # Exact where rounding would leave 1e-17 on the wrong side.
    return (0.0 if k == 0 else middle - half), (1.0 if k == n else middle + half)


def share_interval(share: float, n: int) -> Interval:
    """Return a share of `n` samples as an `Interval` with Wilson's ends; NaN without samples."""
    ends = wilson_interval(round(share * n), n) if n and share == share else (math.nan, math.nan)
    return Interval(share if n else math.nan, *ends, n)


def mcnemar_test(
    before_right: Sequence[bool] | NDArray[Any], after_right: Sequence[bool] | NDArray[Any]
) -> PairedChange:
    """Compute the paired change of accuracy with Tango's 95 % interval and McNemar's mid-p test."""
    before, after = np.asarray(before_right, dtype=bool), np.asarray(after_right, dtype=bool)
    if before.shape != after.shape or before.ndim != 1 or not len(before):
        raise ValueError(f"expected equally many answers, got {before.shape} and {after.shape}")
    gained, lost, n = int((after & ~before).sum()), int((before & ~after).sum()), len(before)
    (low, high), p = _tango_interval(gained, lost, n), _sign_test_p_value(gained, lost)
    # Interval and test disagree at a few counts, for example 4 against 0.
    if p >= 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    return PairedChange((gained - lost) / n, low, high, p, gained, lost, n)


def unpaired_difference(k_before: int, n_before: int, k_after: int, n_after: int) -> tuple[float, float]:
    """Compute the 95 % interval of a difference of two accuracies from counts of right answers.

    Newcombe's hybrid score interval (method 10, 1998, independent proportions). For counts from the same samples, whose
    errors are correlated, it may be too wide.

    Args:
        k_before: right answers before.
        n_before: samples before.
        k_after: right answers after.
        n_after: samples after.
    """
    before, after = k_before / n_before if n_before else 0.0, k_after / n_after if n_after else 0.0
    (low_before, high_before), (low_after, high_after) = (
        wilson_interval(k_before, n_before),
        wilson_interval(k_after, n_after),
    )
    difference = after - before
    down = math.hypot(after - low_after, high_before - before)
    return difference - down, difference + math.hypot(high_after - after, before - low_before)


def mean_interval(mean: float, std: float, n: int) -> Interval:
    """Return a mean over samples with its 95 % interval by Student's t.

    Args:
        mean: mean over samples.
        std: standard deviation, divided by n.
        n: number of samples.
    """
    # `std` divides by n, so dividing it by the root of n - 1 gives the usual standard error.
    return replace(_student_interval(mean, std / math.sqrt(n - 1) if n > 1 else math.nan, n - 1), n=n)


def mean_change(before: Array, after: Array, *, is_paired: bool) -> MeanChange:
    """Compute the change of a mean over samples with its 95 % interval: Student's t, or Welch's if unpaired.

    The interval of the relative change linearizes the ratio of the two means (Cochran, Sampling Techniques, sec. 6).

    Args:
        before: one number per sample, [n].
        after: one number per sample, [n] if paired.
        is_paired: True if both measure the same samples.
    """
    if is_paired and before.shape != after.shape:
        raise ValueError(f"expected equally many samples, got {before.shape} and {after.shape}")
    start, end = (float(values.mean()) if len(values) else math.nan for values in (before, after))
    ratio = end / start if start else math.nan
    # The second pair has the error of end - ratio * start: that of the ratio, times the start.
    difference, relative = (
        replace(
            _student_interval(end - start, *standard_error([after - left] if is_paired else [after, left])),
            n=len(after),
        )
        for left in (before, ratio * before)
    )
    scale = 1 / abs(start) if start else math.nan
    return MeanChange(difference, relative.scaled(scale), is_paired)


def standard_error(groups: Sequence[Array]) -> tuple[float, float]:
    """Compute the standard error of a sum of group means and its degrees of freedom (Welch-Satterthwaite)."""
    parts = [float(values.var(ddof=1)) / len(values) if len(values) > 1 else math.inf for values in groups]
    total = sum(parts)
    if not 0 < total < math.inf:
        return math.sqrt(total), float(sum(max(0, len(values) - 1) for values in groups))
    weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, groups, strict=True))
    return math.sqrt(total), total**2 / weights


def mean_over_draws(values: Sequence[float] | NDArray[Any]) -> Interval:
    """Return the mean over random draws with its 95 % interval by Student's t; missing values are left out."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers) < 2:
        return Interval(float(numbers[0]) if len(numbers) else math.nan)
    return _student_interval(float(numbers.mean()), *standard_error([numbers]))


def mean_over_tasks(intervals: Sequence[Interval]) -> Interval:
    """Average estimates over tasks and combine their 95 % intervals; the interval is NaN if one is missing.

    Tasks are fixed and their samples are independent strata, so squared errors add. Upper and lower errors are combined
    separately, which keeps the skew of a share near 1 (MOVER; Zou and Donner 2008). The interval does not cover other
    tasks.
    """
    if not intervals:
        return Interval(math.nan)
    value = sum(entry.value for entry in intervals) / len(intervals)
    down = math.hypot(*(entry.value - entry.low for entry in intervals)) / len(intervals)
    up = math.hypot(*(entry.high - entry.value for entry in intervals)) / len(intervals)
    return Interval(value, value - down, value + up, sum(entry.n for entry in intervals))


def interval_p_value(interval: Interval) -> float:
    """Compute the two-sided p-value of the hypothesis of no change from a 95 % interval."""
    half = interval.value - interval.low if interval.value > 0 else interval.high - interval.value
    return math.erfc(_Z * abs(interval.value) / half / math.sqrt(2)) if half else float(interval.value == 0)


# All layers and variants of a task have as many samples and share their resamples.
@functools.lru_cache(maxsize=1)
def bootstrap_counts(n: int) -> NDArray[np.int64]:
    """Return how often each of n samples is drawn in every bootstrap resample, [RESAMPLES, n], by a fixed seed."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


def t_quantile(freedom: float, level: float = 0.95) -> float:
    """Return the quantile of Student's t for a two-sided interval at `level`; NaN without degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2)) if freedom > 0 else math.nan


def _student_interval(value: float, error: float, freedom: float) -> Interval:
    half = t_quantile(freedom) * error
    return Interval(value, value - half, value + half) if math.isfinite(half) else Interval(value)


def _sign_test_p_value(gained: int, lost: int) -> float:
    """Compute the mid-p value of a two-sided sign test; 1 if both counts are equal."""
    if gained == lost:
        return 1.0
    from scipy.special import bdtr

    few, all_changed = min(gained, lost), gained + lost
    # Twice P(X < k) + P(X = k) / 2 is the sum of two distribution functions.
    return float(bdtr(few, all_changed, 0.5) + (bdtr(few - 1, all_changed, 0.5) if few else 0.0))


def _tango_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Compute Tango's (1998) 95 % score interval for a difference of paired proportions."""

    def _is_rejected(difference: float) -> bool:
        # The likeliest share of lost samples if `difference` were the truth solves 2 n q^2 + b q + c = 0.
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        share_lost = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
        variance = n * max(0.0, 2 * share_lost + difference * (1 - difference))
        return (gained - lost - n * difference) ** 2 > _Z**2 * variance

    seen = (gained - lost) / n
    return _bisect_rejection_boundary(_is_rejected, seen, -1.0), _bisect_rejection_boundary(_is_rejected, seen, 1.0)


def _bisect_rejection_boundary(is_rejected: Callable[[float], bool], inside: float, outside: float) -> float:
    """Find by bisection the difference at which the test starts to reject."""
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if is_rejected(middle):
            outside = middle
        else:
            inside = middle
    return inside
