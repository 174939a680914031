"""A tiny model of every type that the installed transformers registers as a causal language model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from driftlens.checkpoints.refusals import is_causal
from driftlens.models.frames import raw_inputs
from driftlens.models.taking_apart.dissection import run
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import CONFIGS, MIXTURES, MORE, TINY

BATCH = {
    "input_ids": torch.tensor([[2, 5, 6, 7, 9], [2, 8, 9, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}
MOST = 3_000_000
"""Numbers of a tiny model."""
_KNOWN = {config.model_type: config for config in (CONFIGS | MORE | MIXTURES).values()}
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_dense_intermediate_size"), 12),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "router_hidden_size", "d_rel"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim", "dim_head"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_ngroups"), 1),
    **dict.fromkeys(("ffn_dim", "n_inner", "d_ff", "dff", "dim_ff", "d_inner", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "dense_intermediate_size"), 24),
    **dict.fromkeys(
        ("n_embd", "d_model", "emb_dim", "lru_width", "embedding_dim", "attention_hidden_size"), 16
    ),
    **dict.fromkeys(("n_layer", "num_layers", "decoder_layers", "n_layers", "num_blocks"), 3),
    **dict.fromkeys(("n_head", "num_heads", "decoder_attention_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("d_head", "kv_channels", "index_head_dim", "linear_head_dim", "swa_head_dim"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "n_mamba_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_headdim"), 4),
    **dict.fromkeys(("linear_num_heads", "swa_num_attention_heads", "index_topk", "adapter_rank"), 4),
    **{
        "n_positions": 64,
        "zero_expert_num": 2,
        "num_mem_blocks": 1,
        "sliding_window": 3,
        "swa_num_key_value_heads": 2,
    },
}
_ONE_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_OF_ONE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"full_attention": _ONE_ROPE},
    },
    "inkling2_text": {"unpadded_vocab_size": 40, "rel_extent": 16, "n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": {
        **{"unpadded_vocab_size": 40, "rel_extent": 16, "n_layers_per_attn_res_block": 1},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_gate_rank": 4},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 4, "indexer_budget": 4},
        **{"indexer_compress_ratio": 2, "hc_lowrank": 4, "ngram_vocab_size_base": 40, "ple_embed_dim": 8},
    },
    "xlstm": {
        "num_heads": 2,
        "hidden_size": 32,
        "embedding_dim": 32,
        "v_dim_factor": 1.0,
        "qk_dim_factor": 0.5,
    },
    "zamba2": {"n_mamba_heads": 8, "attention_hidden_size": 32, "attention_head_dim": 8},
    "zamba": {
        **{"attention_hidden_size": 32, "attention_head_dim": 8, "num_hidden_layers": 5},
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    },
    "zaya": {"layer_types": ["hybrid"] * 3, "num_experts_per_tok": 1},
}
"""What no other type is told."""
UNBUILT = "dots3_note_text"
"""Its configuration refuses small sizes: each layer type has some of its own."""
_LEFT_OUT = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("head_dim", "num_key_value_heads"),
    ("max_position_embeddings",),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "head_dim", "num_key_value_heads"),
)
KINDS = [
    kind
    for kind, named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if kind != UNBUILT
    and is_causal({"model_type": kind, "architectures": [named if isinstance(named, str) else named[0]]})
]
"""Model types that the loader for decoders says it takes."""


def tiny(kind: str) -> Any:
    """A model with random weights that its library runs, in float64 where it can."""
    errors = []
    for config, dtype in itertools.product(_configs(kind), (torch.float64, torch.float32)):
        try:
            made = config()
            with torch.device("meta"):
                count = sum(
                    weight.numel() for weight in MODEL_FOR_CAUSAL_LM_MAPPING[type(made)](made).parameters()
                )
            if count > MOST:
                raise ValueError(f"{count} numbers")
            model = with_seed(lambda made=made: MODEL_FOR_CAUSAL_LM_MAPPING[type(made)](made))()
            model = perturbed(model.to(dtype).eval(), 0, 0.2)
            in_turn(model)
            run(model, raw_inputs(BATCH))
        except Exception as error:  # whatever a library makes of sizes that don't go together
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            return model
    raise ValueError(f"no sizes of a tiny {kind}: {errors[0]}")


def in_turn(model: Any) -> None:
    """Fused experts know no float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def _configs(kind: str) -> Iterator[Any]:
    """Small configurations of a type, made when they are called, the likeliest first."""
    if kind in _KNOWN:
        yield lambda: _KNOWN[kind]
        return
    made = CONFIG_MAPPING[kind]
    usual = {name: None for name in TINY if hasattr(made, name)} | vars(made())
    for left_out, head in itertools.product(_LEFT_OUT, (4, 8)):
        wanted = TINY | _SIZES | {"head_dim": head} | _OF_ONE.get(kind, {})
        known = {*usual, *made.attribute_map}
        sizes = {name: size for name, size in wanted.items() if name in known and name not in left_out}
        if "num_hidden_layers" in sizes:
            deep = usual.get("num_hidden_layers")
            sizes = {
                name: _three(value) for name, value in usual.items() if _is_by_layer(value, deep)
            } | sizes
        yield lambda sizes=sizes: made(**sizes)


def _is_by_layer(value: Any, deep: Any) -> bool:
    return isinstance(value, list) and len(value) == deep


def _three(values: list[Any]) -> list[Any]:
    """Three of them, of as many kinds as there are, in their order."""
    places = sorted(range(len(values)), key=lambda at: (values.index(values[at]) != at, at))[:3]
    return [values[at] for at in sorted(places)]
