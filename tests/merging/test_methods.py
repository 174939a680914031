"""Every declared law of every merge method, names and dtypes, inputs untouched, parameters checked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from driftlens.errors import SpecError
from driftlens.merging.method import MergeMethod, merge_methods

Tensors = dict[str, Tensor]
Sides = tuple[Tensors, Tensors]
"""What a law says is the same."""


def random_state(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "linear.weight": torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "norm.weight": torch.randn(4, generator=generator, dtype=torch.float64),
    }


BASE = random_state(0)
EXPERTS = {task: random_state(seed) for seed, task in enumerate("abc", start=1)}


def expert_order_free(method: MergeMethod) -> Sides:
    return method.function(BASE, dict(reversed(EXPERTS.items()))), method.function(BASE, EXPERTS)


def equal_experts_are_fixed(method: MergeMethod) -> Sides:
    one = EXPERTS["a"]
    return method.function(BASE, {"x": one, "y": one, "z": one}), one


def zero_scaling_is_base(method: MergeMethod) -> Sides:
    return method.function(BASE, EXPERTS, scaling=0.0), BASE


def affine_in_scaling(method: MergeMethod) -> Sides:
    low, middle, high = (method.function(BASE, EXPERTS, scaling=scaling) for scaling in (0.2, 0.5, 0.8))
    return {name: (low[name] + high[name]) / 2 for name in BASE}, middle


def one_expert_at_scaling_one(method: MergeMethod) -> Sides:
    return method.function(BASE, {"a": EXPERTS["a"]}, scaling=1.0), EXPERTS["a"]


LAWS = {
    law.__name__: law
    for law in (
        expert_order_free,
        equal_experts_are_fixed,
        zero_scaling_is_base,
        affine_in_scaling,
        one_expert_at_scaling_one,
    )
}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-14)


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
    low, high = (merge_methods[name].function(BASE, EXPERTS, scaling=scaling) for scaling in (0.2, 0.8))
    assert not any(torch.allclose(low[key], high[key]) for key in BASE)


@pytest.mark.parametrize("name", merge_methods)
def test_names_shapes_and_dtypes_are_kept_and_inputs_untouched(name: str) -> None:
    base, experts = copy.deepcopy((BASE, EXPERTS))
    merged = merge_methods[name].function(base, experts)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in merged.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in BASE.items()
    }
    for key, tensor in BASE.items():
        assert torch.equal(base[key], tensor)
        assert all(torch.equal(experts[task][key], EXPERTS[task][key]) for task in EXPERTS)


def test_average_is_task_arithmetic_with_one_over_n() -> None:
    assert_same(
        merge_methods["average"].function(BASE, EXPERTS),
        merge_methods["task_arithmetic"].function(BASE, EXPERTS, scaling=1 / 3),
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
    with pytest.raises(SpecError, match="average, task_arithmetic") as caught:
        merge_methods["task_arithmetik"]
    assert "task_arithmetic" in caught.value.hint
