"""CLIP of transformers: the adapter of its image tower, and its loader from folders and Hub ids.

The tower is `CLIPVisionModel`, with or without projection, or part of a whole `CLIPModel`. Layer paths:
`vision_model.embeddings` for the stem, `vision_model.encoder.layers.j` for blocks, `vision_model.post_layernorm` for
the head. `CLIPVisionModel` of transformers 5.6 and later has no inner `vision_model`, and neither have its keys and
paths; the structure of a module shows its layout.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.alignment import TowerKeyLayout
from driftlens.checkpoints.loading import (
    TOKENIZERS,
    image_processor_config,
    tokenizer_in,
)
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.models.architecture import (
    Architecture,
    ArchitectureRequest,
    FolderFormat,
    loaders,
    no_text_tower,
    read_text_side,
    weightless,
)
from driftlens.models.architectures.hf_auto import read_plain_config
from driftlens.models.architectures.vit import ClipViT
from driftlens.models.chain import Slot, adapters
from driftlens.models.heads import TextTower
from driftlens.models.preprocessing import hf_preprocess
from driftlens.utils.errors import SpecError

_LAYOUT = TowerKeyLayout(
    loader="hf-clip",
    anchor="embeddings.class_embedding",
    tower="vision_model.",
    projection="visual_projection.weight",
)

log = logging.getLogger("driftlens")


_BLOCK_SITES = (
    *("layer_norm1", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    *("layer_norm2", "mlp.fc1", "mlp.fc2"),
)
_BLOCK_KEYS = tuple(f"{site}.{part}" for site in _BLOCK_SITES for part in ("weight", "bias"))


def _refusal(module: nn.Module, tower: nn.Module) -> str | None:
    """Return the reason why a model is not supported."""
    return f"{type(module).__name__} ends in a classifier" if hasattr(module, "classifier") else None


HF_CLIP_VIT = ClipViT(
    name="hf_clip_vit",
    layout=_LAYOUT,
    library="transformers",
    supported="CLIPVisionModel, CLIPVisionModelWithProjection and CLIPModel",
    inner="vision_model",
    blocks="encoder.layers",
    holds=("encoder.layers", "vision_model.encoder.layers"),
    attention="self_attn",
    activation="mlp.activation_fn",
    image_size="embeddings.image_size",
    # `CLIPModel.forward` requires texts as well.
    entry="get_image_features",
    projects_inside=False,
    embeddings=(
        "embeddings.patch_embedding.weight",
        "embeddings.class_embedding",
        "embeddings.position_embedding.weight",
    ),
    # Misspelled in the library.
    stem_norm="pre_layrnorm",
    block_sites=_BLOCK_SITES,
    block_arguments=(None,),  # no attention mask
    head_norm="post_layernorm",
    projection="visual_projection",
    required=frozenset(_BLOCK_KEYS),
    refusal=_refusal,
    unpack=lambda block: (block, {key: Slot(key) for key in _BLOCK_KEYS}),
)
adapters.register(HF_CLIP_VIT.name)(HF_CLIP_VIT)


@loaders.register("hf-clip")
def _load_hf_clip(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a CLIP, or a CLIP image tower, of transformers; its source is a folder or Hub id."""
    source, offline = request.source, request.access.offline
    config = read_plain_config(request, "hf-clip")
    skeleton = _skeleton(config, source)
    size = skeleton.config.image_size
    preprocess = hf_preprocess(image_processor_config(source, offline=offline), (size, size), source)

    return Architecture(
        loader="hf-clip",
        source=source,
        skeleton=skeleton,
        chain=HF_CLIP_VIT.chain(skeleton),
        layout=_LAYOUT,
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors",
            {"config.json": config, "preprocessor_config.json": preprocess.settings},
            usage=partial(_usage, type(skeleton).__name__),
        ),
        open_text=partial(_text_tower, config, source, offline),
    )


_WHOLE = """\
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

folder = "."  # this one, or the model's id on the Hub
model, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder)
prompts = ["a photo of a cat.", "a photo of a dog."]
inputs = processor(text=prompts, images=Image.open("image.png"), padding=True, return_tensors="pt")
output = model(**inputs)
features, scores = output.image_embeds, output.logits_per_image  # features of unit length
"""
_TOWER = """\
from PIL import Image
from transformers import CLIPImageProcessor, {tower}

folder = "."  # this one, or the model's id on the Hub
model, processor = {tower}.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder)
features = model(**processor(images=Image.open("image.png"), return_tensors="pt")).{output}
"""


def _usage(tower: str, keys: Collection[str], files: Collection[str]) -> str:
    """Return Python that uses a saved folder: with texts if it has a tokenizer, or else the image tower alone."""
    is_whole = any(key.startswith("text_model.") for key in keys)
    if is_whole and not set(TOKENIZERS).isdisjoint(files):
        return _WHOLE
    if is_whole:
        log.warning("the base has no tokenizer files, so the saved folder can't read prompts")
    output = "pooler_output" if tower == "CLIPVisionModel" else "image_embeds"
    return _TOWER.format(tower=tower, output=output)


def _skeleton(config: dict[str, Any], source: str) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

    vision, named = config, config.get("architectures") or []
    if config["model_type"] == "clip":
        # A whole CLIP projects to its own projection_dim; the copy inside vision_config may be stale.
        vision = {**config.get("vision_config", {}), "projection_dim": config.get("projection_dim", 512)}
    tower = CLIPVisionModel if "CLIPVisionModel" in named else CLIPVisionModelWithProjection

    def build() -> Any:
        tower_config = CLIPVisionConfig.from_dict(vision)
        # Eager attention computes its softmax in float32, so a pass in float64 would be no more exact.
        tower_config._attn_implementation = "sdpa"
        return tower(tower_config)

    return weightless(build, source)


def _text_tower(config: dict[str, Any], source: str, offline: bool, base: StateSource) -> TextTower:
    from transformers import CLIPConfig, CLIPModel

    if config["model_type"] != "clip":
        raise no_text_tower(source)
    model = weightless(lambda: CLIPModel(CLIPConfig.from_dict(config)), source)
    read_text_side(model, base, _LAYOUT)
    tokenizer = _tokenizer(source, model.config.text_config, offline)
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def embed(prompts: Sequence[str]) -> Tensor:
        tokens = tokenizer(
            list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        # Not `get_text_features`, whose return type has changed between versions of transformers.
        features: Tensor = model.text_projection(model.text_model(**tokens).pooler_output)
        return features

    return TextTower(embed, model.logit_scale.exp().item())


def _tokenizer(source: str, text_config: Any, offline: bool) -> Any:
    tokenizer = tokenizer_in(source, offline=offline, kind="CLIPTokenizer")
    # The text feature is read at the end token. Old configurations have the id 2, but mean the last of the vocabulary.
    end = text_config.eos_token_id if text_config.eos_token_id != 2 else text_config.vocab_size - 1
    # transformers 5 makes an empty tokenizer where there are no files, rather than fail.
    if tokenizer is None or tokenizer.eos_token_id != end:
        raise SpecError(
            f"{source} has no tokenizer for its text tower",
            hint="Put the base's tokenizer files next to its config.json, or use `heads.<task>.file`.",
        )
    return tokenizer
