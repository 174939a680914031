"""Merge methods on files: in both libraries' forms, what preflight says of them, and without scores."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import driftlens as dl
from driftlens.base.errors import SpecError
from driftlens.merging.method import merge_methods
from tests.merging.applying import FEW
from tests.pipeline.checking import check, found
from tests.pipeline.fixtures import spec_file, world
from tests.zoo.towers import under_transformers_names
from tests.zoo.world import World, tower

__all__ = ["spec_file", "world"]

DROPPING = {"ties": {"trim_scope": "per_tensor", "drop_rate": 0.5}}
"""Settings with which more depends on what counts as one tensor."""


@pytest.mark.parametrize("name", merge_methods)
def test_both_libraries_forms_of_one_model_are_merged_to_one_network(
    name: str, world: World, tmp_path: pathlib.Path
) -> None:
    saved = {}
    for form in ("open_clip", "hf"):
        file = tmp_path / f"{form}.safetensors"
        dl.merge(world.spec(form), out=file, method=name, parameters=(FEW | DROPPING).get(name, {}))
        saved[form] = load_file(file)
    expected = under_transformers_names(tower(saved["open_clip"]))
    assert expected.keys() == saved["hf"].keys()
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        # The two libraries' features differ by rounding, which short directions of few tokens make visible.
        torch.testing.assert_close(saved["hf"][key], value, rtol=1e-3, atol=1e-4)


def test_preflight_plans_what_methods_cost_and_refuses_one_without_scores(
    world: World, tmp_path: pathlib.Path
) -> None:
    def text(name: str, **settings: Any) -> str:
        return found(check(world.spec(merge={"method": name, **settings})), "ok", "merge").text

    assert "AdaMerging (arXiv:2310.02575)" in text("adamerging") and "models run" in text("adamerging")
    assert "models run" not in text("iso_c") and "merges all else" not in text("iso_c")
    few, many = (
        check(world.spec(merge={"method": "wudi", "steps": steps}), estimate=True).cost
        for steps in (1, 10**6)
    )
    assert few is not None and many is not None and many.seconds > 2 * few.seconds
    spec = world.spec(merge={"method": "fisher"}, heads=None)
    assert "there is none of" in found(check(spec), "problem", "merge").text
    with pytest.raises(SpecError, match="reads the score map"):
        dl.merge(world.spec(heads=None), out=tmp_path / "x.safetensors", method="fisher")
    assert not list(tmp_path.iterdir())
