"""Families of models as people bring them: taken apart exactly, with what of them is solved for, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.sites import parameter_coverage, select_sites
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import pool_features
from driftlens.models.tracing.block_call import first_tensor
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.live_families import FAMILIES, Family, batch
from tests.zoo.walking import assert_close, plain_forward, walk


@pytest.fixture(params=[family.param(name) for name, family in FAMILIES.items()])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


def models(family: Family) -> dict[str, nn.Module]:
    """Base, merged model and expert, which differ in their running statistics too."""
    base = with_seed(family.build)().double().eval()
    found = {name: perturbed(base, seed) for name, seed in (("base", 0), ("merged", 1), ("expert", 2))}
    generator = torch.Generator().manual_seed(4)
    for module in found.values():
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.mul_(1 + 0.1 * torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype))
    return found


def arguments(family: Family, given: dict[str, nn.Module], inputs: Any) -> dict[str, Any]:
    return {
        "base": given["base"],
        "merged": given["merged"],
        "experts": {"task": given["expert"]},
        "data": {"task": [inputs] if isinstance(inputs, dict) else inputs},
        "blocks": family.blocks,
    }


def plain(module: nn.Module, inputs: Any) -> Tensor:
    """What a copy returns by itself; fused experts of a mixture know no float64."""
    module = copy.deepcopy(module)
    if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
        module.set_experts_implementation("eager")
    return first_tensor(plain_forward(module, inputs))


def test_a_family_is_taken_apart_and_says_how_much_of_it_is_solved_for(family: Family) -> None:
    given, inputs = models(family), batch(family, 3)
    if family.refused:
        with pytest.raises(Exception, match=family.refused):
            dl.analyze(**arguments(family, given, inputs))
        return
    chain = sequential_chain(given["base"], inputs, blocks=family.blocks)
    assert chain.settings["blocks"] == family.found
    states = walk(chain, given["expert"], inputs)[1:]
    for state, wanted in zip(states, chain.library_states(given["expert"], inputs), strict=True):
        assert_close(state["hidden"], wanted["hidden"])
    assert [pool_features(state["hidden"], "mean").shape[1] for state in states[:-1]] == list(family.widths)
    features = plain(given["expert"], inputs)
    assert_close(states[-1]["hidden"].flatten(1), features.flatten(1))
    update = ("linear", "bias", "norm")
    share, text = parameter_coverage(chain, module_source(given["base"], "base"), select_sites(chain), update)
    assert int(100 * share) == family.of_blocks
    for words in family.left_alone:
        assert words in text


@pytest.mark.slow
def test_a_family_is_measured_and_calibrated(family: Family, tmp_path: Path) -> None:
    if family.refused:
        return
    passed = arguments(family, models(family), batch(family, 12))
    jacobian = JacobianSettings(samples=2)
    run = dl.analyze(out=tmp_path / "run", progress="none", jacobian=jacobian, **passed)
    rows = run.layers(variant="merged")
    assert rows["closure_error"].max() < 1e-10
    if family.is_smooth:
        assert rows["final_share"].sum() + rows["remainder_share"].max() == pytest.approx(1)
    else:
        assert any("can't be differentiated" in text for text in run.manifest.notices)
        assert rows["final_share"].isna().all() and rows["prefix_share"].sum() == pytest.approx(1)
    fitted = dl.FeatCal(lam=1e-3, rho=1.0, alpha=1.0).fit(**passed)
    history = fitted.history_
    assert (history["objective_after"] <= history["objective_before"] * (1 + 1e-9)).all()
    assert family.of_blocks == 100 or any("of the blocks' parameters" in text for text in fitted.notices_)
    before = passed["merged"].state_dict()
    for name, value in fitted.model_.state_dict().items():
        assert value.shape == before[name].shape and bool(value.isfinite().all())
