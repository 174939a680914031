"""Methods that take a linear module as a matrix: against a slow reference, and what holds for all matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from driftlens.merging.method import merge_methods
from tests.merging.applying import apply, random_model, states
from tests.reference import matrix_merging as reference

SVD = ("tsv_m", "iso_c", "iso_cts")
SLOW: dict[str, Callable[[Sequence[Any]], Any]] = {
    "tsv_m": reference.tsv_m,
    "iso_c": reference.iso_c,
    "iso_cts": lambda deltas: reference.iso_cts(deltas, 0.8),
}


def matrices(*shape: int, count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count + 1)]


def merged(name: str, base: Tensor, experts: Sequence[Tensor], **settings: Any) -> Tensor:
    method = merge_methods[name]
    by_task = {task: {"weight": expert} for task, expert in zip("abcdefgh", experts, strict=False)}
    found: Tensor = method.function({"weight": base}, by_task, **method.resolve(settings))["weight"]
    return found


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (10, 10)])
@pytest.mark.parametrize("name", SVD)
def test_svd_methods_equal_the_slow_reference(name: str, shape: tuple[int, int]) -> None:
    base, *experts = matrices(*shape)
    expected = base.numpy() + 0.7 * SLOW[name]([(expert - base).numpy() for expert in experts])
    np.testing.assert_allclose(
        merged(name, base, experts, scaling=0.7).numpy(), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", SVD)
def test_svd_methods_follow_changes_of_basis_and_not_the_order_of_experts(name: str) -> None:
    base, *experts = matrices(9, 14)
    left, right = (torch.linalg.qr(matrices(n, n, count=0, seed=n)[0])[0] for n in (9, 14))
    found = merged(name, base, experts)
    turned = merged(name, left @ base @ right, [left @ expert @ right for expert in experts])
    torch.testing.assert_close(turned, left @ found @ right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged(name, base, experts[::-1]), found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SVD)
def test_what_svd_methods_make_of_steps_of_low_rank_follows_from_these_alone(name: str) -> None:
    """Twins, adapters and experts that didn't move have null spaces, of which no vector may come in."""
    base, expert, other = matrices(8, 8, count=2)
    assert torch.equal(merged(name, base, [base, base]), base)
    twins = merged(name, base, [expert, expert])
    assert torch.isfinite(twins).all()
    thin = [base + torch.outer(*vectors) for vectors in zip(expert[:2], other[:2], strict=True)]
    change = (merged(name, base, thin) - base).numpy()
    assert np.linalg.matrix_rank(change, tol=1e-9) == 2
    spanned = np.linalg.matrix_rank(np.vstack([change, other[:2].numpy()]), tol=1e-9)
    assert spanned == 2  # its rows are the adapters' own


def test_one_experts_leading_share_is_what_twins_leave_of_tsv_m() -> None:
    base, expert = matrices(6, 9, count=1)
    u, s, vt = np.linalg.svd((expert - base).numpy(), full_matrices=False)
    expected = base.numpy() + (u[:, :3] * s[:3]) @ vt[:3]
    np.testing.assert_allclose(
        merged("tsv_m", base, [expert, expert]).numpy(), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", SVD)
def test_what_is_no_matrix_of_a_module_takes_the_mean_step(name: str) -> None:
    base, experts = states(merge_methods[name])
    found = apply(merge_methods[name], base, experts, scaling=0.5)
    for key in ("norm.weight", "blocks.1.up.bias", "class_token"):
        mean = sum(expert[key] - base[key] for expert in experts.values()) / 3
        torch.testing.assert_close(found[key], base[key] + 0.5 * mean)
    assert random_model(0).keys() == found.keys()
