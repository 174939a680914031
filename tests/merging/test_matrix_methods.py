"""Methods that take a linear module as a matrix: against a slow reference, and what holds for all matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from driftlens.merging.method import merge_methods
from tests.merging.applying import (
    apply,
    calibration_images,
    random_model,
    stacks,
    states,
)
from tests.reference import matrix_merging as reference

SVD = ("tsv_m", "iso_c")
SLOW: dict[str, Callable[[Sequence[Any]], Any]] = {
    "tsv_m": reference.tsv_m,
    "iso_c": reference.iso_c,
}


def matrices(*shape: int, count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count + 1)]


def merged(name: str, base: Tensor, experts: Sequence[Tensor], **settings: Any) -> Tensor:
    method = merge_methods[name]
    by_task = {task: {"weight": expert} for task, expert in zip("abcdefgh", experts, strict=False)}
    found: Tensor = method.function({"weight": base}, by_task, **method.with_settings(settings).settings)["weight"]
    return found


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (10, 10)])
@pytest.mark.parametrize("name", SVD)
def test_svd_methods_equal_the_slow_reference(name: str, shape: tuple[int, int]) -> None:
    base, *experts = matrices(*shape)
    expected = base.numpy() + 0.7 * SLOW[name]([(expert - base).numpy() for expert in experts])
    np.testing.assert_allclose(merged(name, base, experts, scaling=0.7).numpy(), expected, rtol=1e-9, atol=1e-9)


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
    np.testing.assert_allclose(merged("tsv_m", base, [expert, expert]).numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SVD)
def test_what_is_no_matrix_of_a_module_takes_the_mean_step(name: str) -> None:
    base, experts = states(merge_methods[name])
    found = apply(merge_methods[name], base, experts, scaling=0.5)
    for key in ("norm.weight", "blocks.1.up.bias", "class_token"):
        mean = sum(expert[key] - base[key] for expert in experts.values()) / 3
        torch.testing.assert_close(found[key], base[key] + 0.5 * mean)
    assert random_model(0).keys() == found.keys()


def grams(count: int, width: int, rows: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    inputs = [matrices(rows, width, count=0, seed=10 + task)[0] for task in range(count)]
    return inputs, {task: x.mT @ x / len(x) for task, x in zip("abc", inputs, strict=False)}


def test_regmean_solves_its_normal_equations_and_leaves_the_mean_where_no_input_reaches() -> None:
    _, *experts = matrices(5, 8)
    by_task = {task: {"weight": expert} for task, expert in zip("abc", experts, strict=True)}
    inputs, moments = grams(3, 8, 40)
    regmean = merge_methods["regmean"].function
    for keep in (0.95, 1.0):
        found = regmean(by_task["a"], by_task, moments, off_diagonal=keep)["weight"]
        expected = reference.regmean([e.numpy() for e in experts], [x.numpy() for x in inputs], keep)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)
    residual = sum((found - expert) @ moments[task] for task, expert in zip("abc", experts, strict=True))
    assert residual.abs().max() < 1e-12

    dead = {task: gram.clone() for task, gram in moments.items()}
    for gram in dead.values():
        gram[:, 3], gram[3] = 0, 0
    found = regmean(by_task["a"], by_task, dead, off_diagonal=0.95)["weight"]
    torch.testing.assert_close(found[:, 3], torch.stack(experts).mean(dim=0)[:, 3])
    assert torch.isfinite(found).all()


def test_wudi_descends_as_published() -> None:
    base, *experts = matrices(6, 9)
    base, experts = base / 100, [base / 100 + expert / 1000 for expert in experts]
    deltas = [expert - base for expert in experts]
    found = merged("wudi", base, experts, steps=40, learning_rate=1e-5) - base
    torch.testing.assert_close(found, reference.wudi(deltas, 40, 1e-5), rtol=1e-9, atol=1e-12)
    assert reference.interference(found, deltas) < reference.interference(sum(deltas), deltas)
    assert torch.equal(merged("wudi", base, [base, base]), base)


@pytest.mark.parametrize("factor", [2.0**-13, 2.0**5])
def test_wudis_own_rate_descends_as_far_whatever_the_size_of_the_task_vectors(factor: float) -> None:
    base, *experts = (matrix.float() for matrix in matrices(48, 64))
    deltas = [0.01 * (expert - base) for expert in experts]
    steps = [merged("wudi", 0 * base, [size * delta for delta in deltas]) for size in (1.0, factor)]
    assert torch.equal(steps[1], factor * steps[0])
    losses = [float(reference.interference(at, deltas)) for at in (sum(deltas), steps[0])]
    assert losses[1] < 0.1 * losses[0]
    # Where no expert has a say the sum of the task vectors stays.
    narrow = [torch.cat([delta, 0 * delta], dim=1) for delta in deltas]
    wide = merged("wudi", torch.cat([base, base], dim=1) * 0, narrow)
    assert float(wide[:, 64:].abs().max()) < 1e-6


def test_moments_are_those_of_each_experts_own_forward_and_of_the_merged_prefix() -> None:
    base, experts = stacks()
    by_task = {task: random_model(seed) for seed, task in enumerate("abc", start=1)}
    images = calibration_images()
    inputs = {task: reference.heard(expert, images) for task, expert in experts.items()}
    plain = apply(merge_methods["regmean"], random_model(0), by_task)
    for name, part in base.named_modules():
        weight = f"{name}.weight"
        if name == "norm" or weight not in plain or name == "patches":
            continue
        theirs = [by_task[task][weight].double().numpy() for task in by_task]
        rows = [inputs[task][name].astype(np.float64) for task in by_task]
        if isinstance(part, torch.nn.Linear):
            np.testing.assert_allclose(plain[weight], reference.regmean(theirs, rows, 0.95), rtol=1e-3, atol=1e-4)

    found = apply(merge_methods["regmean_pp"], random_model(0), by_task)
    expected = reference.regmean_pp(experts, images, 0.95).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found["blocks.2.up.weight"], plain["blocks.2.up.weight"], atol=1e-2)
