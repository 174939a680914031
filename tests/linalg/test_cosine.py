"""Cosines of rows: bounds, scale, zero rows, extreme scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftlens.base.errors import ShapeError
from driftlens.linalg.state import expert_cosine


@given(seed=st.integers(0, 999), power=st.integers(-18, 18))
def test_scale_of_either_side_does_not_matter(seed: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, 5, 7, generator=generator)
    plain = torch.nn.functional.cosine_similarity(left, right)
    torch.testing.assert_close(expert_cosine(left * 10.0**power, right), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(expert_cosine(left, -right * 10.0**power), -plain, rtol=1e-5, atol=1e-6)


def test_a_row_and_itself_give_one_and_opposite_rows_minus_one() -> None:
    rows = torch.tensor([[3.0, -4.0], [1e-20, 1e-20]])
    torch.testing.assert_close(expert_cosine(rows, rows), torch.ones(2))
    torch.testing.assert_close(expert_cosine(rows, -rows), -torch.ones(2))


def test_a_zero_row_has_no_cosine() -> None:
    found = expert_cosine(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert found.isnan().tolist() == [True, False]


def test_rows_must_match() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 3\] and \[2, 4\]"):
        expert_cosine(torch.zeros(2, 3), torch.zeros(2, 4))
