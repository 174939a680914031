"""Models written back: what was changed arrives where the original library looks for it, and nothing else
moves."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError, RunError, SpecError
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import StateSource, TensorsSource, module_source
from driftlens.models.architecture import Architecture, architecture_of, load_architecture
from driftlens.models.chain import fused
from driftlens.models.saving import Patched, save_model
from tests.refusing import refusing
from tests.zoo.towers import hf_folder, hf_tower, open_clip_folder, open_clip_tower, pixels
from tests.zoo.walking import chain_states, parameters

FOLDERS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "hf-clip": hf_folder,
    "open-clip": open_clip_folder,
}


@pytest.fixture(scope="module", params=FOLDERS)
def base_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return FOLDERS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def architecture(base_folder: pathlib.Path) -> Architecture:
    return load_architecture(base_folder.name, str(base_folder))


def doubled(architecture: Architecture, base: StateSource) -> StateSource:
    """Every parameter of the image tower times two, set layer by layer."""
    tower = architecture.align(base)
    weights = {key: tower.read(key) for key in tower.headers}
    changes = {
        (layer.index, name): 2 * value
        for layer in architecture.chain.layers
        for name, value in parameters(layer, weights).items()
    }
    return Patched(tower, fused(architecture.chain, changes, tower))


def test_rows_that_are_not_given_stay_those_of_the_start() -> None:
    module = open_clip_tower()
    source = module_source(module, "merged")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    key = "transformer.resblocks.1.attn.in_proj_weight"
    back = fused(
        architecture_of(module).chain,
        {
            (3, "attn.k_proj.weight"): torch.full((32, 32), 7.0),
            (5, "proj.weight"): torch.ones(8, 32).cumsum(1),
        },
        source,
    )
    assert back.keys() == {key, "proj"}
    assert (back[key][32:64] == 7).all()
    assert torch.equal(back[key][:32], before[key][:32]) and torch.equal(back[key][64:], before[key][64:])
    assert back[key].dtype == torch.float64
    assert torch.equal(back["proj"][:, 0], torch.arange(1.0, 33, dtype=torch.float64))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_state_dict_keeps_the_bases_names_and_what_else_it_holds(
    architecture: Architecture, base_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    plain = open_checkpoint(base_folder)
    base = TensorsSource("base", {f"module.{key}": plain.read(key).half() for key in plain.headers})
    save_model(
        architecture, base, doubled(architecture, base), tmp_path / "out.safetensors", metadata={"by": "test"}
    )
    saved = load_file(tmp_path / "out.safetensors")
    assert saved.keys() == base.headers.keys()
    tower = ("module.visual.", "module.vision_model.", "module.visual_projection.")
    assert any(key.startswith(tower) for key in saved) and not all(key.startswith(tower) for key in saved)
    for key, value in saved.items():
        expected = base.read(key) * (2 if key.startswith(tower) else 1)
        assert value.dtype == torch.float16 and torch.equal(value, expected), key


def expected_feature(architecture: Architecture, model: StateSource) -> Tensor:
    module = architecture.skeleton
    module.load_state_dict({key: model.read(key) for key in architecture.keys}, assign=True)
    return chain_states(architecture.chain, module, pixels().float())[-1]["hidden"]


def test_a_folder_of_transformers_may_hold_the_tower_alone(tmp_path: pathlib.Path) -> None:
    from transformers import CLIPVisionModelWithProjection

    module = hf_tower().float()
    module.save_pretrained(tmp_path / "base")
    architecture = load_architecture("hf-clip", str(tmp_path / "base"))
    base = open_checkpoint(tmp_path / "base")
    model = doubled(architecture, base)
    save_model(architecture, base, model, tmp_path / "out")
    with torch.no_grad():
        found = CLIPVisionModelWithProjection.from_pretrained(tmp_path / "out")(pixels().float()).image_embeds
    torch.testing.assert_close(found, expected_feature(architecture, model), rtol=1e-5, atol=1e-5)
    processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": 16, "width": 16}


def test_a_part_of_an_open_clip_model_makes_no_folder(tmp_path: pathlib.Path) -> None:
    folder = open_clip_folder(tmp_path / "base")
    architecture, whole = load_architecture("open-clip", str(folder)), open_checkpoint(folder)
    tower = TensorsSource(
        "tower", {key: whole.read(key) for key in whole.headers if key.startswith("visual.")}
    )
    with pytest.raises(SpecError, match="only a part of the model"):
        save_model(architecture, tower, doubled(architecture, tower), tmp_path / "out")
    save_model(architecture, tower, doubled(architecture, tower), tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out.safetensors"]


def test_a_live_model_is_saved_as_a_state_dict_only(tmp_path: pathlib.Path) -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    architecture = architecture_of(module, torch.ones(2, 4))
    source = module_source(module, "base")
    with pytest.raises(SpecError, match="only be saved as a state dict"):
        save_model(architecture, source, doubled(architecture, source), tmp_path / "out")
    save_model(architecture, source, doubled(architecture, source), tmp_path / "out.safetensors")
    saved = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(value, 2 * module.state_dict()[key]) for key, value in saved.items())
    assert len(saved) == 6


def test_a_model_with_a_hole_is_not_saved(
    architecture: Architecture, base_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    base = open_checkpoint(base_folder)
    tower = architecture.align(base)
    key = architecture.chain.parameter_keys()[5]
    holed = TensorsSource("calibrated", {name: tower.read(name) for name in tower.headers if name != key})
    with refusing(IncompatibleModelsError, key, match="calibrated lacks"):
        save_model(architecture, base, holed, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_overwritten(
    architecture: Architecture, base_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    base = open_checkpoint(base_folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(RunError):
        save_model(architecture, base, doubled(architecture, base), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
