"""CKA: each declared invariance holds, an undeclared one is broken, and the feature form equals a slow Gram form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from driftlens.base.errors import ShapeError
from driftlens.linalg.cka import linear_cka


@pytest.fixture
def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
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
def test_declared_invariance_holds(name: str, pair: tuple[Tensor, Tensor]) -> None:
    left, right = pair
    torch.testing.assert_close(
        linear_cka(TRANSFORMS[name](left), right), linear_cka(left, right), rtol=1e-9, atol=0
    )


def test_order_of_samples_does_not_matter_if_it_is_the_same(pair: tuple[Tensor, Tensor]) -> None:
    left, right = pair
    torch.testing.assert_close(linear_cka(left.flip(0), right.flip(0)), linear_cka(left, right))
    assert abs(linear_cka(left.flip(0), right) - linear_cka(left, right)) > 0.1


def test_an_invertible_map_changes_it(pair: tuple[Tensor, Tensor]) -> None:
    left, right = pair
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


def test_it_is_the_estimator_written_out(pair: tuple[Tensor, Tensor]) -> None:
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

    left, right = (side[:7] for side in pair)
    k, m = left @ left.T, right @ right.T
    # sums over distinct indices, in the U-statistic's own weights
    assert linear_cka(left, right) == pytest.approx(hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5, rel=1e-9)


def test_too_few_samples_or_no_variation_give_nan(generator: torch.Generator) -> None:
    assert linear_cka(torch.eye(3), torch.eye(3)).isnan()
    assert linear_cka(torch.ones(6, 2), torch.randn(6, 2, generator=generator)).isnan()


def test_samples_must_match() -> None:
    with pytest.raises(ShapeError, match="same n"):
        linear_cka(torch.zeros(5, 2), torch.zeros(6, 2))
