"""Cosines, CKA, and the integral identities against their closed forms, at CLIP's logit scale and beyond."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from driftlens.linalg.state import cross_entropy_change, expert_cosine, linear_cka, softmax_change


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


@pytest.fixture
def features(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    left = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return left, left[:, :4] + 0.5 * noise


def orthogonal(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q


TRANSFORMS = {
    "orthogonal": lambda x: x @ orthogonal(x.shape[1]),
    "isotropic_scaling": lambda x: 1e3 * x,
    "translation": lambda x: x + 7,
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_declared_invariance_holds(name: str, features: tuple[Tensor, Tensor]) -> None:
    left, right = features
    torch.testing.assert_close(linear_cka(TRANSFORMS[name](left), right), linear_cka(left, right), rtol=1e-9, atol=0)


def test_order_of_samples_does_not_matter_if_it_is_the_same(features: tuple[Tensor, Tensor]) -> None:
    left, right = features
    torch.testing.assert_close(linear_cka(left.flip(0), right.flip(0)), linear_cka(left, right))
    assert abs(linear_cka(left.flip(0), right) - linear_cka(left, right)) > 0.1


def test_an_invertible_map_changes_it(features: tuple[Tensor, Tensor]) -> None:
    left, right = features
    stretched = left * torch.logspace(0, 2, 6, dtype=torch.float64)
    assert abs(linear_cka(stretched, right) - linear_cka(left, right)) > 0.05


def test_equal_features_give_one_and_unrelated_ones_zero_on_average() -> None:
    generator = torch.Generator().manual_seed(5)
    unrelated = []
    for _ in range(200):
        left, right = torch.randn(2, 30, 50, generator=generator, dtype=torch.float64)
        unrelated.append(float(linear_cka(left, right)))
    assert linear_cka(left, left) == pytest.approx(1, abs=1e-12)
    # The biased estimator would give about 0.6 here: fewer samples than features.
    assert abs(sum(unrelated) / len(unrelated)) < 0.02


def test_it_is_the_estimator_written_out(features: tuple[Tensor, Tensor]) -> None:
    def hsic(k: Tensor, m: Tensor) -> float:
        n, total = len(k), 0.0
        for i in range(n):
            for j in range(n):
                if i == j:
                    continue
                total += float(k[i, j] * m[i, j])
                for q in range(n):
                    if q not in (i, j):
                        total -= 2 / (n - 2) * float(k[i, j] * m[j, q])
                        for r in range(n):
                            if r not in (i, j, q):
                                total += float(k[i, j] * m[q, r]) / ((n - 2) * (n - 3))
        return total

    left, right = (side[:7] for side in features)
    k, m = left @ left.T, right @ right.T
    # sums over distinct indices, in the U-statistic's own weights
    assert linear_cka(left, right) == pytest.approx(hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_in_half_precision_are_compared_in_float32(dtype: torch.dtype, generator: torch.Generator) -> None:
    left = 10 * torch.randn(64, 768, generator=generator)
    right = left + 3 * torch.randn(64, 768, generator=generator)
    halves = left.to(dtype), right.to(dtype)
    assert linear_cka(*halves) == pytest.approx(float(linear_cka(*(half.double() for half in halves))), abs=1e-5)


def test_too_few_samples_or_no_variation_give_nan(generator: torch.Generator) -> None:
    assert linear_cka(torch.eye(3), torch.eye(3)).isnan()
    assert linear_cka(torch.ones(6, 2), torch.randn(6, 2, generator=generator)).isnan()


ranges = st.sampled_from([0.0, 1.0, 30.0, 131.0])


def scores(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z, change = spread * (torch.rand(2, 6, 9, generator=generator, dtype=torch.float64) - 0.5)
    return z, change, torch.randint(9, (6,), generator=generator)


@given(seed=st.integers(0, 99), spread=ranges)
def test_softmax_change_is_the_integral_of_its_jacobian(seed: int, spread: float) -> None:
    z, change, _ = scores(seed, spread)
    exact = (z + change).softmax(dim=1) - z.softmax(dim=1)
    torch.testing.assert_close(softmax_change(z, change), exact, rtol=0, atol=1e-9)


@given(seed=st.integers(0, 99), spread=ranges)
def test_loss_change_is_the_integral_of_its_gradient(seed: int, spread: float) -> None:
    z, change, labels = scores(seed, spread)
    exact = F.cross_entropy(z + change, labels, reduction="none") - F.cross_entropy(z, labels, reduction="none")
    torch.testing.assert_close(cross_entropy_change(z, change, labels), exact, rtol=0, atol=1e-9 * max(1, spread))


def test_adding_a_constant_to_all_scores_changes_nothing() -> None:
    z, change, labels = scores(0, 10.0)
    torch.testing.assert_close(softmax_change(z, change + 5), softmax_change(z, change), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        cross_entropy_change(z, change + 5, labels),
        cross_entropy_change(z, change, labels),
        rtol=0,
        atol=1e-11,
    )


def test_a_single_panel_would_not_do() -> None:
    """What the composite rule is for: at a range of 131 one eight-node panel is off by percents."""
    from driftlens.linalg import state

    z, change, _ = scores(1, 131.0)
    exact = (z + change).softmax(dim=1) - z.softmax(dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "PANEL", 1e9)
        assert (softmax_change(z, change) - exact).abs().max() > 1e-2
