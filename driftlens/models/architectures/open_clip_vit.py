"""CLIP of open_clip: the adapter of its image tower, its loader, and pretrained weights by tag.

The tower is a `VisionTransformer`, alone or at `visual` of a whole CLIP. Layer paths: `conv1` for the stem,
`transformer.resblocks.j` for blocks, `ln_post` for the head. The attention's packed projection is one tensor in the
checkpoint and three sites here; `proj` is stored as [in, out]. Not supported: attentional pooling (CoCa), timm trunks
(SigLIP, EVA02, ConvNeXt), ResNets, and blocks with extra norms or scales (qk_norm, scale_heads, ...).
"""

from __future__ import annotations

import copy
import logging
import pathlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.checkpoints.alignment import TowerKeyLayout
from driftlens.checkpoints.loading import needed_config, read_json
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.models.architecture import (
    Architecture,
    ArchitectureRequest,
    FolderFormat,
    loaders,
    read_text_side,
    require_own_blocks,
    weightless,
)
from driftlens.models.architectures.vit import POOLINGS, ClipViT
from driftlens.models.chain import Slot, adapters
from driftlens.models.heads import TextTower
from driftlens.models.preprocessing import open_clip_preprocess
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, SpecError, did_you_mean
from driftlens.utils.files import expanded

CONFIG_FILE = "open_clip_config.json"
_LAYOUT = TowerKeyLayout(
    loader="open-clip",
    anchor="class_embedding",
    tower="visual.",
    projection="proj",
)
_FOREIGN_TEXT = ("hf_model_name", "hf_tokenizer_name", "tokenizer_kwargs")
_USAGE = """\
import open_clip
from PIL import Image

name = "local-dir:."  # this folder; on the Hub, hf-hub: and the model's id
model, preprocess = open_clip.create_model_from_pretrained(name)
tokenizer = open_clip.get_tokenizer(name)
model.eval()
features = model.encode_image(preprocess(Image.open("image.png"))[None])
texts = model.encode_text(tokenizer(["a photo of a cat.", "a photo of a dog."]))
"""
# Only the image tower of this model is used, and the constructor of open_clip requires a text tower.
_SMALLEST_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}


class _UnpackedAttention(nn.Module):
    """Self-attention with three linear modules for the packed projection: queries, keys and values are sites."""

    # Three products take as long as one with the packed weight: measured for the widths of ViT-B and ViT-L.
    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.num_heads, self.is_torchs = packed.num_heads, isinstance(packed, nn.MultiheadAttention)
        width = packed.in_proj_weight.shape[1]
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, device="meta") for _ in range(4)
        )

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        """Return what the packed attention returns without a mask."""
        queries, keys, values = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return (output,) if self.is_torchs else output


_BLOCK_SITES = (
    *("ln_1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
    *("ln_2", "mlp.c_fc", "mlp.c_proj"),
)


def _refusal(module: nn.Module, tower: Any) -> str | None:
    """Return the reason why a tower is not supported."""
    if hasattr(tower, "trunk"):
        return "it is a timm trunk (SigLIP, EVA02, ConvNeXt, ...); expected a transformer of open_clip"
    if hasattr(tower, "layer1") and hasattr(tower, "attnpool"):
        return "it is a ResNet; expected a vision transformer"
    if getattr(tower, "attn_pool", None) is not None:
        return "it pools by attention (attn_pool), as CoCa"
    if getattr(tower, "pool_type", "tok") not in POOLINGS:
        return f"it pools by {tower.pool_type!r}, expected 'tok' or 'avg'"
    return None


def _unpack(block: Any) -> tuple[nn.Module, dict[str, Slot]]:
    """Return a block with unpacked attention, and the slots of its parameters."""
    width = block.attn.in_proj_weight.shape[1]
    slots = {key: Slot(key) for key in block.state_dict() if ".in_proj_" not in key}
    for part in ("weight", "bias"):
        for position, site in enumerate(_BLOCK_SITES[1:4]):
            rows = (position * width, (position + 1) * width)
            slots[f"{site}.{part}"] = Slot(f"attn.in_proj_{part}", rows=rows)
    # A shallow copy: the model itself keeps its packed attention.
    unpacked = copy.copy(block)
    unpacked._modules = {**block._modules, "attn": _UnpackedAttention(block.attn)}
    return unpacked, slots


OPEN_CLIP_VIT = ClipViT(
    name="open_clip_vit",
    layout=_LAYOUT,
    library="open_clip",
    supported="open_clip's vision transformers with class-token or average pooling",
    inner="visual",
    blocks="transformer.resblocks",
    holds=("transformer.resblocks", "visual.transformer.resblocks"),
    attention="attn",
    activation="mlp.gelu",
    image_size="image_size",
    entry="visual",
    projects_inside=True,
    embeddings=("conv1.weight", "class_embedding", "positional_embedding"),
    stem_norm="ln_pre",
    block_sites=_BLOCK_SITES,
    head_norm="ln_post",
    projection="proj",
    required=frozenset(
        (
            *("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"),
            *("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
        )
    ),
    optional=frozenset(("ls_1.gamma", "ls_2.gamma", "ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")),
    refusal=_refusal,
    unpack=_unpack,
)
adapters.register(OPEN_CLIP_VIT.name)(OPEN_CLIP_VIT)


@loaders.register("open-clip")
def _load_open_clip(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of an open_clip model, given a name, configuration file, folder or Hub id."""
    require_own_blocks(request, "open-clip")
    source = request.source
    stated = _config(source, request.access.offline)
    config = stated.get("model_cfg", stated)
    skeleton = _skeleton(config, source)
    # Before preprocessing: trunks and ResNets have no `image_size`, and the adapter raises with the reason.
    chain = OPEN_CLIP_VIT.chain(skeleton)
    preprocess = open_clip_preprocess(stated.get("preprocess_cfg"), tuple(skeleton.image_size), source)
    folder = {CONFIG_FILE: {"model_cfg": config, "preprocess_cfg": preprocess.settings}}

    return Architecture(
        loader="open-clip",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=_LAYOUT,
        preprocess=preprocess,
        folder=FolderFormat(
            "open_clip_model.safetensors",
            folder,
            lambda: tuple(_whole(config, source).state_dict()),
            lambda keys, files: _USAGE,
        ),
        open_text=partial(_text_tower, config, source),
    )


def _config(source: str, offline: bool) -> dict[str, Any]:
    """Return the configuration: a model section, or model and preprocessing sections as on the Hub."""
    import open_clip

    # open_clip accepts ViT-B/32 as a name of ViT-B-32.
    name = source.replace("/", "-")
    if name in open_clip.list_models():
        return dict(open_clip.get_model_config(name))
    path = expanded(source)
    if path.is_file():
        return read_json(path)
    place = source.removeprefix("hf-hub:").removeprefix("local-dir:")
    hint = (
        "Use a name in open_clip.list_models() (-quickgelu for OpenAI's weights) or a model_config.json. Folders of "
        "transformers need the loader hf-clip."
    )
    return needed_config(place, CONFIG_FILE, "a model of open_clip", offline=offline, hint=hint)


def _skeleton(config: dict[str, Any], source: str) -> Any:
    # Some text towers are downloaded when they are built, and the image tower does not depend on them.
    alone = {**config, "text_cfg": _SMALLEST_TEXT, "custom_text": False}
    return _whole(alone, source).visual


def _whole(config: dict[str, Any], source: str) -> Any:
    """Return the whole CLIP without weights."""
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
            f"the text tower of {source} has {special} = {text[special]!r}, which is not supported",
            hint="Use precomputed class embeddings in `heads.<task>.file`.",
        )
    model = _whole(config, source)
    read_text_side(model, base, _LAYOUT)
    tokenizer = SimpleTokenizer(context_length=model.context_length)

    @torch.no_grad()
    def embed(prompts: Sequence[str]) -> Tensor:
        features: Tensor = model.encode_text(tokenizer(list(prompts)))
        return features

    return TextTower(embed, model.logit_scale.exp().item())


_SCHEME = "pretrained:"

log = logging.getLogger("driftlens")


def resolve_pretrained(place: str, architecture: Architecture, *, offline: bool = False) -> str:
    """Return the file of `pretrained:TAG`, downloaded by open_clip if it is not cached; other places unchanged.

    A download is logged. With `offline`, or `HF_HUB_OFFLINE` in the environment, only caches are searched.

    Args:
        place: the place of weights in the spec.
        architecture: the architecture that the weights are for.
        offline: True to forbid downloads.

    Raises:
        SpecError: open_clip has no model of this name, or no such tag.
        IncompatibleModelsError: the weights were trained with another activation or preprocessing.
        CheckpointError: the weights are in no cache and downloads are forbidden.
    """
    if not place.startswith(_SCHEME):
        return place
    import open_clip
    from huggingface_hub import constants

    model = architecture.source.replace("/", "-")
    if architecture.loader != "open-clip" or model not in open_clip.list_models():
        raise SpecError(
            f"{place} requires a model name of open_clip as architecture, not {architecture.source}",
            hint="Use architecture: {loader: open-clip, source: ViT-B-32-quickgelu}, or a weights file.",
        )
    tag, tags = place.removeprefix(_SCHEME), open_clip.list_pretrained_tags_by_model(model)
    config = open_clip.get_pretrained_cfg(model, tag)
    if not config:
        raise SpecError(
            f"open_clip has no weights {tag!r} for {model}; available: {', '.join(tags) or 'none'}",
            hint=did_you_mean(tag, tags),
        )
    _require_fit(place, model, config, architecture)
    if (file := _cached(config)) is not None:
        return file
    origin = config.get("hf_hub") or config.get("url")
    if offline or constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{place} of {model} ({origin}) is not cached, and downloads are off",
            hint="Run once without --offline and HF_HUB_OFFLINE, or use the path of the weights.",
        )
    # A warning, because it is shown where logging is not set up. The network must never be used silently.
    log.warning("downloading %s of %s from %s", place, model, origin)
    return str(open_clip.download_pretrained(config))


def _require_fit(place: str, model: str, config: dict[str, Any], architecture: Architecture) -> None:
    """Raise unless weights were trained with the activation and preprocessing of the architecture."""
    import open_clip

    # open_clip itself only warns.
    is_quick = bool(config.get("quick_gelu", False))
    if is_quick != bool(open_clip.get_model_config(model).get("quick_gelu", False)):
        fitting = f"{model}-quickgelu" if is_quick else model.removesuffix("-quickgelu")
        raise IncompatibleModelsError(
            f"{place} was trained with {'QuickGELU' if is_quick else 'GELU'}; {model} has the other activation",
            hint=f"Use architecture.source: {fitting}.",
        )
    settings = {} if architecture.preprocess is None else architecture.preprocess.settings
    differing = [
        f"{key} {config[key]} (here {settings[key]})"
        for key in ("mean", "std", "interpolation", "resize_mode")
        if key in config and key in settings and config[key] != settings[key]
    ]
    if differing:
        raise IncompatibleModelsError(
            f"{place} was trained with other preprocessing: {', '.join(differing)}",
            hint="Use the path of the weights file, and as source an open_clip_config.json with this preprocess_cfg.",
        )


def _cached(config: dict[str, Any]) -> str | None:
    """Return the path of the weights in the caches of open_clip and the Hub, or None."""
    from huggingface_hub import try_to_load_from_cache
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    repository, _, name = config.get("hf_hub", "").rpartition("/")
    if repository:
        name = name or HF_WEIGHTS_NAME
        safe = HF_SAFE_WEIGHTS_NAME if name == HF_WEIGHTS_NAME else f"{name.rpartition('.')[0]}.safetensors"
        paths = (try_to_load_from_cache(repository, file) for file in (safe, name))
        return next((path for path in paths if isinstance(path, str)), None)
    # open_clip's cache of weights that are not on the Hub.
    file = pathlib.Path("~/.cache/clip").expanduser() / config.get("url", "").rpartition("/")[2]
    return str(file) if file.is_file() else None
