"""Models of transformers by the name of their class, all of the same small sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

_SIZES = {
    16: ("hidden_size", "d_model", "n_embd", "dim"),
    24: ("intermediate_size", "d_ff", "hidden_dim"),
    8: ("d_kv",),
    2: (
        *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
        *("num_attention_heads", "num_heads", "n_head", "n_heads"),
    ),
}
"""By size, what families call it: the width, that of inner layers, that of a head of T5, how many layers and heads."""

DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
"""What makes a DeBERTa of version 2 one of version 3."""


def small(name: str, **changes: Any) -> Any:
    """`transformers.<name>` with random weights, of these sizes, and `changes` of its configuration."""
    kind = getattr(transformers, name)
    known = inspect.signature(kind.config_class).parameters
    sizes = {key: size for size, keys in _SIZES.items() for key in keys if key in known}
    return kind(kind.config_class(**sizes | changes))


def scrambled(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return the module that `build` makes, in eval mode, every parameter shifted by noise.

    Freshly initialised towers have zero biases and unit norms, which would hide a bias or norm that is left out.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = build()
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


def open_clip_vit() -> nn.Module:
    """Return a 3-block tower of width 32 on 16 x 16 pixels (17 tokens)."""
    from open_clip.transformer import QuickGELU, VisionTransformer

    return scrambled(lambda: VisionTransformer(16, 4, 32, 3, 4, 2.0, output_dim=8, act_layer=QuickGELU))


def hf_clip_vit() -> nn.Module:
    """Return a 3-block tower of width 32 on 16 x 16 pixels (17 tokens)."""
    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        projection_dim=8,
    )
    return scrambled(lambda: transformers.CLIPVisionModelWithProjection(config))


def flan_t5() -> Any:
    """Return FLAN-T5's form: 2 + 2 blocks of width 16 over 40 tokens, its `lm_head` apart from the embeddings."""
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=6,
        d_ff=24,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu",
        scale_decoder_outputs=False,
        decoder_start_token_id=0,
    )

    def build() -> nn.Module:
        model: Any = transformers.T5ForConditionalGeneration(config)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
        return model

    return scrambled(build)


TINY: dict[str, Callable[[], nn.Module]] = {
    "open_clip_vit": open_clip_vit,
    "hf_clip_vit": hf_clip_vit,
    "seq2seq": flan_t5,
}
"""Models of every registered adapter, by its name."""
