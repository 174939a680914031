"""Architectures from folders, names and files: built without weights, refused by name where they are not
CLIP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import CheckpointError, DriftLensError, IncompatibleModelsError, SpecError
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.models.live import architecture_of
from tests.zoo.towers import (
    HF_VISION,
    OPEN_CLIP_CONFIG,
    hf_folder,
    hf_tower,
    open_clip_folder,
    open_clip_tower,
    open_clip_whole,
    pixels,
)
from tests.zoo.walking import chain_states


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return open_clip_folder(tmp_path_factory.mktemp("open_clip"))


def written(folder: Path, file: str, content: Any) -> str:
    (folder / file).write_text(json.dumps(content))
    return str(folder)


def feature(architecture: Architecture, weights: Path) -> torch.Tensor:
    source = architecture.align(open_checkpoint(weights))
    skeleton = architecture.skeleton
    skeleton.load_state_dict({key: source.read(key) for key in architecture.keys}, assign=True)
    return chain_states(architecture.chain, skeleton, pixels().float())[-1]["hidden"]


@TRANSFORMERS_CLIP
@pytest.mark.shows(files="hf-clip")
def test_a_transformers_folder_gives_the_librarys_features(hf: Path) -> None:
    from transformers import CLIPModel

    architecture = load_architecture("hf-clip", str(hf))
    with torch.no_grad():
        expected = CLIPModel.from_pretrained(hf).get_image_features(pixels().float()).pooler_output
    torch.testing.assert_close(feature(architecture, hf), expected, rtol=0, atol=1e-5)
    assert (architecture.loader, architecture.source, architecture.adapter) == (
        "hf-clip",
        str(hf),
        "hf_clip_vit",
    )
    assert architecture.notices == ()


@OPEN_CLIP
@pytest.mark.shows(files="open-clip")
def test_an_open_clip_folder_gives_the_librarys_features(open_clip: Path) -> None:
    from open_clip import create_model

    architecture = load_architecture("open-clip", str(open_clip))
    with torch.no_grad():
        expected = create_model(f"local-dir:{open_clip}").eval().encode_image(pixels().float())
    torch.testing.assert_close(feature(architecture, open_clip), expected, rtol=0, atol=1e-5)
    assert (architecture.adapter, architecture.notices) == ("open_clip_vit", ())
    assert architecture.preprocess is not None
    assert architecture.preprocess.settings["mean"] == [0.5, 0.4, 0.3]


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_open_clip_takes_a_folder_or_a_file_of_either_form(open_clip: Path, tmp_path: Path, prefix: str) -> None:
    expected = load_architecture("open-clip", f"{prefix}{open_clip}").chain.settings
    nested = load_architecture("open-clip", str(open_clip / "open_clip_config.json"))
    assert nested.chain.settings == expected and nested.notices == ()
    written(tmp_path, "model_config.json", OPEN_CLIP_CONFIG)
    plain = load_architecture("open-clip", str(tmp_path / "model_config.json"))
    assert plain.chain.settings == expected
    assert len(plain.notices) == 1 and "preprocess_cfg" in plain.notices[0]


def test_a_large_model_takes_no_memory() -> None:
    architecture = load_architecture("open-clip", "ViT-L-14-quickgelu")
    assert {parameter.device.type for parameter in architecture.skeleton.parameters()} == {"meta"}
    assert not architecture.skeleton.training
    assert len(architecture.chain.layers) == 26
    settings = architecture.chain.settings
    assert (settings["activation"], settings["num_heads"], settings["patch_size"]) == (
        "quick_gelu",
        16,
        [14, 14],
    )


def test_a_model_name_decides_between_gelu_and_quick_gelu() -> None:
    exact, quick = (load_architecture("open-clip", name).chain.settings for name in ("ViT-B/32", "ViT-B-32-quickgelu"))
    assert (exact["activation"], quick["activation"]) == ("gelu", "quick_gelu")


def test_buffers_of_a_skeleton_are_real(hf: Path) -> None:
    skeleton = load_architecture("hf-clip", str(hf)).skeleton
    buffers = dict(skeleton.named_buffers())
    assert buffers["vision_model.embeddings.position_ids"].tolist() == [list(range(17))]
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("named", "last"),
    [
        (["CLIPVisionModel"], "hidden_size"),
        (["CLIPVisionModelWithProjection"], "projection_dim"),
        (None, "projection_dim"),
    ],
    ids=["without_projection", "with_projection", "unnamed"],
)
def test_a_tower_alone_has_the_head_its_config_names(tmp_path: Path, named: list[str] | None, last: str) -> None:
    config = {"model_type": "clip_vision_model", **HF_VISION, **({"architectures": named} if named else {})}
    architecture = load_architecture("hf-clip", written(tmp_path, "config.json", config))
    projected = any("visual_projection" in key for key in architecture.keys)
    assert projected == (last == "projection_dim")
    assert "preprocessor_config.json" in architecture.notices[0]


def test_a_whole_clip_projects_to_its_own_width(tmp_path: Path) -> None:
    vision = {**HF_VISION, "projection_dim": 512}
    config = {"model_type": "clip", "projection_dim": 24, "vision_config": vision, "text_config": {}}
    architecture = load_architecture("hf-clip", written(tmp_path, "config.json", config))
    assert architecture.skeleton.visual_projection.weight.shape == (24, 32)


def test_eager_attention_is_not_taken_over(tmp_path: Path) -> None:
    config = {"model_type": "clip_vision_model", **HF_VISION, "_attn_implementation": "eager"}
    architecture = load_architecture("hf-clip", written(tmp_path, "config.json", config))
    assert architecture.skeleton.config._attn_implementation == "sdpa"


def hf_config(**content: Any) -> Callable[[Path], tuple[str, str]]:
    return lambda folder: ("hf-clip", written(folder, "config.json", content))


def open_clip_config(**content: Any) -> Callable[[Path], tuple[str, str]]:
    def write(folder: Path) -> tuple[str, str]:
        return "open-clip", str(Path(written(folder, "model_config.json", content)) / "model_config.json")

    return write


def named(loader: str, source: str) -> Callable[[Path], tuple[str, str]]:
    return lambda folder: (loader, source)


def broken(folder: Path) -> tuple[str, str]:
    (folder / "config.json").write_text("{")
    return "hf-clip", str(folder)


REFUSED: dict[str, tuple[Callable[[Path], tuple[str, str]], type[DriftLensError], str]] = {
    "no_such_folder": (named("hf-clip", "models/no/such"), SpecError, "neither a folder nor a Hub id"),
    "no_such_name": (named("open-clip", "ViT-Q-32"), SpecError, "neither a folder nor a Hub id"),
    "no_such_file": (named("open-clip", "models/config.json"), SpecError, "no open_clip_config.json"),
    "no_config": (lambda folder: ("hf-clip", str(folder)), SpecError, "no config.json"),
    "no_open_clip_config": (lambda folder: ("open-clip", str(folder)), SpecError, "no open_clip_config.json"),
    "broken_file": (broken, CheckpointError, "config.json can't be read"),
    "not_an_object": (
        lambda folder: ("hf-clip", written(folder, "config.json", [1])),
        CheckpointError,
        "no JSON object",
    ),
    "no_model_type": (hf_config(hidden_size=8), IncompatibleModelsError, "None model"),
    "nonsense_sizes": (
        hf_config(model_type="clip_vision_model", hidden_size="wide"),
        IncompatibleModelsError,
        "can't be used",
    ),
    "timm_by_name": (named("open-clip", "ViT-B-16-SigLIP"), IncompatibleModelsError, "timm trunk"),
    "eva_by_name": (named("open-clip", "EVA02-B-16"), IncompatibleModelsError, "timm trunk"),
    "resnet_by_name": (named("open-clip", "RN50"), IncompatibleModelsError, "ResNet"),
    "coca_by_name": (named("open-clip", "coca_ViT-B-32"), IncompatibleModelsError, "pools by attention"),
    "no_vision_section": (open_clip_config(embed_dim=8), IncompatibleModelsError, "vision_cfg"),
    "unknown_option": (
        open_clip_config(**{**OPEN_CLIP_CONFIG, "vision_cfg": {"depth": 3}}),
        IncompatibleModelsError,
        "can't be used",
    ),
}


BY_NAME = {
    "timm_by_name": "SigLIP (open_clip)",
    "eva_by_name": "EVA (open_clip)",
    "resnet_by_name": "ResNet (open_clip)",
    "coca_by_name": "CoCa (open_clip)",
}
"""Of which families these are the names of models."""


@pytest.mark.shows(files="refused")
@pytest.mark.parametrize(
    ("prepare", "error", "words"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.family(BY_NAME[name])] if name in BY_NAME else [])
        for name, case in REFUSED.items()
    ],
)
def test_what_is_no_clip_is_refused(
    tmp_path: Path,
    prepare: Callable[[Path], tuple[str, str]],
    error: type[DriftLensError],
    words: str,
) -> None:
    loader, source = prepare(tmp_path)
    with pytest.raises(error) as refusal:
        load_architecture(loader, source, access=Permissions(offline=True))
    assert words in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("build", "adapter"),
    [(open_clip_tower, "open_clip_vit"), (open_clip_whole, "open_clip_vit"), (hf_tower, "hf_clip_vit")],
    ids=["open_clip_tower", "open_clip_whole", "transformers"],
)
def test_live_modules_are_their_own_skeleton(build: Callable[[], nn.Module], adapter: str) -> None:
    module = build()
    architecture = architecture_of(module)
    assert architecture.skeleton is module
    assert (architecture.loader, architecture.adapter) == ("live", adapter)
    assert architecture.preprocess is None
