"""Every declared law of every merge method, names and dtypes, inputs untouched, parameters checked."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from driftlens.base.errors import SpecError
from driftlens.base.settings import settings_of
from driftlens.jobs.calibrate.job import _anchor
from driftlens.merging.method import MergeMethod, merge_methods
from tests.merging.applying import Tensors, apply, states

Sides = tuple[Tensors, Tensors]
"""What a law says is the same."""


def expert_order_free(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, dict(reversed(experts.items()))), apply(method, base, experts)


def equal_experts_are_fixed(method: MergeMethod) -> Sides:
    base, experts = states(method)
    one = experts["a"]
    return apply(method, base, dict.fromkeys(experts, one)), one


def zero_scaling_is_base(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, experts, scaling=0.0), base


def affine_in_scaling(method: MergeMethod) -> Sides:
    base, experts = states(method)
    low, middle, high = (apply(method, base, experts, scaling=scaling) for scaling in (0.2, 0.5, 0.8))
    return {name: (low[name] + high[name]) / 2 for name in base}, middle


def one_expert_at_scaling_one(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, {"a": experts["a"]}, scaling=1.0), experts["a"]


def one_expert_is_fixed(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, {"a": experts["a"]}), experts["a"]


def experts_at_base(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, dict.fromkeys(experts, base)), base


def homogeneous(method: MergeMethod) -> Sides:
    """Task vectors twice as long make a step twice as long."""
    base, experts = states(method)
    longer = {
        task: {name: 2 * expert[name] - start for name, start in base.items()}
        for task, expert in experts.items()
    }
    merged = apply(method, base, experts)
    return apply(method, base, longer), {name: 2 * merged[name] - start for name, start in base.items()}


def unbiased_over_masks(method: MergeMethod) -> Sides:
    """Of one expert at scaling 1 the mean over seeds is the expert: within 6 standard errors, everywhere."""
    base, experts = states(method)
    one = {"a": experts["a"]}
    drawn = [apply(method, base, one, scaling=1.0, seed=seed) for seed in range(400)]
    beyond = {}
    for name in base:
        merged = torch.stack([each[name] for each in drawn])
        error = merged.std(dim=0) / len(drawn) ** 0.5
        beyond[name] = ((merged.mean(dim=0) - one["a"][name]).abs() > 6 * error).to(base[name])
    return beyond, {name: torch.zeros_like(value) for name, value in base.items()}


LAWS = {
    law.__name__: law
    for law in (
        experts_at_base,
        homogeneous,
        unbiased_over_masks,
        expert_order_free,
        equal_experts_are_fixed,
        zero_scaling_is_base,
        affine_in_scaling,
        one_expert_at_scaling_one,
        one_expert_is_fixed,
    )
}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        # Whole models are merged in float32.
        tolerance = (1e-12, 1e-14) if wanted[name].dtype == torch.float64 else (1e-5, 1e-6)
        torch.testing.assert_close(found[name], wanted[name], rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize(
    ("name", "law"), [(name, law) for name in merge_methods for law in sorted(merge_methods[name].laws)]
)
def test_declared_law_holds(name: str, law: str) -> None:
    found, wanted = LAWS[law](merge_methods[name])
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "name", [name for name in merge_methods if "affine_in_scaling" in merge_methods[name].laws]
)
def test_scaling_that_is_affine_is_not_ignored(name: str) -> None:
    base, experts = states(merge_methods[name])
    low, high = (apply(merge_methods[name], base, experts, scaling=scaling) for scaling in (0.2, 0.8))
    assert not any(torch.allclose(low[key], high[key]) for key in base)


@pytest.mark.parametrize("name", merge_methods)
def test_names_shapes_and_dtypes_are_kept_and_inputs_untouched(name: str) -> None:
    given = states(merge_methods[name])
    base, experts = copy.deepcopy(given)
    merged = apply(merge_methods[name], base, experts)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in merged.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in given[0].items()
    }
    for key, tensor in given[0].items():
        assert torch.equal(base[key], tensor)
        assert all(torch.equal(experts[task][key], given[1][task][key]) for task in experts)


@pytest.mark.parametrize("name", merge_methods)
def test_every_method_has_words_for_an_anchor_that_hold(name: str) -> None:
    """Where they name a scaling, merging with it is that anchor."""
    method, rho, scaling = merge_methods[name], 1.5, 0.4
    has_scaling = "scaling" in {setting.name for setting in settings_of(method.function)}
    settings = method.resolve({"scaling": scaling} if has_scaling else {})
    plan: Any = SimpleNamespace(control="baseline:x", hyperparameters={"rho": rho})
    manifest: Any = SimpleNamespace(merge=method.record(settings))
    (words,) = _anchor(plan, manifest)
    assert "the anchor is base + 1.5 (merged - base)" in words and method.title in words
    if "with scaling 0.6 in place of 0.4" in words:
        base, experts = states(method)
        merged = apply(method, base, experts, scaling=scaling)
        anchor = {key: base[key] + rho * (merged[key] - base[key]) for key in base}
        assert_same(apply(method, base, experts, scaling=rho * scaling), anchor)
    else:
        assert "1.5 times the step" in words


def test_average_is_task_arithmetic_with_one_over_n() -> None:
    base, experts = states(merge_methods["average"])
    assert_same(
        merge_methods["average"].function(base, experts),
        merge_methods["task_arithmetic"].function(base, experts, scaling=1 / 3),
    )


def test_task_arithmetic_by_hand() -> None:
    base, experts = (
        {"w": torch.tensor([1.0])},
        {"a": {"w": torch.tensor([3.0])}, "b": {"w": torch.tensor([0.0])}},
    )
    assert merge_methods["task_arithmetic"].function(base, experts, scaling=0.5)["w"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"scalling": 0.3}, "no parameter 'scalling'"),
        ({"scaling": "big"}, "finite number"),
        ({"scaling": float("nan")}, "finite"),
    ],
    ids=["unknown_parameter", "text", "nan"],
)
def test_bad_parameters_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        merge_methods["task_arithmetic"].resolve(parameters)


def test_an_unknown_method_names_those_there_are() -> None:
    with pytest.raises(SpecError, match=", ".join(sorted(merge_methods))) as caught:
        merge_methods["task_arithmetik"]
    assert "task_arithmetic" in caught.value.hint
