"""Models of transformers by the name of their class, all of the same small sizes."""

from __future__ import annotations

import inspect
from typing import Any

import transformers

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
