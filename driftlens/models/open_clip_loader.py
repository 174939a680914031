"""CLIP as open_clip stores it: a model name, a configuration file, or a folder or Hub repository."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from driftlens.errors import IncompatibleModelsError, SpecError
from driftlens.models.alignment import tower_prefix
from driftlens.models.architecture import Architecture, FolderFormat, TextTower, no_text_tower
from driftlens.models.config_source import read_config, read_json, weightless
from driftlens.models.loading import StateSource
from driftlens.models.open_clip_vit import LAYOUT, OpenClipViT
from driftlens.models.preprocessing import open_clip_preprocess
from driftlens.models.registry import loaders

CONFIG_FILE = "open_clip_config.json"
_FOREIGN_TEXT = ("hf_model_name", "hf_tokenizer_name", "tokenizer_kwargs")
_SMALLEST_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}


@loaders.register("open-clip")
def load_open_clip(source: str, offline: bool) -> Architecture:
    """The architecture of an open_clip model.

    Args:
        source: model name, path of a configuration file, folder, or Hub id (with or without `hf-hub:`).
        offline: whether only files that were downloaded before may be used.

    Raises:
        SpecError: `source` names nothing.
        CheckpointError: a file can't be fetched or read.
        IncompatibleModelsError: the tower is not supported.
    """
    stated = _config(source, offline)
    config = stated.get("model_cfg", stated)
    skeleton = _skeleton(config, source)
    chain = OpenClipViT().chain(skeleton)
    preprocess = open_clip_preprocess(stated.get("preprocess_cfg"), tuple(skeleton.image_size), source)
    folder = {CONFIG_FILE: {"model_cfg": config, "preprocess_cfg": preprocess.settings}}

    def open_text(base: StateSource) -> TextTower:
        return _text_tower(config, source, base)

    return Architecture(
        loader="open-clip",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=LAYOUT,
        preprocess=preprocess,
        folder=FolderFormat(
            "open_clip_model.safetensors", folder, lambda: tuple(_whole(config, source).state_dict())
        ),
        notices=(preprocess.notice,) if preprocess.notice else (),
        open_text=open_text,
    )


def _config(source: str, offline: bool) -> dict[str, Any]:
    """The configuration: a model section, or model and preprocessing sections as on the Hub."""
    import open_clip

    name = source.replace("/", "-")  # open_clip takes ViT-B/32 for ViT-B-32 too
    if name in open_clip.list_models():
        return dict(open_clip.get_model_config(name))
    path = pathlib.Path(source).expanduser()
    if path.is_file():
        return read_json(path)
    place = source.removeprefix("hf-hub:").removeprefix("local-dir:")
    if path.suffix == ".json" or ("/" not in place and not pathlib.Path(place).is_dir()):
        raise SpecError(
            f"open_clip knows no model {source!r}, and there is no such file or folder",
            hint="See open_clip.list_models() for names; OpenAI's weights need a -quickgelu one.",
        )
    config = read_config(place, CONFIG_FILE, offline=offline)
    if config is None:
        raise SpecError(
            f"{source} has no {CONFIG_FILE}{' in the local cache' if offline else ''}",
            hint="Give a model name or a model_config.json; folders of transformers need the loader hf-clip.",
        )
    return config


def _skeleton(config: dict[str, Any], source: str) -> Any:
    vision = config.get("vision_cfg")
    if not isinstance(vision, dict):
        raise IncompatibleModelsError(
            f"{source} has no `vision_cfg`", hint="Expected an open_clip model configuration."
        )
    timm = vision.get("timm_model_name")
    if timm:  # refused before it is built: that may want the network
        raise IncompatibleModelsError(
            f"the image tower of {source} is a timm trunk ({timm}), not open_clip's own vision transformer",
            hint="Supported are the ViT models of OpenAI, LAION and DataComp, among others.",
        )
    # Text towers may want the network too; the image tower doesn't depend on them.
    alone = {**config, "text_cfg": _SMALLEST_TEXT, "custom_text": False}
    return _whole(alone, source).visual


def _whole(config: dict[str, Any], source: str) -> Any:
    """The whole CLIP, without weights."""
    import open_clip

    options = {key: value for key, value in config.items() if key not in ("custom_text", "multimodal_cfg")}
    model = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
    return weightless(lambda: model(**options), source)


def _text_tower(config: dict[str, Any], source: str, base: StateSource) -> TextTower:
    from open_clip import SimpleTokenizer

    text = config.get("text_cfg", {})
    special = next((option for option in _FOREIGN_TEXT if option in text), None)
    if special is not None:
        raise SpecError(
            f"the text tower of {source} needs {special} = {text[special]!r}, which is not supported",
            hint="Give precomputed class embeddings in `heads.<task>.file`.",
        )
    model = _whole(config, source)
    before = tower_prefix(base.headers, LAYOUT, base.name).removesuffix(LAYOUT.tower)
    wanted = [key for key in model.state_dict() if not key.startswith(LAYOUT.tower)]
    if not all(before + key in base.headers for key in wanted):
        raise no_text_tower(base.name)
    model.load_state_dict({key: base.read(before + key).float() for key in wanted}, strict=False, assign=True)
    tokenizer = SimpleTokenizer(context_length=model.context_length)

    @torch.no_grad()
    def embed(prompts: Sequence[str]) -> Tensor:
        features: Tensor = model.encode_text(tokenizer(list(prompts)))
        return features

    return TextTower(embed, model.logit_scale.exp().item())
