"""Adapter for transformers' CLIP image tower: `CLIPVisionModel`, with or without projection, or a whole
`CLIPModel`.

Layer paths: the stem is named after its first module, `vision_model.embeddings`; blocks are
`vision_model.encoder.layers.j`; the head is `vision_model.post_layernorm`. `CLIPVisionModel` of transformers
5.6 and later has no inner `vision_model`, so neither have its keys and paths; which layout a module has is
read off its structure.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from driftlens.errors import IncompatibleModelsError
from driftlens.models.alignment import KeyLayout
from driftlens.models.chain import IMAGE, Layer, LayerChain, Site, Slot
from driftlens.models.registry import adapters
from driftlens.models.vit import (
    ACTIVATIONS,
    BlockNames,
    HeadNames,
    StemNames,
    activation_name,
    block_sites,
    known_activation,
    layer_call,
    library_states,
    scrambled,
    start,
    token_weight_rules,
    vit_block,
    vit_head,
    vit_stem,
)

STEM = StemNames(
    patches="embeddings.patch_embedding.weight",
    cls="embeddings.class_embedding",
    positions="embeddings.position_embedding.weight",
    norm="pre_layrnorm",  # sic: the library's spelling
)
BLOCK = BlockNames(
    norm1="layer_norm1",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.out_proj",
    norm2="layer_norm2",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
)
LAYOUT = KeyLayout(
    anchor="embeddings.class_embedding",
    tower="vision_model.",
    projection="visual_projection.weight",
    foreign={
        "head.probe": "a SigLIP tower",
        "self_attn.qkv.": "a tower with fused attention weights (BLIP, EVA)",
        "transformer.resblocks.": "a tower saved by open_clip, whose loader is open-clip",
    },
)
_BLOCK_KEYS = {f"{site}.{part}" for site in vars(BLOCK).values() if site for part in ("weight", "bias")}


class HfClipViT:
    """transformers' CLIP image tower, taken apart."""

    name = "hf_clip_vit"
    layout = LAYOUT

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is, or holds at `vision_model`, a CLIP image tower of transformers."""
        return why_not(module) is None

    def chain(self, module: nn.Module) -> LayerChain:
        """The tower taken apart; keys are those of `module.state_dict()`.

        Raises:
            IncompatibleModelsError: the module is no CLIP image tower.
        """
        reason = why_not(module)
        if reason is not None:
            raise IncompatibleModelsError(
                f"this transformers model can't be taken apart: {reason}",
                hint="Supported are CLIPVisionModel, CLIPVisionModelWithProjection and CLIPModel.",
            )
        tower, prefix = _tower(module)
        blocks = [_block(block, prefix, index) for index, block in enumerate(tower.encoder.layers)]
        last = "visual_projection" if hasattr(module, "visual_projection") else f"{prefix}post_layernorm"
        paths = [f"{prefix}pre_layrnorm", *(block.path for block in blocks), last]
        return LayerChain(
            architecture=self.name,
            layers=(_stem(tower, prefix), *blocks, _head(module, tower, prefix)),
            start=start,
            library_states=partial(library_states, paths=paths, run=_run),
            token_weights=token_weight_rules(tower.embeddings.position_embedding.weight.shape[0]),
            settings=_settings(tower),
            modality=IMAGE,
        )

    def tiny(self) -> nn.Module:
        """A 3-block tower of width 32 on 16 x 16 pixels (17 tokens) with random weights, in eval mode."""
        from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

        config = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            projection_dim=8,
        )
        return scrambled(lambda: CLIPVisionModelWithProjection(config))


adapters.register("hf_clip_vit")(HfClipViT())


def why_not(module: nn.Module) -> str | None:
    """What keeps the adapter from understanding `module`, in words; None when nothing does."""
    tower, _ = _tower(module)
    embeddings = getattr(tower, "embeddings", None)
    wanted = ("class_embedding", "patch_embedding", "position_embedding")
    missing = [f"embeddings.{name}" for name in wanted if not hasattr(embeddings, name)]
    missing += [name for name in ("pre_layrnorm", "encoder", "post_layernorm") if not hasattr(tower, name)]
    if missing or not hasattr(tower.encoder, "layers"):
        return f"{type(module).__name__} is no CLIP image tower (no {', '.join(missing) or 'encoder.layers'})"
    if hasattr(module, "classifier"):
        return f"{type(module).__name__} ends in a classifier of its own"
    for index, block in enumerate(tower.encoder.layers):
        odd = sorted(set(block.state_dict()) ^ _BLOCK_KEYS)
        if odd:
            return f"block {index} is not CLIP's (extra or missing: {', '.join(odd)})"
        if activation_name(block.mlp.activation_fn) is None:
            return f"its activation {block.mlp.activation_fn} is none of {', '.join(ACTIVATIONS)}"
    return None


def _tower(module: nn.Module) -> tuple[Any, str]:
    """The inner transformer and the prefix of its keys."""
    inner = getattr(module, "vision_model", None)
    return (module, "") if inner is None else (inner, "vision_model.")


def _run(module: nn.Module, pixels: Tensor) -> object:
    # A whole CLIPModel would want text as well.
    return getattr(module, "get_image_features", module)(pixel_values=pixels)


def _stem(tower: Any, prefix: str) -> Layer:
    keys = [STEM.patches, STEM.cls, STEM.positions, *_affine(STEM.norm or "")]
    call = layer_call(partial(vit_stem, names=STEM, eps=tower.pre_layrnorm.eps), reads="pixels")
    sites = (Site("pre_layrnorm", "layer_norm", input="tokens", eps=tower.pre_layrnorm.eps),)
    return Layer(1, "stem", f"{prefix}embeddings", {key: Slot(prefix + key) for key in keys}, call, sites)


def _block(block: Any, prefix: str, index: int) -> Layer:
    path = f"{prefix}encoder.layers.{index}"
    call = partial(
        vit_block,
        names=BLOCK,
        num_heads=block.self_attn.num_heads,
        eps=block.layer_norm1.eps,
        activation=ACTIVATIONS[known_activation(block.mlp.activation_fn)],
    )
    sites = block_sites(BLOCK, eps=block.layer_norm1.eps)
    slots = {key: Slot(f"{path}.{key}") for site in sites for key in _affine(site.name)}
    return Layer(index + 2, "block", path, slots, layer_call(call), sites, is_residual=True)


def _head(module: nn.Module, tower: Any, prefix: str) -> Layer:
    projected = hasattr(module, "visual_projection")
    names = HeadNames("post_layernorm", "visual_projection" if projected else None)
    slots = {key: Slot(prefix + key) for key in _affine("post_layernorm")}
    sites = [Site("post_layernorm", "layer_norm", "hidden", "pooled", eps=tower.post_layernorm.eps)]
    if projected:
        slots["visual_projection.weight"] = Slot("visual_projection.weight")
        sites.append(Site("visual_projection", "linear", "post_layernorm", "pooled"))
    call = layer_call(partial(vit_head, names=names, eps=tower.post_layernorm.eps, pooling="cls"))
    path = f"{prefix}post_layernorm"
    return Layer(len(tower.encoder.layers) + 2, "head", path, slots, call, tuple(sites))


def _affine(site: str) -> tuple[str, str]:
    return f"{site}.weight", f"{site}.bias"


def _settings(tower: Any) -> dict[str, object]:
    block, embeddings = tower.encoder.layers[0], tower.embeddings
    return {
        "activation": known_activation(block.mlp.activation_fn),
        "eps": block.layer_norm1.eps,
        "num_heads": block.self_attn.num_heads,
        "patch_size": [embeddings.patch_size] * 2,
        "image_size": [embeddings.image_size] * 2,
        "pooling": "cls",
    }
