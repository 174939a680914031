"""Moments are averages: however rows are split or ordered, the same; and objectives follow from them alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from driftlens.linalg.norm_affine import NormMoments
from tests.linalg.rows import moments_of

FIELDS = ("gram", "output_cross", "mean_in", "mean_target", "target_energy", "weight_sum")
NORM_FIELDS = ("mean", "second", "scale_target", "shift_target", "target_energy", "weight_sum")


@st.composite
def rows_and_targets(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, outputs and weights of a few rows: sizes from 1, repeated and zero rows, scales from 1e-6 to 1e6."""
    count, k, o = draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.integers(-6, 6))
    rows = scale * torch.randn(count, k, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, o, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        rows[1:] = rows[:1]
    if draw(st.booleans()):
        rows[:, 0] = 0
    weights = 0.01 + torch.rand(count, generator=generator, dtype=torch.float64)
    return rows, targets, weights


def assert_equal_moments(left: object, right: object, fields: tuple[str, ...] = FIELDS) -> None:
    for name in fields:
        found, want = getattr(left, name), getattr(right, name)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12 * float(want.abs().max()), msg=name)


@given(rows_and_targets(), st.data())
def test_any_split_and_any_order_give_the_same_moments(
    rows: tuple[Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    x, y, w = rows
    whole = moments_of(x, y, w)
    at = data.draw(st.integers(1, len(x) - 1))
    assert_equal_moments(moments_of(x[:at], y[:at], w[:at]) + moments_of(x[at:], y[at:], w[at:]), whole)
    order = data.draw(st.permutations(range(len(x))))
    assert_equal_moments(moments_of(x[order], y[order], w[order]), whole)


@given(rows_and_targets())
def test_a_gram_matrix_is_symmetric_positive_and_its_trace_the_mean_energy(
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    x, y, w = rows
    gram = moments_of(x, y, w).gram
    size = float(gram.abs().max())
    assert float((gram - gram.mT).abs().max()) <= 1e-14 * size
    assert float(torch.linalg.eigvalsh(gram)[0]) >= -1e-12 * size
    energy = float((w * x.square().sum(dim=1)).sum() / w.sum())
    assert float(gram.trace()) == pytest.approx(energy, rel=1e-12)


@given(rows_and_targets())
def test_a_weight_of_two_is_the_row_twice(rows: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, _ = rows
    weights = torch.ones(len(x), dtype=torch.float64)
    weights[0] = 2
    assert_equal_moments(moments_of(x, y, weights), moments_of(torch.cat([x[:1], x]), torch.cat([y[:1], y])))


@given(rows_and_targets())
def test_the_misfit_of_a_weight_follows_from_the_moments(rows: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, w = rows
    weight = torch.ones(y.shape[1], x.shape[1], dtype=torch.float64) / (1 + x.abs().max())
    direct = (w[:, None] * (x @ weight.mT - y).square()).sum(dim=0)
    found = moments_of(x, y, w).misfit(weight)
    torch.testing.assert_close(found, direct, rtol=1e-9, atol=1e-9)


def test_a_task_that_counts_more_pulls_the_average_its_way(generator: torch.Generator) -> None:
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    together = moments_of(x, y, weight_sum=0.25) + moments_of(2 * x, y, weight_sum=0.75)
    torch.testing.assert_close(together.mean_in, 0.25 * x.mean(0) + 0.75 * 2 * x.mean(0))


@given(rows_and_targets(), st.data())
def test_moments_of_norms_add_up_and_give_the_misfit(
    rows: tuple[Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    z, _, w = rows
    scale, shift = torch.linspace(0.5, 2, z.shape[1]).double(), torch.linspace(-1, 1, z.shape[1]).double()

    def of(start: int, stop: int) -> NormMoments:
        part, share = z[start:stop], (w[start:stop] / w[start:stop].sum())[:, None]
        mean, second = (share * part).sum(0), (share * part.square()).sum(0)
        return NormMoments.of_affine(mean, second, scale, shift, w[start:stop].sum())

    at = data.draw(st.integers(1, len(z) - 1))
    whole = of(0, len(z))
    assert_equal_moments(of(0, at) + of(at, len(z)), whole, NORM_FIELDS)
    wanted = scale * z + shift
    new_scale, new_shift = scale + 1, shift - 0.5
    direct = (w[:, None] * (new_scale * z + new_shift - wanted).square()).sum()
    torch.testing.assert_close(whole.misfit(new_scale, new_shift), direct, rtol=1e-9, atol=1e-9)
    unshifted = (w[:, None] * (new_scale * z - wanted).square()).sum()
    torch.testing.assert_close(whole.misfit(new_scale, None), unshifted, rtol=1e-9, atol=1e-9)
