"""The same tower under every name that checkpoints in the wild give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource
from driftlens.engine.pool import require_same_parameters
from driftlens.models.architecture import Architecture
from driftlens.utils.errors import IncompatibleModelsError
from tests.models.live import architecture_of
from tests.zoo.towers import hf_tower, hf_whole, open_clip_tower, open_clip_whole

Weights = dict[str, Tensor]


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda tower: {prefix + key: value for key, value in tower.items()}


def with_text(tower: Weights) -> Weights:
    whole = {f"visual.{key}": value for key, value in tower.items()}
    text = {"positional_embedding": torch.ones(8, 16), "transformer.resblocks.0.ln_1.weight": torch.ones(16)}
    return {**text, **whole, "logit_scale": torch.ones(())}


def task_vector_pickle(tower: Weights) -> Weights:
    whole = {f"model.visual.{key}": value for key, value in tower.items()}
    return {**whole, "model.positional_embedding": torch.ones(8, 16), "model.logit_scale": torch.ones(())}


OPEN_CLIP_FORMS: dict[str, Callable[[Weights], Weights]] = {
    "bare_tower": prefixed(""),
    "tower_of_a_whole_model": prefixed("visual."),
    "data_parallel": prefixed("module.visual."),
    "whole_model": with_text,
    "image_encoder_of_the_task_vector_suite": task_vector_pickle,
    "shuffled": lambda tower: dict(reversed(tower.items())),
}


def flat(tower: Weights) -> Weights:
    return {key.removeprefix("vision_model."): value for key, value in tower.items()}


def with_index_buffers(tower: Weights) -> Weights:
    text = {
        "text_model.embeddings.token_embedding.weight": torch.ones(16, 16),
        "text_model.embeddings.position_ids": torch.arange(8)[None],
        "logit_scale": torch.ones(()),
    }
    return {"vision_model.embeddings.position_ids": torch.arange(17)[None], **tower, **text}


HF_FORMS: dict[str, Callable[[Weights], Weights]] = {
    "nested": prefixed(""),
    "flat": flat,
    "whole_model_of_transformers_4": with_index_buffers,
    "data_parallel": prefixed("module."),
    "inside_another_model": prefixed("vision_tower."),
    "shuffled": lambda tower: dict(reversed(tower.items())),
}


def source(weights: Mapping[str, Tensor], name: str = "expert.safetensors") -> StateSource:
    return InMemorySource(name, weights)


def assert_holds(aligned: StateSource, module: nn.Module) -> None:
    wanted = module.state_dict()
    assert list(aligned.headers) == list(wanted)
    for key, value in wanted.items():
        assert aligned.headers[key].shape == tuple(value.shape)
        assert torch.equal(aligned.read(key), value)


@pytest.mark.parametrize("form", OPEN_CLIP_FORMS.values(), ids=OPEN_CLIP_FORMS)
def test_open_clips_tower_is_found_in(form: Callable[[Weights], Weights]) -> None:
    tower = open_clip_tower()
    assert_holds(architecture_of(tower).align(source(form(dict(tower.state_dict())))), tower)


@pytest.mark.parametrize("form", HF_FORMS.values(), ids=HF_FORMS)
@pytest.mark.parametrize("kind", ["CLIPVisionModelWithProjection", "CLIPVisionModel"])
def test_transformers_tower_is_found_in(kind: str, form: Callable[[Weights], Weights]) -> None:
    """Also where the skeleton has no projection and the file has one, which is then left out."""
    with_projection = hf_tower()
    skeleton = hf_tower(kind)
    inner = with_projection.vision_model if kind == "CLIPVisionModel" else with_projection
    skeleton.load_state_dict(inner.state_dict())
    assert_holds(architecture_of(skeleton).align(source(form(dict(with_projection.state_dict())))), skeleton)


@pytest.mark.parametrize("build", [open_clip_whole, hf_whole], ids=["open_clip", "transformers"])
def test_whole_models_keep_their_own_names(build: Callable[[], nn.Module]) -> None:
    module = build()
    architecture = architecture_of(module)
    aligned = architecture.align(source(dict(module.state_dict())))
    assert set(architecture.chain.parameter_keys()) == set(aligned.headers)
    assert all(torch.equal(aligned.read(key), module.state_dict()[key]) for key in aligned.headers)


TOWERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "open_clip": (open_clip_tower, "proj"),
    "transformers": (hf_tower, "visual_projection.weight"),
}


@pytest.mark.parametrize(("build", "projection"), TOWERS.values(), ids=TOWERS)
def test_a_missing_projection_comes_from_the_base_and_nothing_else_does(
    build: Callable[[], nn.Module], projection: str
) -> None:
    base, expert = build(), build()
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.mul_(2)
    saved = {key: value for key, value in expert.state_dict().items() if key != projection}
    architecture = architecture_of(base)
    with pytest.raises(IncompatibleModelsError, match="lacks the projection"):
        architecture.align(source(saved))
    whole_base = source({f"module.{key}": value for key, value in base.state_dict().items()}, "base")
    aligned = architecture.align(source(saved), fallback=whole_base)
    assert set(aligned.headers) == set(architecture.keys)
    for key, value in expert.state_dict().items():
        assert torch.equal(aligned.read(key), base.state_dict()[key] if key == projection else value)
    assert aligned.name == "expert.safetensors"


def test_the_fallback_gives_no_other_tensor() -> None:
    tower = hf_tower()
    saved = dict(tower.state_dict())
    del saved["vision_model.encoder.layers.1.mlp.fc1.bias"]
    architecture = architecture_of(tower)
    aligned = architecture.align(source(saved), fallback=source(dict(tower.state_dict())))
    with pytest.raises(IncompatibleModelsError, match=r"layers\.1\.mlp\.fc1\.bias"):
        require_same_parameters(tower, architecture.chain, aligned)


@pytest.mark.parametrize(("build", "projection"), TOWERS.values(), ids=TOWERS)
def test_a_deeper_tower_is_not_cut_to_fit(build: Callable[..., nn.Module], projection: str) -> None:
    shallow = build()
    deep = open_clip_tower(layers=4) if build is open_clip_tower else hf_tower(num_hidden_layers=4)
    architecture = architecture_of(shallow)
    with pytest.raises(IncompatibleModelsError, match=r"(resblocks|layers)\.3"):
        require_same_parameters(shallow, architecture.chain, architecture.align(source(dict(deep.state_dict()))))


def test_quantised_weights_stay_to_be_refused() -> None:
    tower = hf_tower()
    saved = dict(tower.state_dict())
    saved["vision_model.encoder.layers.0.mlp.fc1.weight"] = torch.ones(64, 32, dtype=torch.int8)
    architecture = architecture_of(tower)
    with pytest.raises(IncompatibleModelsError, match="int8"):
        require_same_parameters(tower, architecture.chain, architecture.align(source(saved)))


def open_clip() -> Architecture:
    return architecture_of(open_clip_tower())


def transformers() -> Architecture:
    return architecture_of(hf_tower())


REFUSED: dict[str, tuple[Callable[[], Architecture], list[str], str]] = {
    "timm": (open_clip, ["visual.trunk.patch_embed.proj.weight"], "timm trunk"),
    "coca": (open_clip, ["visual.class_embedding", "visual.attn_pool.query"], "attention-pooled"),
    "resnet": (open_clip, ["visual.conv1.weight", "visual.attnpool.q_proj.weight"], "ResNet"),
    "transformers_file_for_open_clip": (open_clip, ["vision_model.embeddings.class_embedding"], "hf-clip"),
    "text_model_for_open_clip": (open_clip, ["transformer.resblocks.0.ln_1.weight"], "no key that ends in"),
    "siglip": (
        transformers,
        ["vision_model.embeddings.patch_embedding.weight", "vision_model.head.probe"],
        "SigLIP",
    ),
    "blip": (
        transformers,
        ["vision_model.embeddings.class_embedding", "vision_model.encoder.layers.0.self_attn.qkv.weight"],
        "BLIP",
    ),
    "open_clip_file_for_transformers": (
        transformers,
        ["visual.transformer.resblocks.0.ln_1.weight"],
        "open-clip",
    ),
    "two_towers": (
        transformers,
        ["a.embeddings.class_embedding", "b.embeddings.class_embedding"],
        "2 keys that end in",
    ),
    "another_model": (transformers, ["model.layers.0.mlp.gate_proj.weight"], "no key that ends in"),
}


@pytest.mark.parametrize(("architecture", "keys", "words"), REFUSED.values(), ids=REFUSED)
def test_other_checkpoints_are_refused_by_name(
    architecture: Callable[[], Architecture], keys: list[str], words: str
) -> None:
    with pytest.raises(IncompatibleModelsError) as refusal:
        architecture().align(source({key: torch.ones(1) for key in keys}, "models/cars.safetensors"))
    assert words in str(refusal.value)
    assert "models/cars.safetensors" in refusal.value.message
    assert refusal.value.hint
