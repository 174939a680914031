"""Causal language models whose blocks mix experts, small, and live models of them in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.zoo.cases import Case, with_seed
from tests.zoo.decoders import LINEAR, MAMBA, of

TWO_OF_FOUR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL: dict[str, Any] = TWO_OF_FOUR | {"moe_intermediate_size": 12}
_SHARED: dict[str, Any] = _SMALL | {"shared_expert_intermediate_size": 8}
_GROUPED: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 4, "v_head_dim": 4},
}
_CONV = {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]}

MIXTURES = {
    "Mixtral": of("mixtral", "head_dim", **_LOCAL),
    "Qwen2-MoE": of("qwen2_moe", "head_dim", **_SHARED),
    "Qwen3-MoE": of("qwen3_moe", **_SMALL),
    "Qwen3-Next": of("qwen3_next", **_SHARED, **LINEAR),
    "Qwen3.5-MoE": of("qwen3_5_moe_text", **_SHARED, **LINEAR),
    "OLMoE": of("olmoe", "head_dim", **TWO_OF_FOUR),
    "FlexOlmo": of("flex_olmo", "head_dim", **TWO_OF_FOUR),
    "gpt-oss": of(
        *("gpt_oss",),
        **_LOCAL,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=3,
    ),
    "DeepSeek-V2": of("deepseek_v2", "head_dim", **_GROUPED, **_LATENT),
    "DeepSeek-V3": of("deepseek_v3", "head_dim", **_GROUPED, **_LATENT),
    "Llama 4": of(
        "llama4_text",
        **_LOCAL | {"num_experts_per_tok": 1},
        intermediate_size_mlp=16,
        interleave_moe_layer_step=1,
    ),
    "GLM4-MoE": of("glm4_moe", **_GROUPED | {"n_group": 1}),
    "Granite MoE": of("granitemoe", "head_dim", **_LOCAL),
    "Granite 4": of(
        *("granitemoehybrid", "head_dim"),
        **_LOCAL | MAMBA,
        shared_intermediate_size=24,
        layer_types=["mamba", "attention", "mamba"],
    ),
    "ERNIE 4.5": of(
        *("ernie4_5_moe", "head_dim"),
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1},
    ),
    "Phi-3.5-MoE": of("phimoe", "head_dim", **_LOCAL),
    "LFM2-MoE": of("lfm2_moe", "head_dim", **_SMALL, **_CONV),
    "Hunyuan": of("hunyuan_v1_moe", num_experts=4, moe_topk=2),
    "MiniMax": of("minimax", **_LOCAL),
    "MiniMax-M2": of("minimax_m2", **_LOCAL),
    "dots.llm1": of("dots1", "head_dim", **_GROUPED | {"n_group": 1}),
    "Jamba": of(
        *("jamba", "head_dim"),
        **TWO_OF_FOUR | {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2},
        **{"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
}
"""A mixture of each family; of 4 experts two take every token, of Llama 4 one."""


def mixtures(*fast: str) -> list[Any]:
    """Their names as parameters of a test, all but `fast` ones slow."""
    return [
        pytest.param(name, marks=[pytest.mark.family(name), *([] if name in fast else [pytest.mark.slow])])
        for name in MIXTURES
    ]


def tokens(generator: torch.Generator, n: int) -> dict[str, torch.Tensor]:
    """Texts of 12 tokens, one of them padded, as their tokenizer makes them."""
    mask = torch.ones(n, 12, dtype=torch.long)
    mask[-1, 8:] = 0
    return {"input_ids": torch.randint(4, 40, (n, 12), generator=generator) * mask, "attention_mask": mask}


def case(name: str) -> Case:
    """A mixture as a live model in float64; the chain is made of three texts."""
    from driftlens.models.families.causal import causal_chain

    def built() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(MIXTURES[name]).double().eval()
        model.config._experts_implementation = "eager"  # the others know no float64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(
                    0.1 * torch.rand_like(parameter)
                )
        return model

    example = tokens(torch.Generator().manual_seed(0), 3)
    return Case(with_seed(built), lambda module: causal_chain(module, example)[0], tokens)
