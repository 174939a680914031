"""CLIP as transformers stores it: a folder or Hub repository with config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from driftlens.errors import IncompatibleModelsError, SpecError
from driftlens.models.alignment import tower_prefix
from driftlens.models.architecture import Architecture, FolderFormat, TextTower, no_text_tower
from driftlens.models.config_source import read_config, weightless
from driftlens.models.hf_clip_vit import LAYOUT, HfClipViT
from driftlens.models.loading import StateSource
from driftlens.models.preprocessing import hf_preprocess
from driftlens.models.registry import loaders

_TEXT_KEYS = ("text_model.", "text_projection.", "logit_scale")


@loaders.register("hf-clip")
def load_hf_clip(source: str, offline: bool) -> Architecture:
    """The architecture of a CLIP, or a CLIP image tower, of transformers.

    Args:
        source: folder or Hub id.
        offline: whether only files that were downloaded before may be used.

    Raises:
        SpecError: `source` names nothing, or has no config.json.
        CheckpointError: a file can't be fetched or read.
        IncompatibleModelsError: the model is no CLIP.
    """
    config = read_config(source, "config.json", offline=offline)
    if config is None:
        raise SpecError(
            f"{source} has no config.json{' in the local cache' if offline else ''}",
            hint="Give a folder of save_pretrained or a Hub id; open_clip's need the loader open-clip.",
        )
    skeleton = _skeleton(config, source)
    chain = HfClipViT().chain(skeleton)
    size = skeleton.config.image_size
    processor = read_config(source, "preprocessor_config.json", offline=offline)
    preprocess = hf_preprocess(processor, (size, size), source)

    def open_text(base: StateSource) -> TextTower:
        return _text_tower(config, source, base, offline)

    return Architecture(
        loader="hf-clip",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=LAYOUT,
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors", {"config.json": config, "preprocessor_config.json": preprocess.settings}
        ),
        notices=(preprocess.notice,) if preprocess.notice else (),
        open_text=open_text,
    )


def _skeleton(config: dict[str, Any], source: str) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

    kind, named = config.get("model_type"), config.get("architectures") or []
    if kind == "clip":
        # A whole CLIP projects to its own projection_dim; the copy inside vision_config may be stale.
        vision = {**config.get("vision_config", {}), "projection_dim": config.get("projection_dim", 512)}
    elif kind == "clip_vision_model":
        vision = config
    else:
        raise IncompatibleModelsError(
            f"{source} is a {kind} model ({', '.join(named) or 'no architecture named'}), expected CLIP",
            hint="Supported are CLIPModel, CLIPVisionModel and CLIPVisionModelWithProjection.",
        )
    tower = CLIPVisionModel if "CLIPVisionModel" in named else CLIPVisionModelWithProjection

    def build() -> Any:
        tower_config = CLIPVisionConfig.from_dict(vision)
        # Eager attention takes its softmax in float32, whatever the dtype of the model.
        tower_config._attn_implementation = "sdpa"
        return tower(tower_config)

    return weightless(build, source)


def _text_tower(config: dict[str, Any], source: str, base: StateSource, offline: bool) -> TextTower:
    from transformers import CLIPConfig, CLIPModel

    if config["model_type"] != "clip":
        raise no_text_tower(source)
    model = weightless(lambda: CLIPModel(CLIPConfig.from_dict(config)), source)
    before = tower_prefix(base.headers, LAYOUT, base.name).removesuffix(LAYOUT.tower)
    wanted = [key for key in model.state_dict() if key.startswith(_TEXT_KEYS)]
    if not all(before + key in base.headers for key in wanted):
        raise no_text_tower(base.name)
    model.load_state_dict({key: base.read(before + key).float() for key in wanted}, strict=False, assign=True)
    tokenizer = _tokenizer(source, model.config.text_config, offline)
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def embed(prompts: Sequence[str]) -> Tensor:
        tokens = tokenizer(
            list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        # Not get_text_features: what that returns has changed between versions.
        features: Tensor = model.text_projection(model.text_model(**tokens).pooler_output)
        return features

    return TextTower(embed, model.logit_scale.exp().item())


def _tokenizer(source: str, text_config: Any, offline: bool) -> Any:
    from transformers import CLIPTokenizer

    try:
        tokenizer = CLIPTokenizer.from_pretrained(source, local_files_only=offline)
    except Exception:  # a missing or broken file: the tokenizers library raises nothing more precise
        tokenizer = None
    # The text feature is read at the token that ends the prompt; older configurations say 2 and mean the
    # last.
    end = text_config.eos_token_id if text_config.eos_token_id != 2 else text_config.vocab_size - 1
    # transformers 5 makes an empty tokenizer where there are no files, rather than fail.
    if tokenizer is None or tokenizer.eos_token_id != end:
        raise SpecError(
            f"{source} has no tokenizer that fits its text tower, so prompts can't be read",
            hint="Put the base's tokenizer files beside its config.json, or use `heads.<task>.file`.",
        )
    return tokenizer
