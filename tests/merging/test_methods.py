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
from driftlens.merging.method import merge_methods
from tests.merging.applying import LAWS, apply, assert_same, states
from tests.refusing import refusing


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
    has_scaling = "scaling" in settings_of(method.function).model_fields
    merge = method.with_settings({"scaling": scaling} if has_scaling else {})
    plan: Any = SimpleNamespace(control="baseline:x", calibrator=SimpleNamespace(anchor_reach=rho))
    manifest: Any = SimpleNamespace(merge=merge.record)
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


def test_an_unknown_method_names_those_there_are() -> None:
    with refusing(SpecError, match=", ".join(sorted(merge_methods)), hint="task_arithmetic"):
        merge_methods["task_arithmetik"]
