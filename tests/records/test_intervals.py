"""Intervals and tests of accuracy: against scipy, against enumeration, and by what they must mean."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, multinomial

from driftlens.records.intervals import Paired, mcnemar, unpaired_difference, wilson


def paired(gained: int, lost: int, both: int, neither: int) -> Paired:
    """From the four cells of the table."""
    before = [False] * gained + [True] * lost + [True] * both + [False] * neither
    after = [True] * gained + [False] * lost + [True] * both + [False] * neither
    return mcnemar(before, after)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 1), (7, 10), (10, 10), (500, 1000), (3, 100_000)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (7, 10), (10, 10), (500, 1000)])
def test_each_end_of_wilsons_interval_solves_its_quadratic(k: int, n: int) -> None:
    """Each end p satisfies |k/n - p| = z sqrt(p (1 - p) / n)."""
    z = 1.959963984540054
    for end in wilson(k, n):
        assert abs(k / n - end) == pytest.approx(z * math.sqrt(max(0.0, end * (1 - end)) / n), abs=1e-9)


@pytest.mark.parametrize(
    ("k", "n"), [(0, 0), (-1, 5), (6, 5)], ids=["no samples", "negative", "more than all"]
)
def test_impossible_counts_have_no_interval(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="k <= n"):
        wilson(k, n)


@pytest.mark.parametrize(
    ("gained", "lost"),
    [(0, 0), (1, 0), (0, 6), (12, 2), (7, 7), (40, 61), (5000, 5200)],
    ids=["none changed", "one gained", "all lost", "few", "balanced", "many", "thousands"],
)
def test_mcnemar_is_the_exact_test_of_a_fair_coin(gained: int, lost: int) -> None:
    found = paired(gained, lost, both=9, neither=4)
    changed = gained + lost
    expected = binomtest(gained, changed, 0.5).pvalue if changed else 1.0
    assert found.p_value == pytest.approx(expected, rel=1e-9)
    assert (found.gained, found.lost, found.n) == (gained, lost, changed + 13)
    assert found.difference == pytest.approx((gained - lost) / (changed + 13))


cells = st.tuples(*[st.integers(0, 40)] * 4).filter(any)


@given(cells=cells)
def test_undoing_a_change_mirrors_its_interval(cells: tuple[int, int, int, int]) -> None:
    gained, lost, both, neither = cells
    there, back = paired(gained, lost, both, neither), paired(lost, gained, both, neither)
    assert (back.ci_low, back.ci_high) == pytest.approx((-there.ci_high, -there.ci_low), abs=1e-12)
    assert -1 <= there.ci_low <= there.difference <= there.ci_high <= 1
    assert there.p_value == back.p_value


@given(cells=cells)
def test_each_end_of_the_paired_interval_solves_its_score_equation(cells: tuple[int, int, int, int]) -> None:
    """At each end, the likelihood restricted to that difference has a score of 1.96 standard errors."""
    gained, lost, *_ = cells
    found = paired(*cells)
    for end in (found.ci_low, found.ci_high):
        if abs(end) > 1 - 1e-9 or abs(end - found.difference) < 1e-9:
            continue
        # Slow reference: the restricted maximum of the multinomial likelihood, by ternary search.
        share = _restricted_share_lost(gained, lost, found.n, end)
        variance = (2 * share + end - end**2) / found.n
        assert abs(found.difference - end) == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-4)


def _restricted_share_lost(gained: int, lost: int, n: int, difference: float) -> float:
    def likelihood(share: float) -> float:
        cells = ((gained, share + difference), (lost, share), (n - gained - lost, 1 - 2 * share - difference))
        return sum(count * math.log(max(part, 1e-300)) for count, part in cells if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    for _ in range(200):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if likelihood(left) < likelihood(right) else (low, right)
    return (low + high) / 2


def test_mcnemars_verdict_and_the_interval_agree_away_from_the_edge() -> None:
    verdicts = set()
    for gained, lost in itertools.product(range(0, 30, 3), repeat=2):
        found = paired(gained, lost, 40, 20)
        verdicts |= {found.p_value < 0.03, found.p_value <= 0.2}
        if found.p_value < 0.03:
            assert found.ci_low > 0 or found.ci_high < 0, (gained, lost)
        if found.p_value > 0.2:
            assert found.ci_low < 0 < found.ci_high, (gained, lost)
    assert verdicts == {True, False}


def test_wilson_covers_the_truth_about_95_times_in_100() -> None:
    """By enumeration: the chance that the interval of a drawn count holds the true share."""
    n = 12
    ends = [wilson(k, n) for k in range(n + 1)]
    coverage = [
        sum(binom.pmf(k, n, share) for k in range(n + 1) if ends[k][0] <= share <= ends[k][1])
        for share in np.linspace(0.05, 0.95, 41)
    ]
    assert np.mean(coverage) == pytest.approx(0.95, abs=0.02) and min(coverage) > 0.83


def test_the_paired_interval_covers_the_truth_about_95_times_in_100() -> None:
    n = 12
    tables = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    found = {(b, c): paired(b, c, n - b - c, 0) for b, c in tables}
    coverage = []
    for share_gained, share_lost in [
        (0.1, 0.1),
        (0.3, 0.1),
        (0.05, 0.3),
        (0.4, 0.4),
        (0.02, 0.02),
        (0.6, 0.1),
    ]:
        truth = share_gained - share_lost
        rest = 1 - share_gained - share_lost
        inside = [table for table in tables if found[table].ci_low <= truth <= found[table].ci_high]
        drawn = [multinomial.pmf([b, c, n - b - c], n, [share_gained, share_lost, rest]) for b, c in inside]
        coverage.append(sum(drawn))
    assert np.mean(coverage) > 0.945 and min(coverage) > 0.92, coverage


def test_nothing_changed_in_few_samples_is_no_proof_of_equality() -> None:
    z_square = 1.959963984540054**2
    found = paired(0, 0, 10, 5)
    assert found.ci_high == pytest.approx(z_square / (15 + z_square)) and found.ci_low == -found.ci_high


def test_an_unpaired_change_covers_the_truth_and_widens_what_pairs_know() -> None:
    n, before, after = 10, 0.4, 0.7
    inside = sum(
        binom.pmf(k, n, before) * binom.pmf(m, n, after)
        for k, m in itertools.product(range(n + 1), repeat=2)
        if unpaired_difference(k, n, m, n)[0] <= after - before <= unpaired_difference(k, n, m, n)[1]
    )
    assert inside > 0.93
    together = paired(10, 2, 60, 28)
    low, high = unpaired_difference(62, 100, 70, 100)
    assert low < together.ci_low and high > together.ci_high


def test_answers_must_come_in_pairs() -> None:
    for before, after in (([True], [True, False]), ([], [])):
        with pytest.raises(ValueError, match="as many answers"):
            mcnemar(before, after)
