"""Decoders and encoder-decoders that answer, made small by transformers itself."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from driftlens.models.texts import TextProcessor
from tests.quick import paced
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.small import small
from tests.zoo.tokenizers import word_tokenizer

QUESTIONS = ("is it red", "no", "is green it blue yes no red")


NEW = 6


def llama(vocabulary: int) -> Any:
    sizes = {"vocab_size": vocabulary, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return small("LlamaForCausalLM", initializer_range=0.6, **sizes)


def t5(vocabulary: int) -> Any:
    settings = {"decoder_start_token_id": 0, "initializer_factor": 3.0}
    return small("T5ForConditionalGeneration", vocab_size=vocabulary, **settings)


def plain(model: Any, reader: TextProcessor, question: str) -> list[int]:
    """One question at a time, the whole row anew for every token."""
    row = torch.tensor(reader.question_tokens([question]))
    answer: list[int] = []
    while len(answer) < NEW and (not answer or answer[-1] not in reader.ends):
        if reader.form == "decoder":
            given = {"input_ids": torch.cat((row, torch.tensor([answer], dtype=torch.long)), dim=1)}
        else:
            given = {"input_ids": row, "decoder_input_ids": torch.tensor([[reader.start, *answer]])}
        with torch.no_grad():
            answer.append(int(model(**given).logits[0, -1].argmax()))
    return answer


TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def of(kind: str, *without: str, **settings: Any) -> Any:
    """A small configuration of a model type, without what it does not know, and with settings of its own."""
    known = {key: value for key, value in TINY.items() if key not in without}
    return transformers.AutoConfig.for_model(kind, **known | settings)


_WIDE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads",),
)
_GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64}
_GPT_WITHOUT = (*_WIDE, "head_dim", "max_position_embeddings")
_FALCON = ("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 4, "linear_conv_kernel_dim": 4},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
    "mamba_chunk_size": 8,
}

GEMMA4 = {
    **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "global_head_dim": 8},
    **{"num_hidden_layers": 4, "sliding_window": 3, "final_logit_softcapping": 2.0},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

GEMMA3N = {key: size for key, size in GEMMA4.items() if key != "global_head_dim"} | {
    **{"laurel_rank": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    **{"altup_num_inputs": 3, "altup_active_idx": 1},
}

CONFIGS = {
    "Llama": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "Llama, untied": transformers.LlamaConfig(**TINY, tie_word_embeddings=False),
    "Mistral": transformers.MistralConfig(**TINY, sliding_window=3),
    "Qwen2": transformers.Qwen2Config(**TINY),
    "Qwen3": transformers.Qwen3Config(**TINY),
    "Gemma": transformers.GemmaConfig(**TINY),
    "Gemma 2": transformers.Gemma2Config(**TINY, **SLIDING, final_logit_softcapping=2.0),
    "Gemma 3": transformers.Gemma3TextConfig(**TINY, **SLIDING),
    "Phi-3": transformers.Phi3Config(**TINY),
    "OLMo 2": of("olmo2", "head_dim"),
    "SmolLM3": transformers.SmolLM3Config(**TINY),
    "GPT-2": of("gpt2", *_GPT_WITHOUT, **_GPT),
    "Granite": of(
        *("granite", "head_dim"),
        **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    ),
    "Phi": of("phi", "head_dim"),
}
"""A model of each family, small enough for a window to matter."""

MORE = {
    "OLMo": of("olmo", "head_dim"),
    "OLMo 3": of("olmo3", "head_dim", **SLIDING),
    "GLM": of("glm", partial_rotary_factor=0.5),
    "GLM 4": of("glm4"),
    "Cohere": of("cohere", "head_dim", logit_scale=0.3, use_qk_norm=True),
    "Cohere 2": of("cohere2", logit_scale=0.3, **SLIDING),
    "StarCoder 2": of("starcoder2", "head_dim"),
    "GPT-NeoX": of("gpt_neox", "num_key_value_heads", "head_dim"),
    "OPT": of("opt", "intermediate_size", "num_key_value_heads", "head_dim", ffn_dim=24, word_embed_proj_dim=16),
    "OPT, projected": of(
        *("opt", "intermediate_size", "num_key_value_heads", "head_dim"),
        **{"ffn_dim": 24, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
    "Falcon": of("falcon", *_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "Falcon, old": of("falcon", *_FALCON, new_decoder_architecture=False, multi_query=True),
    "Falcon, ALiBi": of("falcon", *_FALCON, new_decoder_architecture=False, alibi=True, parallel_attn=False),
    "StableLM": of("stablelm", "head_dim", use_parallel_residual=True, qk_layernorm=True),
    "EXAONE 4": of("exaone4", "head_dim", **SLIDING),
    "Ministral": of("ministral", **SLIDING),
    "Ministral 3": of("ministral3"),
    "Seed-OSS": of("seed_oss"),
    "Nemotron": of("nemotron", "head_dim"),
    "Helium": of("helium"),
    "BLOOM": of("bloom", *_GPT_WITHOUT, hidden_size=16, n_layer=3, n_head=4),
    "MPT": of("mpt", *_GPT_WITHOUT, d_model=16, n_layers=3, n_heads=4, max_seq_len=64),
    "GPT-J": of("gptj", *_GPT_WITHOUT, **_GPT, rotary_dim=4),
    "CodeGen": of("codegen", *_GPT_WITHOUT, **_GPT, rotary_dim=4, n_ctx=64),
    "GPT-Neo": of(
        *("gpt_neo", *_GPT_WITHOUT),
        **{"hidden_size": 16, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 64},
        **{"attention_types": [[["global", "local", "global"], 1]], "window_size": 3},
    ),
    "Qwen3.5": of("qwen3_5_text", **LINEAR),
    "Nemotron-H": of(
        *("nemotron_h", "num_hidden_layers"),
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "chunk_size": 8},
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
    ),
    "Apertus": of("apertus", "head_dim"),
    "Hunyuan": of("hunyuan_v1_dense"),
    "ERNIE 4.5": of("ernie4_5"),
    "Gemma 4": of("gemma4_text", **GEMMA4 | {"num_kv_shared_layers": 2}),
    "Gemma 4, dense": of("gemma4_text", **GEMMA4 | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    "Gemma 3n": of("gemma3n_text", **GEMMA3N),
    "LFM2": of("lfm2", "head_dim", layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
    "Falcon-H1": of("falcon_h1", **_MAMBA | {"mamba_d_ssm": 32}),
    "Bamba": of("bamba", "head_dim", attn_layer_indices=[1], **_MAMBA),
    "Granite 4, dense": of(
        *("granitemoehybrid", "head_dim"),
        **_MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 24},
        layer_types=["mamba", "attention", "mamba"],
    ),
    "MiniCPM3": of(
        "minicpm3",
        "head_dim",
        "num_key_value_heads",
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    "NanoChat": of("nanochat", "head_dim"),
    "GPT": of("openai-gpt", *_GPT_WITHOUT, **_GPT),
    "ModernBERT-decoder": of("modernbert-decoder", "num_key_value_heads", "head_dim", **SLIDING),
    "Mamba": of("mamba", *_GPT_WITHOUT, hidden_size=16, num_hidden_layers=3, state_size=4),
    "Mamba 2": of(
        *("mamba2", *_GPT_WITHOUT),
        **{"hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, "num_heads": 4, "head_dim": 8},
        **{"n_groups": 2, "chunk_size": 8},
    ),
}
"""Families beside these, of which no other test makes use."""


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
        **_LOCAL | _MAMBA,
        shared_intermediate_size=24,
        layer_types=["mamba", "attention", "mamba"],
    ),
    "Phi-3.5-MoE": of("phimoe", "head_dim", **_LOCAL),
    "LFM2-MoE": of("lfm2_moe", "head_dim", **_SMALL, **_CONV),
    "Hunyuan": of("hunyuan_v1_moe", num_experts=4, moe_topk=2),
    "MiniMax": of("minimax", **_LOCAL),
    "MiniMax-M2": of("minimax_m2", **_LOCAL),
    "dots.llm1": of("dots1", "head_dim", **_GROUPED | {"n_group": 1}),
    "ERNIE 4.5 MoE": of(
        *("ernie4_5_moe", "head_dim"),
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1},
        **{"moe_layer_start_index": 0, "moe_layer_end_index": 1},
    ),
    "Jamba": of(
        *("jamba", "head_dim"),
        **TWO_OF_FOUR | {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2},
        **{"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
}
FLOAT32 = (
    *(
        "bloom",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gpt_neo",
        "mpt",
        "mamba",
        "mamba2",
        "qwen3_5_text",
    ),
    *(config.model_type for config in MIXTURES.values()),
)
"""Of these parts compute in float32 whatever the model's dtype, and round by how many rows there are."""
"""A mixture of experts of each family; of 4 experts two take every token, of Llama 4 one."""


UNDIFFERENTIABLE = ("BLOOM",)
"""A function of its own."""


EACH_KIND = (
    *("Llama", "Gemma 2", "GPT-2", "NanoChat", "Mamba", "Qwen3.5"),
    *("Mixtral", "gpt-oss", "DeepSeek-V3", "Phi-3.5-MoE"),
)
"""A family of each kind of block: attention, windows, places that are counted, states, mixtures."""
EACH_LAYOUT = ("Phi-3", "Falcon", "OPT, projected")
"""Families whose files lay weights out in further ways: fused, interleaved, projected, shared, stacked experts."""


def families(*fast: str, some: Collection[str] | None = None) -> list[Any]:
    """Parameters of tests that show what works with each: all but `fast` ones slow, all but `some` `make every`'s."""
    return [
        pytest.param(
            config,
            id=name,
            marks=[
                pytest.mark.family(name.partition(",")[0]),
                *paced(name, fast, some),
                *([pytest.mark.shows(attribution="prefix swaps")] if name in UNDIFFERENTIABLE else []),
            ],
        )
        for name, config in (CONFIGS | MORE | MIXTURES).items()
    ]


def in_float64(folder: Path) -> Any:
    """The model of a folder as its library runs it; fused experts of a mixture know no float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def saved(config: Any, folder: Path, seed: int = 0) -> None:
    model = perturbed(with_seed(lambda: transformers.AutoModelForCausalLM.from_config(config))(), seed, 0.2)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
