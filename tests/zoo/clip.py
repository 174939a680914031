"""CLIP towers for tests: a chain run with a module's own weights, and open_clip weights under transformers'
names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.models.chain import Layer, LayerChain, State


def parameters(layer: Layer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's parameters, cut out of a state dict the way its slots say."""
    found = {}
    for name, slot in layer.parameters.items():
        tensor = weights[slot.key]
        if slot.rows is not None:
            tensor = tensor[slot.rows[0] : slot.rows[1]]
        found[name] = tensor.T if slot.transposed else tensor
    return found


@torch.no_grad()
def chain_states(chain: LayerChain, module: nn.Module, inputs: Any) -> list[State]:
    """States at boundaries 1..L, layer by layer."""
    weights = module.state_dict()
    state, side = chain.start(inputs)
    states = []
    for layer in chain.layers:
        state = layer.call(parameters(layer, weights), state, side)
        states.append(state)
    return states


def largest_difference(first: list[State], second: list[State]) -> float:
    """Largest absolute difference of any entry at any boundary."""
    assert len(first) == len(second)
    return max(
        (one[name] - other[name]).abs().max().item()
        for one, other in zip(first, second, strict=True)
        for name in one.keys() | other.keys()
    )


def under_transformers_names(visual: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's image tower as `CLIPVisionModelWithProjection` names and stores it."""
    renamed = {
        "visual_projection.weight": visual["proj"].T,
        "vision_model.embeddings.class_embedding": visual["class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": visual["conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": visual["positional_embedding"],
    }
    for part in ("weight", "bias"):
        renamed[f"vision_model.pre_layrnorm.{part}"] = visual[f"ln_pre.{part}"]
        renamed[f"vision_model.post_layernorm.{part}"] = visual[f"ln_post.{part}"]
    num_blocks = len({key.split(".")[2] for key in visual if key.startswith("transformer.resblocks.")})
    for index in range(num_blocks):
        source, target = f"transformer.resblocks.{index}", f"vision_model.encoder.layers.{index}"
        for part in ("weight", "bias"):
            fused = visual[f"{source}.attn.in_proj_{part}"]
            for site, tensor in zip("qkv", fused.chunk(3), strict=True):
                renamed[f"{target}.self_attn.{site}_proj.{part}"] = tensor
            for ours, theirs in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                renamed[f"{target}.{ours}.{part}"] = visual[f"{source}.{theirs}.{part}"]
    return renamed
