"""Bad input for every registered merge method: refused before anything is written, or merged as is stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from driftlens.merging.method import merge_methods
from driftlens.utils.registry import setting_schemas, settings_model
from tests.cli.conftest import Cli, Result
from tests.merging.applying import FEW
from tests.models.writing import train
from tests.quick import few
from tests.zoo.world import World, write_spec

# peft 0.21 asks transformers 5 for an attribute that this has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
Spec = dict[str, Any]
KEY = "transformer.resblocks.1.mlp.c_fc.weight"
"""Of the image tower, whose tensors lie in whole CLIPs behind `visual.`."""
FIRST, SECOND = "flowers", "shapes"
KINDS = ("average", "dare", "slerp", "ties", "wudi", "regmean", "adamerging")
"""By what methods read: entries, tensors, sites, moments, samples; one of two models alone, and one with a seed."""


def outside(name: str) -> list[tuple[str, object]]:
    """For every setting of a method a value that it doesn't take."""
    found: list[tuple[str, object]] = []
    for setting, schema in setting_schemas(settings_model(merge_methods[name].function)).items():
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        if schema["type"] == "number" and (low is None or "maximum" not in schema):
            found.append((setting, "inf"))
        if low is not None:
            found.append((setting, low - 1))
        if "maximum" in schema:
            found.append((setting, schema["maximum"] + 1))
        if "enum" in schema or schema["type"] == "boolean":
            found.append((setting, "purple"))
    return found


class Merging:
    """One method on the world's two experts, one of which a case spoils."""

    def __init__(self, name: str, world: World, folder: Path, run_cli: Cli) -> None:
        self.name, self.world, self.folder, self.run_cli = name, world, folder, run_cli
        self.few = FEW.get(name, {})

    def spec(self, **states: dict[str, Tensor]) -> Spec:
        """The world's spec, with some experts' weights replaced."""
        spec = self.world.spec()
        for task, state in states.items():
            save_file(state, self.folder / f"{task}-own.safetensors")
            spec["experts"][task] = {"weights": str(self.folder / f"{task}-own.safetensors")}
        return spec

    def run(self, spec: Spec, **settings: object) -> Result:
        file = write_spec(self.folder / "spec.yaml", spec)
        out = self.folder / "out.safetensors"
        out.unlink(missing_ok=True)
        given = [f"--set={key}={value}" for key, value in (self.few | settings).items()]
        return self.run_cli("merge", file, "--method", self.name, "--out", out, *given)

    def merged(self, spec: Spec, **settings: object) -> dict[str, Tensor]:
        done = self.run(spec, **settings)
        assert done.code == 0, done.err
        return load_file(self.folder / "out.safetensors")

    def refused(self, code: int, words: str, spec: Spec, **settings: object) -> None:
        before = {path.name for path in self.folder.iterdir()}
        done = self.run(spec, **settings)
        said = " ".join(done.err.split())
        assert (done.code, words in said) == (code, True), f"{settings}: {done.code} {said}"
        assert {path.name for path in self.folder.iterdir()} <= before | {"spec.yaml"}


@pytest.fixture(params=few(merge_methods, (), some=KINDS))
def merging(request: pytest.FixtureRequest, world: World, tmp_path: Path, run_cli: Cli) -> Merging:
    return Merging(request.param, world, tmp_path, run_cli)


def test_bad_weights_and_settings_are_refused_and_nothing_is_written(merging: Merging) -> None:
    state, entry = merging.world.state(FIRST), merge_methods[merging.name]
    without = {key: value for key, value in state.items() if key != f"visual.{KEY}"}
    merging.refused(4, KEY, merging.spec(flowers=without))
    more = {**state, "visual.extra": torch.ones(3)}
    merging.refused(4, "flowers-own.safetensors has 'extra'", merging.spec(flowers=more))
    for bad in (torch.nan, torch.inf):
        spoiled = state[f"visual.{KEY}"].clone()
        spoiled[3, 2] = bad
        spec = merging.spec(flowers={**state, f"visual.{KEY}": spoiled})
        merging.refused(4, "flowers-own.safetensors", spec)
        merging.refused(4, "NaN or infinite", spec)
    plain = merging.spec()
    merging.refused(2, "no parameter 'scalling'", plain, scalling=1)
    if "scaling" in settings_model(entry.function).model_fields:
        merging.refused(2, "scaling is 1000000000", plain, scaling="1e9")
    for name, value in outside(merging.name):
        merging.refused(2, f"{name} is ", plain, **{name: value})
    if entry.needs_samples:
        data = plain["data"]
        some = {**plain, "data": {key: value for key, value in data.items() if key != SECOND}}
        merging.refused(2, f"merge method '{merging.name}' needs calibration samples; shapes has none", some)
        none = {**plain, "data": {**data, "defaults": {**data["defaults"], "n": 0}}}
        merging.refused(2, "data.defaults.n", none)


def test_experts_of_other_dtypes_and_twins_are_merged(merging: Merging) -> None:
    """Everything is computed in float32 and written as the base is."""
    dtypes = {FIRST: torch.bfloat16, SECOND: torch.float16}
    own = {task: merging.world.state(task) for task in dtypes}
    half = {task: {key: value.to(dtypes[task]) for key, value in own[task].items()} for task in own}
    wide = {task: {key: value.float() for key, value in half[task].items()} for task in half}
    found, wanted = merging.merged(merging.spec(**half)), merging.merged(merging.spec(**wide))
    for key, value in wanted.items():
        assert found[key].dtype == torch.float32 and torch.equal(found[key], value)
    twins = merging.merged(merging.spec(flowers=own[SECOND]))
    assert all(torch.isfinite(value).all() for value in twins.values())
    if "equal_experts_are_fixed" in merge_methods[merging.name].laws:
        for key in (key for key in twins if key.startswith("visual.")):
            torch.testing.assert_close(twins[key], own[SECOND][key], rtol=1e-5, atol=1e-6)


def test_an_adapter_is_merged_as_the_model_that_it_makes(merging: Merging) -> None:
    from transformers import CLIPVisionModelWithProjection

    base = CLIPVisionModelWithProjection.from_pretrained(merging.world.weights("base", "hf"))
    found = []
    adapter, whole = merging.folder / "adapter", merging.folder / "whole.safetensors"
    state = train(base, adapter, r=2, lora_alpha=1, target_modules=["q_proj", "fc1"])
    save_file({key: value.contiguous() for key, value in state.items()}, whole)
    for weights in (adapter, whole):
        spec = merging.world.spec("hf")
        spec["experts"][FIRST] = {"weights": str(weights)}
        found.append(merging.merged(spec))
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=1e-5)
