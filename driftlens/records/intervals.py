"""How sure an accuracy, or a change of accuracy, is: 95 % intervals that invert the score test.

A score interval stays inside its range, has a width also at 0 and at n of n, and covers the truth close to 95 times
in 100 from ten samples on, which the textbook "plus or minus 1.96 standard errors" does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Z = NormalDist().inv_cdf(0.975)
_HALVINGS = 60
"""Of an interval no longer than 2: beyond double precision."""


@dataclass(frozen=True)
class Paired:
    """What one and the same sample answered before and after, counted over samples.

    Attributes:
        difference: accuracy after minus accuracy before, a fraction.
        ci_low: lower end of its 95 % interval (Tango's score interval for paired proportions).
        ci_high: upper end.
        p_value: of McNemar's exact two-sided test that samples gained and lost are equally likely.
        gained: samples wrong before and right after.
        lost: samples right before and wrong after.
        n: samples.
    """

    difference: float
    ci_low: float
    ci_high: float
    p_value: float
    gained: int
    lost: int
    n: int


def wilson(k: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a proportion of which `k` of `n` were seen.

    Raises:
        ValueError: n is 0, or k is not between 0 and n.
    """
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"wanted 0 <= k <= n with n >= 1, got k = {k} and n = {n}")
    share, weight = k / n, _Z**2 / n
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * math.sqrt(share * (1 - share) / n + weight / (4 * n)) / (1 + weight)
    # Exact where rounding would leave 1e-17 on the wrong side.
    return (0.0 if k == 0 else middle - half), (1.0 if k == n else middle + half)


def mcnemar(
    before_right: Sequence[bool] | NDArray[Any], after_right: Sequence[bool] | NDArray[Any]
) -> Paired:
    """The change of accuracy on samples that were answered twice, with interval and exact test.

    Args:
        before_right: whether each sample was answered rightly before, [n].
        after_right: whether the same samples, in the same order, were after, [n].

    Raises:
        ValueError: the lengths differ, or there are no samples.
    """
    before, after = np.asarray(before_right, dtype=bool), np.asarray(after_right, dtype=bool)
    if before.shape != after.shape or before.ndim != 1 or not len(before):
        raise ValueError(f"wanted as many answers before as after, got {before.shape} and {after.shape}")
    gained, lost, n = int((after & ~before).sum()), int((before & ~after).sum()), len(before)
    low, high = _paired_interval(gained, lost, n)
    return Paired((gained - lost) / n, low, high, _sign_test(gained, lost), gained, lost, n)


def unpaired_difference(k_before: int, n_before: int, k_after: int, n_after: int) -> tuple[float, float]:
    """The 95 % interval of accuracy after minus accuracy before where only the two counts are known.

    Newcombe's hybrid score interval (method 10 of his 1998 paper on independent proportions). Counts from the same
    samples tend to err together, which it can't see: there it is wider than it need be.

    Raises:
        ValueError: as for `wilson`.
    """
    before, after = k_before / n_before if n_before else 0.0, k_after / n_after if n_after else 0.0
    (low_before, high_before), (low_after, high_after) = wilson(k_before, n_before), wilson(k_after, n_after)
    difference = after - before
    down = math.hypot(after - low_after, high_before - before)
    return difference - down, difference + math.hypot(high_after - after, before - low_before)


def _sign_test(gained: int, lost: int) -> float:
    """Twice the smaller tail of a fair coin; 1 where no sample changed."""
    if gained + lost == 0:
        return 1.0
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def _paired_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Every difference that the score test of paired proportions does not reject at 5 % (Tango, 1998)."""

    def is_rejected(difference: float) -> bool:
        # The likeliest share of lost samples if `difference` were the truth solves 2 n q^2 + b q + c = 0.
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        share_lost = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
        variance = n * max(0.0, 2 * share_lost + difference * (1 - difference))
        return (gained - lost - n * difference) ** 2 > _Z**2 * variance

    seen = (gained - lost) / n
    return _edge(is_rejected, seen, -1.0), _edge(is_rejected, seen, 1.0)


def _edge(is_rejected: Callable[[float], bool], inside: float, outside: float) -> float:
    """Where, on the way from `inside` to `outside`, differences begin to be rejected."""
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if is_rejected(middle):
            outside = middle
        else:
            inside = middle
    return inside
