"""Folders that other tools merged models into, opened as `merged`: laid out as these tools write them."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from driftlens.jobs.study.opening import open_study
from driftlens.spec import load_spec
from tests.models.writing import write_mergekit
from tests.pipeline.fixtures import world
from tests.zoo.suite import CLASSES, PAIRS, Suite
from tests.zoo.world import World

__all__ = ["world"]

pytestmark = pytest.mark.slow
MERGEKIT = os.environ.get("DRIFTLENS_MERGEKIT") or shutil.which("mergekit-yaml")


def mean_of(*modules: nn.Module) -> nn.Module:
    """The last of the modules with the mean of all weights, as FusionBench's simple average leaves it."""
    states = [module.state_dict() for module in modules]
    modules[-1].load_state_dict({key: sum(state[key] for state in states) / len(states) for key in states[0]})
    return modules[-1]


def read(spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the chain reads of the merged model."""
    study, _ = open_study(load_spec(spec))
    source = study.pool.source("merged")
    return {key: source.read(key) for key in study.pool.chain.parameter_keys()}


@pytest.mark.parametrize("whole", [False, True])
def test_fusion_benchs_clip_folder_opens(whole: bool, world: World, tmp_path: pathlib.Path) -> None:
    """It writes `CLIPVisionModel`s, which have no projection, or `CLIPModel`s' towers; and no processor."""
    from transformers import CLIPVisionModel, CLIPVisionModelWithProjection

    kind = CLIPVisionModelWithProjection if whole else CLIPVisionModel
    folders = [world.weights(task, "hf") for task in world.tasks]
    mean_of(*(kind.from_pretrained(folder) for folder in folders)).save_pretrained(tmp_path / "merged")
    assert sorted(file.name for file in (tmp_path / "merged").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    spec = world.spec("hf", merge=None, merged={"weights": str(tmp_path / "merged")})
    found = read(spec)
    states = [load_file(folder / "model.safetensors") for folder in folders]
    if not whole:  # then it is the base's, whose projection the experts share
        base = load_file(world.weights("base", "hf") / "model.safetensors")
        states = [state | {"visual_projection.weight": base["visual_projection.weight"]} for state in states]
    seen = 0
    for key, value in found.items():
        ends = [name for name in states[0] if name.endswith(key.removeprefix("vision_model."))]
        if len(ends) == 1:
            torch.testing.assert_close(value, sum(state[ends[0]] for state in states) / 2)
            seen += 1
    assert seen > len(found) / 2


@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_fusion_benchs_language_models_open(form: str, tmp_path: pathlib.Path) -> None:
    """T5s without a tokenizer; decoders with one, and a card."""
    suite = Suite(form, tmp_path, learns=False)
    base = {key: value.clone() for key, value in suite.model.state_dict().items()}
    suite.model.load_state_dict({key: value + 0.25 for key, value in base.items()})
    suite.model.save_pretrained(tmp_path / "merged")
    if form == "decoder":
        suite.tokenizer.save_pretrained(tmp_path / "merged")
        (tmp_path / "merged" / "README.md").write_text("---\ntags:\n- fusion-bench\n---\n# Merged\n")
    spec = suite.spec({"free": suite.data("free", PAIRS)}) | {"merged": {"weights": str(tmp_path / "merged")}}
    found = read(spec)
    assert found and all(torch.equal(value, base[key] + 0.25) for key, value in found.items())


def test_mergekits_folder_opens(tmp_path: pathlib.Path) -> None:
    """As it lays it out; where mergekit is installed, one that it has written itself."""
    suite = Suite("decoder", tmp_path, learns=False)
    base = {key: value.clone() for key, value in suite.model.state_dict().items()}
    suite.model.load_state_dict({key: value + 0.25 for key, value in base.items()})
    suite.save("expert")
    (tmp_path / "laid").mkdir()
    state = {key: (value + 0.125).contiguous() for key, value in base.items()}
    write_mergekit(tmp_path / "laid", state)
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "laid" / "config.json")
    places = [tmp_path / "laid"]
    if MERGEKIT is not None:
        models = [
            {"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in ("base", "expert")
        ]
        recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
        (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        places.append(tmp_path / "theirs")
        subprocess.run(
            [MERGEKIT, str(tmp_path / "recipe.yml"), str(places[1]), "--quiet"], check=True, env=alone
        )
        assert (places[1] / "mergekit_config.yml").is_file()
    data = {"pick": suite.data("pick", [*CLASSES.items()])}
    for place in places:
        found = read(suite.spec(data) | {"merged": {"weights": str(place)}})
        assert found
        for key, value in found.items():
            torch.testing.assert_close(value, base[key] + 0.125)
