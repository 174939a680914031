"""Adapter for open_clip's image tower: its `VisionTransformer`, alone or inside a whole CLIP at `visual`.

Layer paths: the stem is named after its first module, `conv1`; blocks are `transformer.resblocks.j`; the
head is `ln_post`. The attention in-projection is one fused tensor in the checkpoint and three sites here,
and `proj` is stored as [in, out]. Not supported, and refused by name: attentional pooling (CoCa), timm
trunks (SigLIP, EVA02, ConvNeXt), ResNets, and blocks with extra norms or scales (qk_norm, scale_heads, ...).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from driftlens.errors import IncompatibleModelsError
from driftlens.models.alignment import KeyLayout
from driftlens.models.chain import IMAGE, Layer, LayerChain, Site, Slot
from driftlens.models.registry import adapters
from driftlens.models.vit import (
    ACTIVATIONS,
    BlockNames,
    HeadNames,
    Pooling,
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

BLOCK = BlockNames(
    norm1="ln_1",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    out="attn.out_proj",
    norm2="ln_2",
    fc1="mlp.c_fc",
    fc2="mlp.c_proj",
)
LAYOUT = KeyLayout(
    anchor="class_embedding",
    tower="visual.",
    projection="proj",
    foreign={
        "visual.trunk.": "a timm trunk (SigLIP, EVA02, ConvNeXt and others)",
        "attn_pool.": "a tower that pools by attention (CoCa)",
        "attnpool.": "a ResNet",
        "embeddings.class_embedding": "a tower saved by transformers, whose loader is hf-clip",
    },
)
_POOLINGS: dict[str, Pooling] = {"tok": "cls", "avg": "patch_mean"}
_LINEAR_KEYS = {f"{site}.{part}" for site in (BLOCK.out, BLOCK.fc1, BLOCK.fc2) for part in ("weight", "bias")}
_BLOCK_KEYS = {"attn.in_proj_weight", "attn.in_proj_bias", *_LINEAR_KEYS}
_NORM_KEYS = {f"{norm}.{part}" for norm in (BLOCK.norm1, BLOCK.norm2) for part in ("weight", "bias")}
_OPTIONAL_KEYS = {"ls_1.gamma", "ls_2.gamma", *_NORM_KEYS}


class OpenClipViT:
    """open_clip's vision transformer, taken apart."""

    name = "open_clip_vit"
    layout = LAYOUT

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is, or holds at `visual`, a vision transformer of open_clip that is supported."""
        return why_not(module) is None

    def chain(self, module: nn.Module) -> LayerChain:
        """The tower taken apart; keys are those of `module.state_dict()`.

        Raises:
            IncompatibleModelsError: the tower is of another kind, or has an option that is not supported.
        """
        reason = why_not(module)
        if reason is not None:
            raise IncompatibleModelsError(
                f"this open_clip tower can't be taken apart: {reason}",
                hint="Supported are open_clip's own vision transformers with class-token or average pooling.",
            )
        tower, prefix = _tower(module)
        blocks = [_block(block, prefix, index) for index, block in enumerate(tower.transformer.resblocks)]
        paths = [f"{prefix}ln_pre", *(block.path for block in blocks), prefix.removesuffix(".")]
        return LayerChain(
            architecture=self.name,
            layers=(_stem(tower, prefix), *blocks, _head(tower, prefix)),
            start=start,
            library_states=partial(library_states, paths=paths),
            token_weights=token_weight_rules(tower.positional_embedding.shape[0]),
            settings=_settings(tower),
            modality=IMAGE,
        )

    def tiny(self) -> nn.Module:
        """A 3-block tower of width 32 on 16 x 16 pixels (17 tokens) with random weights, in eval mode."""
        from open_clip.transformer import QuickGELU, VisionTransformer

        return scrambled(lambda: VisionTransformer(16, 4, 32, 3, 4, 2.0, output_dim=8, act_layer=QuickGELU))


adapters.register("open_clip_vit")(OpenClipViT())


def why_not(module: nn.Module) -> str | None:
    """What keeps the adapter from understanding `module`, in words; None when nothing does."""
    tower, _ = _tower(module)
    if hasattr(tower, "trunk"):
        return "it is a timm trunk (SigLIP, EVA02, ConvNeXt and others), not a transformer of open_clip's own"
    if hasattr(tower, "layer1") and hasattr(tower, "attnpool"):
        return "it is a ResNet (ModifiedResNet), not a vision transformer"
    wanted = ("conv1", "class_embedding", "positional_embedding", "ln_pre", "transformer", "ln_post")
    missing = [name for name in wanted if not hasattr(tower, name)]
    if missing or not hasattr(tower.transformer, "resblocks"):
        lacks = ", ".join(missing) or "resblocks"
        return f"{type(tower).__name__} is not a vision transformer of open_clip (no {lacks})"
    if getattr(tower, "attn_pool", None) is not None:
        return "it pools by attention (attn_pool, as CoCa does)"
    if getattr(tower, "pool_type", None) not in _POOLINGS:
        return f"it pools by {getattr(tower, 'pool_type', 'no stated rule')!r}, expected 'tok' or 'avg'"
    return _why_not_blocks(tower)


def _tower(module: nn.Module) -> tuple[Any, str]:
    """The vision transformer and the prefix of its keys."""
    inner = getattr(module, "visual", None)
    return (module, "") if inner is None else (inner, "visual.")


def _why_not_blocks(tower: Any) -> str | None:
    for index, block in enumerate(tower.transformer.resblocks):
        keys = set(block.state_dict())
        odd = sorted((keys - _BLOCK_KEYS - _OPTIONAL_KEYS) | (_BLOCK_KEYS - keys))
        if odd:
            return f"block {index} is not the plain pre-norm block (extra or missing: {', '.join(odd)})"
        if activation_name(block.mlp.gelu) is None:
            return f"its activation {block.mlp.gelu} is none of {', '.join(ACTIVATIONS)}"
    return None


def _stem(tower: Any, prefix: str) -> Layer:
    norm = None if isinstance(tower.ln_pre, nn.Identity) else "ln_pre"
    names = StemNames("conv1.weight", "class_embedding", "positional_embedding", norm)
    keys = [names.patches, names.cls, names.positions, *_norm_keys(tower.ln_pre, "ln_pre")]
    eps = getattr(tower.ln_pre, "eps", 0.0)
    affine = bool(_norm_keys(tower.ln_pre, "ln_pre"))
    sites = (Site("ln_pre", "layer_norm", input="tokens", eps=eps),) if affine else ()
    call = layer_call(partial(vit_stem, names=names, eps=eps), reads="pixels")
    return Layer(1, "stem", f"{prefix}conv1", {key: Slot(prefix + key) for key in keys}, call, sites)


def _block(block: Any, prefix: str, index: int) -> Layer:
    path = f"{prefix}transformer.resblocks.{index}"
    names = _block_names(block)
    call = partial(
        vit_block,
        names=names,
        num_heads=block.attn.num_heads,
        eps=block.ln_1.eps,
        activation=ACTIVATIONS[known_activation(block.mlp.gelu)],
    )
    return Layer(
        index=index + 2,
        role="block",
        path=path,
        parameters=_block_slots(block, f"{path}."),
        call=layer_call(call),
        sites=block_sites(names, eps=block.ln_1.eps, affine=bool(_norm_keys(block.ln_1, "ln_1"))),
        is_residual=True,
    )


def _block_names(block: Any) -> BlockNames:
    if not hasattr(block.ls_1, "gamma"):
        return BLOCK
    return BlockNames(**{**vars(BLOCK), "scale1": "ls_1.gamma", "scale2": "ls_2.gamma"})


def _block_slots(block: Any, prefix: str) -> dict[str, Slot]:
    width = block.attn.in_proj_weight.shape[1]
    slots = {key: Slot(prefix + key) for key in block.state_dict() if ".in_proj_" not in key}
    for part in ("weight", "bias"):
        for position, site in enumerate((BLOCK.q, BLOCK.k, BLOCK.v)):
            rows = (position * width, (position + 1) * width)
            slots[f"{site}.{part}"] = Slot(f"{prefix}attn.in_proj_{part}", rows=rows)
    return slots


def _head(tower: Any, prefix: str) -> Layer:
    pooling = _POOLINGS[tower.pool_type]
    norm_first = _norm_first(tower)
    names = HeadNames("ln_post", None if tower.proj is None else "proj")
    slots = {key: Slot(prefix + key) for key in _norm_keys(tower.ln_post, "ln_post")}
    tokens, eps = "patches" if norm_first else "pooled", tower.ln_post.eps
    sites = [Site("ln_post", "layer_norm", "hidden", tokens, eps=eps)] if slots else []
    if names.projection is not None:
        slots["proj.weight"] = Slot(f"{prefix}proj", transposed=True)
        sites.append(Site("proj", "linear", "ln_post", "pooled"))
    call = partial(vit_head, names=names, eps=tower.ln_post.eps, pooling=pooling, norm_first=norm_first)
    index = len(tower.transformer.resblocks) + 2
    return Layer(index, "head", f"{prefix}ln_post", slots, layer_call(call), tuple(sites))


def _norm_first(tower: Any) -> bool:
    """Whether the final norm runs before pooling in a way that matters: for a single token it doesn't."""
    return tower.pool_type == "avg" and not tower.final_ln_after_pool


def _norm_keys(norm: nn.Module, name: str) -> list[str]:
    return [f"{name}.{key}" for key in norm.state_dict()]


def _settings(tower: Any) -> dict[str, object]:
    block = tower.transformer.resblocks[0]
    return {
        "activation": known_activation(block.mlp.gelu),
        "eps": block.ln_1.eps,
        "num_heads": block.attn.num_heads,
        "patch_size": list(tower.patch_size),
        "image_size": list(tower.image_size),
        "pooling": _POOLINGS[tower.pool_type],
        "norm_before_pooling": _norm_first(tower),
    }
