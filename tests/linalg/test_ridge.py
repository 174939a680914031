"""Closed forms: each is the minimiser it claims to be, and refuses what has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from driftlens.linalg.ridge import (
    LinearMoments,
    NormMoments,
    cholesky_factor,
    random_direction,
    ridge_factor,
    solve_bias,
    solve_layer_norm,
    solve_ridge,
    solve_rms_norm,
    stationarity_error,
)
from driftlens.utils.errors import NumericsError, SingularGramError
from tests.linalg.rows import moments_of


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


sizes = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
lams = st.sampled_from([1e-3, 0.05, 3.0])


@given(sizes, lams)
def test_a_ridge_solve_is_least_squares_on_stacked_rows(size: tuple[int, ...], lam: float) -> None:
    count, k, o, seed = size
    x, y, anchor = random(count, k, seed=seed), random(count, o, seed=seed + 1), random(o, k, seed=seed + 2)
    found = solve_ridge(moments_of(x, y, weight_sum=1.0), anchor, lam=lam).weight
    left = torch.cat([x / count**0.5, lam**0.5 * torch.eye(k, dtype=torch.float64)])
    right = torch.cat([y / count**0.5, lam**0.5 * anchor.mT])
    torch.testing.assert_close(
        found, torch.linalg.lstsq(left, right, driver="gelsd").solution.mT, rtol=1e-8, atol=1e-9
    )


def objective(moments: LinearMoments, weight: Tensor, anchor: Tensor | None, lam: float) -> Tensor:
    pull = 0.0 if anchor is None else lam * (weight - anchor).square().sum()
    return moments.misfit(weight).sum() + pull


@given(sizes, lams)
def test_the_gradient_vanishes_and_no_other_weight_is_better(size: tuple[int, ...], lam: float) -> None:
    count, k, o, seed = size
    moments = moments_of(random(count, k, seed=seed), random(count, o, seed=seed + 1), weight_sum=0.7)
    anchor = random(o, k, seed=seed + 2)
    solution = solve_ridge(moments, anchor, lam=lam)
    weight = solution.weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(moments, weight, anchor, lam), weight)
    assert float(gradient.abs().max()) <= 1e-10 * (1 + float(anchor.abs().max()))
    assert float(solution.objective.sum()) == pytest.approx(
        float(objective(moments, solution.weight, anchor, lam)), rel=1e-9, abs=1e-12
    )
    other = solution.weight + 0.1 * random(o, k, seed=seed + 3)
    # tr(D H D'), the paper's excess of one minimiser under another's objective.
    rise = objective(moments, other, anchor, lam) - solution.objective.sum()
    assert float(solution.objective_increase(other).sum()) == pytest.approx(float(rise), rel=1e-8)
    assert float(rise) > 0


@given(sizes, lams)
def test_one_direction_tells_a_solution_from_what_is_none(size: tuple[int, ...], lam: float) -> None:
    count, k, o, seed = size
    anchor, rows = random(o, k), random(count, k, seed=seed)
    moments = moments_of(rows, random(count, o, seed=seed + 1), weight_sum=1.0)
    right, direction = moments.output_cross + lam * anchor, random_direction(moments.gram)
    image, wanted = moments.gram @ direction + lam * direction, right @ direction
    weight = solve_ridge(moments, anchor, lam=lam).weight
    assert stationarity_error(weight, image, wanted) < 1e-11
    assert stationarity_error(1.01 * weight, image, wanted) == pytest.approx(0.01 / 2.01, rel=1e-6)
    assert stationarity_error(weight, image, wanted - lam * (anchor @ direction)) > 1e-5


def test_an_infinite_ridge_gives_the_anchor_and_none_gives_least_squares() -> None:
    moments, anchor = moments_of(random(50, 4), random(50, 3, seed=1)), random(3, 4, seed=2)
    torch.testing.assert_close(solve_ridge(moments, anchor, lam=1e14).weight, anchor, rtol=1e-10, atol=1e-12)
    plain = torch.linalg.lstsq(random(50, 4), random(50, 3, seed=1)).solution.mT
    torch.testing.assert_close(solve_ridge(moments, None, lam=7.0).weight, plain, rtol=1e-10, atol=1e-12)


def test_one_factor_serves_stacked_sites_as_if_each_had_its_own() -> None:
    x, y, anchor = random(20, 4), random(20, 5, seed=1), random(5, 4, seed=2)
    together = solve_ridge(moments_of(x, y), anchor, lam=0.1)
    apart = [solve_ridge(moments_of(x, y[:, part]), anchor[part], lam=0.1) for part in (slice(2), slice(2, 5))]
    torch.testing.assert_close(together.weight, torch.cat([s.weight for s in apart]))
    torch.testing.assert_close(together.objective, torch.cat([s.objective for s in apart]))


def test_nothing_that_is_handed_in_is_modified() -> None:
    moments, anchor = moments_of(random(20, 4), random(20, 3, seed=1)), random(3, 4, seed=2)
    before = {f.name: getattr(moments, f.name).clone() for f in dataclasses.fields(moments)}
    solve_ridge(moments, anchor, lam=0.1)
    assert all(torch.equal(getattr(moments, name), value) for name, value in before.items())
    assert torch.equal(anchor, random(3, 4, seed=2))


@pytest.mark.parametrize("k", [191, 192, 193, 384, 800])
def test_a_factor_of_several_panels_is_the_whole_one(k: int) -> None:
    rows = random(k + 5, k)
    gram = rows.mT @ rows / k
    factor = cholesky_factor(gram, name="gram", scale=2.0, shift=0.1)
    want = torch.linalg.cholesky(2 * gram + 0.1 * torch.eye(k, dtype=torch.float64))
    torch.testing.assert_close(factor.lower.tril(), want, rtol=1e-10, atol=1e-12)
    with pytest.raises(SingularGramError):
        cholesky_factor(gram - 2 * torch.diag(torch.ones(k, dtype=torch.float64)), name="gram")


# --- refusals -----------------------------------------------------------------------------------------------------


def test_fewer_rows_than_inputs_without_a_ridge_are_refused_with_eigenvalue_and_remedy() -> None:
    moments = moments_of(random(3, 5), random(3, 2, seed=1))
    with pytest.raises(SingularGramError, match=r"smallest eigenvalue -?\d") as caught:
        solve_ridge(moments, random(2, 5), lam=0.0)
    assert "lam" in caught.value.hint and "samples" in caught.value.hint
    exact = float(torch.linalg.eigvalsh(moments.gram)[0])
    assert abs(caught.value.context["smallest_eigenvalue"] - exact) < 1e-12


def test_a_factorisation_that_goes_through_is_no_proof_of_full_rank() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1.0, 1e-16], dtype=torch.float64))
    assert int(torch.linalg.cholesky_ex(matrix).info) == 0
    with pytest.raises(SingularGramError):
        cholesky_factor(matrix, name="gram")
    matrix[2, 2] = 1e-14
    assert cholesky_factor(matrix, name="gram").smallest_eigenvalue == pytest.approx(1e-14)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_refused_before_anything_is_solved(value: float) -> None:
    gram = torch.eye(3, dtype=torch.float64)
    gram[2, 1] = gram[1, 2] = value
    with pytest.raises(NumericsError, match="NaN or infinite") as caught:
        ridge_factor(gram, 0.05)
    assert not isinstance(caught.value, SingularGramError)


@given(st.integers(1, 40), st.integers(0, 99), st.floats(-8, 0))
@example(3, 17, -2.0)  # one start across the smallest's direction: 9 times off, more than the margin of a refusal
@example(13, 68, -8.0)
def test_estimated_eigenvalues_bracket_the_true_ones(k: int, seed: int, decades: float) -> None:
    basis = torch.linalg.qr(random(k, k, seed=seed)).Q
    true = torch.logspace(0, decades, k, dtype=torch.float64)
    factor = cholesky_factor(basis * true @ basis.mT, name="matrix")
    smallest, largest = float(true.min()), float(true.max())
    assert smallest * (1 - 1e-6) <= factor.smallest_eigenvalue
    assert factor.largest_eigenvalue <= largest * (1 + 1e-6)
    # What is refused is looked at exactly where the estimates come within a factor of 8.
    assert factor.condition_number >= largest / smallest / 6
    rows = random(2, k, seed=seed + 1)
    lower = factor.lower.tril()
    matrix = lower @ lower.mT
    torch.testing.assert_close(factor.energy(rows), ((rows @ matrix) * rows).sum(dim=1))


@pytest.fixture
def _new_memory_holds_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_new_memory_holds_nan")
@pytest.mark.parametrize("k", [192, 193, 320, 500])
def test_what_stands_above_a_factors_diagonal_is_never_read(k: int) -> None:
    assert bool(torch.empty(3).isnan().all())
    x = random(2 * k, k)
    matrix, rows = x.mT @ x, random(3, k, seed=1)
    factor = cholesky_factor(matrix, name="matrix")
    torch.testing.assert_close(factor.energy(rows), ((rows @ matrix) * rows).sum(dim=1))
    largest = float(torch.linalg.eigvalsh(matrix)[-1])
    assert largest / 4 <= factor.largest_eigenvalue <= largest * (1 + 1e-6)


# --- biases and norms ---------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 99), lams)
def test_a_bias_is_stationary_for_its_objective(num_tasks: int, seed: int, lam: float) -> None:
    omega = torch.rand(num_tasks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    targets, outputs = random(num_tasks, 3, seed=seed), random(num_tasks, 3, seed=seed + 1)
    anchor, share = random(3, seed=seed + 2), omega / omega.sum()
    bias = solve_bias(share @ targets, share @ outputs, omega.sum(), anchor, lam=lam).requires_grad_()
    error = (omega[:, None] * (outputs + bias - targets).square()).sum() + lam * (bias - anchor).square().sum()
    (gradient,) = torch.autograd.grad(error, bias)
    assert float(gradient.abs().max()) < 1e-12
    free = solve_bias(share @ targets, share @ outputs, omega.sum(), None, lam=lam)
    torch.testing.assert_close(free, share @ (targets - outputs))


def norm_moments(z: Tensor, scales: Tensor, shifts: Tensor | None) -> NormMoments:
    """Tasks are the first axis of all three; each counts 1."""
    one = torch.ones((), dtype=torch.float64)
    parts = [
        NormMoments.from_affine(rows.mean(0), rows.square().mean(0), scale, None if shifts is None else shifts[i], one)
        for i, (rows, scale) in enumerate(zip(z, scales, strict=True))
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("pulled", [True, False], ids=["with an anchor", "without one"])
def test_a_layer_norms_scale_and_shift_solve_its_normal_equations(pulled: bool) -> None:
    lam, z = 0.3, random(3, 20, 4)
    scales, shifts = random(3, 4, seed=1), random(3, 4, seed=2)
    anchors = (random(4, seed=3), random(4, seed=4)) if pulled else (None, None)
    start = random(2, 4, seed=5)
    found = solve_layer_norm(norm_moments(z, scales, shifts), *start, *anchors, lam=lam)
    scale, shift = (value.requires_grad_() for value in found)
    error = sum(((scale - scales[i]) * z[i] + shift - shifts[i]).square().sum(dim=1).mean() for i in range(3))
    if pulled:
        error = error + lam * ((scale - anchors[0]).square() + (shift - anchors[1]).square()).sum()
    for gradient in torch.autograd.grad(error, (scale, shift)):
        assert float(gradient.abs().max()) < 1e-12


def test_an_rms_norms_scale_is_stationary() -> None:
    lam, z, scales, anchor = 0.3, random(3, 20, 4), random(3, 4, seed=1), random(4, seed=2)
    scale = solve_rms_norm(norm_moments(z, scales, None), anchor, lam=lam).requires_grad_()
    error = sum(((scale - scales[i]) * z[i]).square().sum(dim=1).mean() for i in range(3))
    (gradient,) = torch.autograd.grad(error + lam * (scale - anchor).square().sum(), scale)
    assert float(gradient.abs().max()) < 1e-12
    free = solve_rms_norm(norm_moments(z[:1], scales[:1], None), None, lam=lam)
    torch.testing.assert_close(free, scales[0])


def test_a_norm_that_too_few_rows_determine_is_refused(generator: torch.Generator) -> None:
    mean = torch.randn(5, generator=generator, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    moments = NormMoments.from_affine(mean, mean**2, torch.ones_like(mean), torch.zeros_like(mean), one)
    with pytest.raises(SingularGramError, match="5 of 5 coordinates") as raised:
        solve_layer_norm(moments, *torch.zeros(2, 5).double(), None, None, lam=0.0)
    assert abs(raised.value.context["smallest_eigenvalue"]) < 1e-12
    anchors = torch.ones_like(mean), torch.zeros_like(mean)
    pulled, shift = solve_layer_norm(moments, *torch.zeros(2, 5).double(), *anchors, lam=0.05)
    torch.testing.assert_close(pulled, torch.ones_like(mean))
    torch.testing.assert_close(shift, torch.zeros_like(mean), rtol=0, atol=1e-12)


def test_a_scale_that_nothing_excites_or_pulls_is_refused() -> None:
    second = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    scale, one = torch.ones_like(second), torch.ones((), dtype=torch.float64)
    moments = NormMoments.from_affine(torch.zeros_like(second), second, scale, None, one)
    with pytest.raises(SingularGramError, match="1 of 3 coordinates"):
        solve_rms_norm(moments, None, lam=0.0)
    torch.testing.assert_close(solve_rms_norm(moments, scale, lam=0.05), scale)


@given(
    st.integers(1, 4),
    st.integers(0, 99),
    st.one_of(st.just(0.0), st.floats(-14, 6).map(lambda power: 10.0**power)),
    st.one_of(st.just(0.0), st.floats(-12, 0).map(lambda power: 10.0**power)),
    st.booleans(),
)
def test_a_norms_solve_never_ends_above_where_it_started(
    num_tasks: int, seed: int, lam: float, spread: float, has_shift: bool
) -> None:
    """At any ridge and however little a coordinate varies; the anchor lies elsewhere than the merged model."""
    z = random(1, 1, 4, seed=seed + 7) + spread * random(num_tasks, 6, 4, seed=seed)
    z = z if has_shift else spread * z
    scales, shifts = random(num_tasks, 4, seed=seed + 1), random(num_tasks, 4, seed=seed + 2)
    start, anchor = random(2, 4, seed=seed + 3), random(2, 4, seed=seed + 4)
    moments = norm_moments(z, scales, shifts if has_shift else None)

    def objective(scale: Tensor, shift: Tensor | None) -> Tensor:
        """Eq. 57 row by row: the moments would round away what is to be seen."""
        total = lam * (scale - anchor[0]).square()
        if shift is not None:
            total = total + lam * (shift - anchor[1]).square()
        for i in range(num_tasks):
            error = (scale - scales[i]) * z[i] + (0 if shift is None else shift - shifts[i])
            total = total + error.square().mean(dim=0)
        return total

    try:
        if has_shift:
            after = objective(*solve_layer_norm(moments, *start, *anchor, lam=lam))
        else:
            after = objective(solve_rms_norm(moments, anchor[0], lam=lam), None)
    except SingularGramError:
        assert lam * spread**2 < 1e-12 or lam + spread**2 < 1e-12, "refused without need"
        return
    before = objective(start[0], start[1] if has_shift else None)
    assert bool((after <= before * (1 + 1e-9) + 1e-12).all()), (before, after)
