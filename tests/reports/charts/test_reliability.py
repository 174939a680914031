"""Reliability bins and calibration error against loops over samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlens_reports.charts.decisions import expected_calibration_error, reliability

answers = st.lists(st.tuples(st.floats(0.01, 1.0), st.booleans()), min_size=1, max_size=60)


def slow_error(pairs: list[tuple[float, bool]]) -> float:
    """The textbook sum over bins ((k - 1) / 10, k / 10], sample by sample."""
    total = 0.0
    for k in range(1, 11):
        own = [(p, right) for p, right in pairs if (k - 1) / 10 < p <= k / 10]
        if own:
            confidence = math.fsum(p for p, _ in own) / len(own)
            accuracy = sum(right for _, right in own) / len(own)
            total += len(own) / len(pairs) * abs(accuracy - confidence)
    return total


@given(pairs=answers)
def test_the_error_agrees_with_a_loop_over_samples(pairs: list[tuple[float, bool]]) -> None:
    # The product p * 10 rounds where p / 0.1 need not: such ties are no matter of the method.
    pairs = [(p, right) for p, right in pairs if abs(p * 10 - round(p * 10)) > 1e-9]
    if not pairs:
        return
    confidence, right = (np.array(column) for column in zip(*pairs, strict=True))
    found = reliability(confidence, right)
    assert expected_calibration_error(found) == pytest.approx(slow_error(pairs), abs=1e-12)
    assert found["samples"].sum() == len(pairs)


def test_a_network_that_is_right_as_often_as_it_says_has_no_error() -> None:
    right = np.array([True] * 3 + [False] + [True] * 9 + [False])
    confidence = np.array([0.75] * 4 + [0.9] * 10)
    assert expected_calibration_error(reliability(confidence, right)) == pytest.approx(0, abs=1e-15)


def test_one_that_is_always_sure_and_wrong_has_error_one() -> None:
    assert expected_calibration_error(reliability(np.ones(5), np.zeros(5, dtype=bool))) == 1


def test_an_empty_bin_has_no_accuracy_and_no_weight() -> None:
    found = reliability(np.array([0.95, 0.97]), np.array([True, False]))
    empty = found[found["samples"] == 0]
    assert len(empty) == 9 and empty[["accuracy", "confidence", "low", "high"]].isna().all(axis=None)
    assert expected_calibration_error(found) == pytest.approx(0.46)


def test_the_ends_of_bins_belong_to_the_lower_one() -> None:
    found = reliability(np.array([0.5, 1.0]), np.array([True, True]))
    assert found.loc[found["samples"] > 0, "to"].tolist() == [0.5, 1.0]
