"""Intervals and tests of accuracy: against scipy, against enumeration, and by what they must mean."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats
from scipy.stats import binom, binomtest, multinomial, norm

from driftlens.diagnostics.drift_columns import bootstrap_ratio_ci
from driftlens.utils.intervals import (
    Interval,
    PairedChange,
    interval_p_value,
    mcnemar_test,
    mean_change,
    mean_interval,
    mean_over_tasks,
    standard_error,
    t_quantile,
    unpaired_difference,
    wilson_interval,
)


def paired(gained: int, lost: int, both: int, neither: int) -> PairedChange:
    """From the four cells of the table."""
    before = [False] * gained + [True] * lost + [True] * both + [False] * neither
    after = [True] * gained + [False] * lost + [True] * both + [False] * neither
    return mcnemar_test(before, after)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 1), (7, 10), (10, 10), (500, 1000), (3, 100_000)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson_interval(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (7, 10), (10, 10), (500, 1000)])
def test_each_end_of_wilsons_interval_solves_its_quadratic(k: int, n: int) -> None:
    """Each end p satisfies |k/n - p| = z sqrt(p (1 - p) / n)."""
    z = 1.959963984540054
    for end in wilson_interval(k, n):
        assert abs(k / n - end) == pytest.approx(z * math.sqrt(max(0.0, end * (1 - end)) / n), abs=1e-9)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 5), (6, 5)], ids=["no samples", "negative", "more than all"])
def test_impossible_counts_have_no_interval(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="k <= n"):
        wilson_interval(k, n)


@pytest.mark.parametrize(
    ("gained", "lost"),
    [(0, 0), (1, 0), (0, 6), (12, 2), (7, 7), (40, 61), (5000, 5200)],
    ids=["none changed", "one gained", "all lost", "few", "balanced", "many", "thousands"],
)
def test_mcnemar_is_the_mid_p_test_of_a_fair_coin(gained: int, lost: int) -> None:
    found = paired(gained, lost, both=9, neither=4)
    changed = gained + lost
    seen = binom.pmf(gained, changed, 0.5)  # counts half, on both sides
    expected = 1.0 if gained == lost else binomtest(gained, changed, 0.5).pvalue - seen
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
        if abs(end) > 1 - 1e-9 or abs(end - found.difference) < 1e-9 or end == 0:
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


def test_p_is_below_5_percent_exactly_where_the_interval_excludes_0() -> None:
    verdicts = []
    # By how many of the changed ones must be gained: on either side of that edge.
    for changed in range(1, 400, 3):
        edge = round(changed / 2 + 0.98 * math.sqrt(changed))
        for gained in range(max(0, edge - 2), min(changed, edge + 2) + 1):
            found = paired(gained, changed - gained, 40, 20)
            verdicts.append(found.p_value < 0.05)
            assert verdicts[-1] == (found.ci_low > 0 or found.ci_high < 0), (gained, changed)
    assert 100 < sum(verdicts) < len(verdicts) - 100
    assert paired(4, 0, 40, 20).ci_low == 0, "Tango's interval alone excludes 0 here, at a p of 0.06"


@given(st.lists(cells, min_size=1, max_size=5))
def test_the_p_of_a_mean_over_tasks_says_what_its_interval_says(
    tasks: list[tuple[int, int, int, int]],
) -> None:
    found = [paired(*at) for at in tasks]
    mean = mean_over_tasks([Interval(at.difference, at.ci_low, at.ci_high, at.n) for at in found])
    assert (interval_p_value(mean) < 0.05) == (mean.low > 0 or mean.high < 0)
    assert interval_p_value(Interval(-mean.value, -mean.high, -mean.low)) == interval_p_value(mean)


def test_the_p_of_a_symmetric_interval_is_that_of_its_standard_errors() -> None:
    assert interval_p_value(Interval(0.06, 0.06 - 1.959964 * 0.02, 1.0)) == pytest.approx(2 * norm.sf(3), rel=1e-4)
    assert interval_p_value(Interval(0.0, 0.0, 0.0)) == 1 and interval_p_value(Interval(0.1, 0.1, 0.1)) == 0
    assert math.isnan(interval_p_value(Interval(0.1))) and math.isnan(interval_p_value(Interval(math.nan)))


def test_wilson_covers_the_truth_about_95_times_in_100() -> None:
    """By enumeration: the chance that the interval of a drawn count holds the true share."""
    n = 12
    ends = [wilson_interval(k, n) for k in range(n + 1)]
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
        with pytest.raises(ValueError, match="equally many answers"):
            mcnemar_test(before, after)


# --- means, their changes, shares ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 40])
def test_a_mean_has_students_interval_with_the_variance_of_a_sample(n: int) -> None:
    values = np.random.default_rng(n).normal(3, 1, n)
    expected = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    found = mean_interval(values.mean(), values.std(), n)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)


def test_one_sample_has_a_mean_and_no_interval() -> None:
    assert mean_interval(2.0, 0.0, 1).value == 2.0 and math.isnan(mean_interval(2.0, 0.0, 1).low)
    one = np.array([1.0])
    for is_paired in (True, False):
        found = mean_change(one, 3 * one, is_paired=is_paired)
        assert found.difference.value == 2.0 and math.isnan(found.difference.low)
        assert found.relative.value == 2.0 and math.isnan(found.relative.high)


def test_changes_of_means_are_scipys_paired_and_welchs() -> None:
    rng = np.random.default_rng(0)
    before = rng.gamma(3.0, size=30)
    after = 0.8 * before + rng.normal(0, 0.1, 30)
    expected = stats.ttest_rel(after, before).confidence_interval()
    found = mean_change(before, after, is_paired=True)
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(expected))
    others = rng.gamma(2.0, size=17)
    expected = stats.ttest_ind(others, before, equal_var=False).confidence_interval()
    apart = mean_change(before, others, is_paired=False)
    assert (apart.difference.low, apart.difference.high) == pytest.approx(tuple(expected))
    assert apart.difference.n == apart.relative.n == 17 and not apart.is_paired
    with pytest.raises(ValueError, match="equally many samples"):
        mean_change(before, others, is_paired=True)


@pytest.mark.parametrize("is_paired", [True, False])
def test_the_relative_change_covers_the_truth_as_often_as_it_says(is_paired: bool) -> None:
    """The truth is 0.7 / 1 - 1; the mean before errs too, which an interval of the difference alone would not see."""
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(2000):
        before = rng.gamma(8.0, 1 / 8, 25)
        after = 0.7 * (before if is_paired else rng.gamma(8.0, 1 / 8, 25)) + rng.normal(0, 0.05, 25)
        found = mean_change(before, after, is_paired=is_paired).relative
        covered += found.low <= -0.3 <= found.high
    assert 0.93 <= covered / 2000 <= 0.97


def test_nothing_changes_between_a_model_and_itself() -> None:
    values = np.random.default_rng(0).gamma(3.0, size=9)
    found = mean_change(values, values, is_paired=True)
    assert (found.difference.low, found.difference.high) == (0, 0) == (found.relative.low, found.relative.high)


def test_errors_of_independent_groups_add_with_satterthwaites_freedom() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.normal(0, 1, 12), rng.normal(0, 3, 7)
    error, freedom = standard_error([one, other])
    welch = stats.ttest_ind(one, other, equal_var=False)
    assert freedom == pytest.approx(welch.df)
    assert error == pytest.approx((one.mean() - other.mean()) / welch.statistic)
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, welch.df)) and math.isnan(t_quantile(0))
    assert standard_error([one, other[:1]])[0] == math.inf


def test_a_mean_over_tasks_errs_as_its_strata_do() -> None:
    """Tasks stay what they are: many samples of very different tasks have a certain mean."""
    far = [Interval(0.1, 0.09, 0.11), Interval(0.9, 0.89, 0.91)]
    found = mean_over_tasks(far)
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.5 - 0.01 / 2**0.5, 0.5 + 0.01 / 2**0.5))
    skewed = mean_over_tasks([Interval(1.0, 0.8, 1.0), Interval(0.5, 0.4, 0.6)])
    assert skewed.high == pytest.approx(0.8) and skewed.low == pytest.approx(0.75 - math.hypot(0.2, 0.1) / 2)
    assert math.isnan(mean_over_tasks([far[0], Interval(0.2)]).low) and math.isnan(mean_over_tasks([]).value)


def test_the_mean_accuracy_over_tasks_is_covered() -> None:
    rng, truth, n = np.random.default_rng(2), np.array([0.55, 0.9, 0.98]), 60
    covered = 0
    for _ in range(2000):
        counts = rng.binomial(n, truth)
        found = mean_over_tasks([Interval(k / n, *wilson_interval(int(k), n)) for k in counts])
        covered += found.low <= truth.mean() <= found.high
    assert 0.93 <= covered / 2000 <= 0.98


def test_shares_are_drawn_again_with_their_whole() -> None:
    """A layer that makes a third of every sample's drift makes a third of any draw's; its ratio does not vary."""
    rng = np.random.default_rng(0)
    whole = rng.gamma(2.0, size=40)
    parts = np.stack([whole / 3, whole * rng.uniform(0, 1, 40), np.zeros(40)])
    low, high = bootstrap_ratio_ci(parts, whole)
    assert (low[0], high[0]) == pytest.approx((1 / 3, 1 / 3)) and (low[2], high[2]) == (0, 0)
    share = parts[1].sum() / whole.sum()
    residual = parts[1] - share * whole
    error = residual.std(ddof=1) / 40**0.5 / whole.mean()  # of a ratio of means, linearised
    assert (low[1], high[1]) == pytest.approx((share - 1.96 * error, share + 1.96 * error), abs=0.25 * error)
    np.testing.assert_array_equal(bootstrap_ratio_ci(parts, whole), (low, high))


def test_shares_of_one_sample_or_of_nothing_have_no_interval() -> None:
    assert np.isnan(bootstrap_ratio_ci(np.ones((3, 1)), np.ones(1))).all()
    assert np.isnan(bootstrap_ratio_ci(np.zeros((3, 5)), np.zeros(5))).all()
    one_alone = np.array([0.0, 0.0, 0.0, 2.0])  # draws without the only sample that drifts have no share
    np.testing.assert_array_equal(bootstrap_ratio_ci(one_alone[None] / 2, one_alone), [[0.5], [0.5]])
