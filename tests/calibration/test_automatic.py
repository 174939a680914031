"""The choice among models: folds by sample, and the last one that is as good as the best."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from driftlens.calibration.automatic import (
    HeldOutScores,
    choose_model,
    fold_ranges,
)
from driftlens.calibration.featcal import FeatCal
from driftlens.utils.errors import DataError

START = FeatCal(0.05, 2.0, 0.3)
NOISE = {
    "cars": np.random.default_rng(0).normal(size=20),
    "signs": np.random.default_rng(1).normal(size=30),
}


def scored(score: float, noise: float = 0.0) -> HeldOutScores:
    """Scores of an imagined model; the noise of a sample is the same for all."""
    return HeldOutScores({task: score + noise * values for task, values in NOISE.items()})


def test_too_few_samples_are_refused_with_the_number_it_takes() -> None:
    with pytest.raises(DataError, match=r"task cars has 7 calibration samples; .* at least 8"):
        fold_ranges(7, "cars")


def test_the_advantage_is_that_of_paired_samples() -> None:
    rng = np.random.default_rng(5)
    before = {task: rng.normal(size=count) for task, count in (("cars", 12), ("signs", 30))}
    gaps = {task: 0.3 + 0.01 * rng.normal(size=len(values)) for task, values in before.items()}
    after = HeldOutScores({task: values - gaps[task] for task, values in before.items()})
    found = after.compare_to(HeldOutScores(before))
    assert found.advantage == pytest.approx(np.mean([gap.mean() for gap in gaps.values()]))
    expected = math.sqrt(sum(gap.var(ddof=1) / len(gap) for gap in gaps.values())) / 2
    assert found.standard_error == pytest.approx(expected)
    assert is_clear(after, HeldOutScores(before)) and not is_clear(HeldOutScores(before), after)


def is_clear(one: HeldOutScores, other: HeldOutScores, among: int = 1) -> bool:
    return one.compare_to(other, among=among).is_clear


def test_few_samples_need_students_quantile_and_several_comparisons_more() -> None:
    """Two standard errors are clear for a normal variable, not for four samples, and not twice."""
    gaps = np.array([-1.0, 0.0, 1.0, 2.0])
    error = gaps.std(ddof=1) / 2
    for among in (1, 2, 3):
        quantile = stats.t.ppf(1 - 0.025 / among, 3)
        for factor, expected in ((0.99, False), (1.01, True)):
            after = HeldOutScores({"cars": gaps.mean() - gaps - factor * quantile * error})
            assert is_clear(after, HeldOutScores({"cars": np.zeros(4)}), among) is expected
    assert stats.t.ppf(0.975, 3) > 3


def test_tasks_of_unequal_spread_have_satterthwaites_freedom() -> None:
    rng = np.random.default_rng(0)
    gaps = {"cars": rng.normal(0, 1, 8), "signs": rng.normal(0, 0.1, 30)}
    found = HeldOutScores({task: -values for task, values in gaps.items()}).compare_to(
        HeldOutScores({task: np.zeros(len(values)) for task, values in gaps.items()})
    )
    welch = stats.ttest_ind(gaps["cars"], gaps["signs"], equal_var=False)
    assert found.freedom == pytest.approx(welch.df) and found.freedom < 8


def test_a_model_with_the_scores_of_an_earlier_one_is_not_preferred_to_it() -> None:
    decision = choose_model({"merged": scored(1.0), "start": scored(1.0)})
    assert decision.name == "merged" and not decision.over_merged["start"].is_clear


def test_the_base_is_chosen_and_the_merge_advised_against_where_nothing_is_nearer_than_the_base() -> None:
    def found(base: HeldOutScores, start: float) -> tuple[str, bool]:
        decision = choose_model({"merged": scored(1.0), "base": base, "start": scored(start)})
        assert decision.among == 2
        return decision.name, decision.base_stands

    assert found(scored(0.2), 0.5) == ("base", True)
    assert found(scored(0.2), 0.2) == ("base", True), "equal scores"
    assert found(scored(1.0), 2.0) == ("merged", True)
    assert found(scored(0.9), 2.0) == ("base", True)
    assert found(scored(0.2), 0.1) == ("start", False)


def test_comparisons_with_what_was_left_behind_count() -> None:
    gaps = np.random.default_rng(4).normal(0.8, 1, 20)
    scores = {"merged": HeldOutScores({"cars": gaps}), "start": HeldOutScores({"cars": 0 * gaps})}
    few, many = (choose_model(scores, among=among).over_merged["start"] for among in (1, 1000))
    assert few.is_clear and not many.is_clear and many.low < few.low


def test_the_last_within_a_standard_error_of_the_best_is_taken() -> None:
    flat = {task: 0 * values for task, values in NOISE.items()}
    noisy = {task: values - values.mean() for task, values in NOISE.items()}
    scores = {
        name: HeldOutScores({task: mean + (noisy if name == "other" else flat)[task] for task in flat})
        for name, mean in {"merged": 2.0, "one": 1.0, "other": 1.0}.items()
    }
    error = scores["other"].compare_to(scores["one"]).standard_error
    for behind, name in ((-5.0, "other"), (0.9, "other"), (1.1, "one")):  # in standard errors
        later = {task: values + behind * error for task, values in scores["other"].by_task.items()}
        assert choose_model(scores | {"other": HeldOutScores(later)}).name == name


def test_what_is_chosen_is_never_clearly_worse_than_the_best() -> None:
    """The merged model and the preset among them; scores of any spread, shared noise, and ways that can't be solved."""
    rng = np.random.default_rng(17)
    for _ in range(200):
        shared = {task: rng.exponential(size=len(values)) for task, values in NOISE.items()}
        scores = {}
        for name in ("merged", "base", "start", "found", "other"):
            middle, spread, sharing = rng.normal(), rng.exponential(), rng.choice([0.0, 1.0])
            drawn = {task: sharing * at + rng.normal(middle, spread, len(at)) for task, at in shared.items()}
            if name != "merged" and rng.random() < 0.1:
                drawn["cars"] = np.full(len(drawn["cars"]), np.inf)
            scores[name] = HeldOutScores(drawn)
        chosen = scores[choose_model(scores).name]
        assert math.isfinite(chosen.mean)
        lowest = min((of for of in scores.values() if math.isfinite(of.mean)), key=lambda of: of.mean)
        assert chosen is lowest or not is_clear(lowest, chosen)


def test_what_can_not_be_solved_for_is_never_chosen() -> None:
    unsolved, as_is = HeldOutScores({"cars": np.full(9, np.inf)}), HeldOutScores({"cars": np.full(9, 5.0)})
    decision = choose_model({"merged": as_is, "start": unsolved})
    assert decision.name == "merged" and not math.isfinite(decision.over_merged["start"].advantage)
    other = HeldOutScores({"cars": np.zeros(9)})
    assert choose_model({"merged": as_is, "start": unsolved, "other": other}).name == "other"
