"""Encoder-decoders of transformers, made small, and folders of them as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.quick import paced
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import TINY
from tests.zoo.tokenizers import word_tokenizer

_TOKENS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
_BART = _TOKENS | {
    **{
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
        "max_position_embeddings": 64,
        "d_model": 16,
    },
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24},
}
_T5 = _TOKENS | {
    **{"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "initializer_factor": 3.0},
    **{"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 3},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
}
_STACK = TINY | {
    **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    # Its library's softmax, in float32, makes not-a-number of a row of float64 that padding fills beyond the window.
    "sliding_window": 16,
}
_KINDS: dict[str, dict[str, Any]] = {
    "t5": _T5 | {"scale_decoder_outputs": False},
    "mt5": _T5,
    "umt5": _T5 | {"scale_decoder_outputs": False},
    "longt5": _T5,
    "switch_transformers": _T5,
    "led": _BART | {"attention_window": 4},
    "mbart": _BART | {"scale_embedding": True},
    "t5gemma": _TOKENS | {"encoder": _STACK, "decoder": _STACK},
}
"""Settings of model types that are not those of a BART."""
NAMES = {
    **{"T5": "t5", "mT5": "mt5", "UMT5": "umt5", "BART": "bart", "mBART": "mbart", "Pegasus": "pegasus"},
    **{"Marian": "marian", "M2M100, NLLB": "m2m_100", "BlenderBot": "blenderbot"},
    **{"BlenderBot, small": "blenderbot-small", "PLBart": "plbart", "MVP": "mvp"},
    "T5Gemma": "t5gemma",
}
"""Families that are followed, and their model types."""


def small_config(kind: str) -> Any:
    return transformers.AutoConfig.for_model(kind, **_KINDS.get(kind, _BART))


def families(*fast: str, some: Collection[str] | None = None) -> list[Any]:
    """Parameters of tests that show what works with each: all but `fast` ones slow, all but `some` `make every`'s."""
    return [
        pytest.param(name, marks=[pytest.mark.family(name), *paced(name, fast, some)])
        for name in NAMES
        if name != "T5"
    ]


def model(name: str, seed: int = 0) -> Any:
    """One with random weights, those that start as zeros, too, and a head of its own where the files of T5 have one."""
    config = small_config(NAMES[name])
    made = with_seed(lambda: transformers.AutoModelForSeq2SeqLM.from_config(config))()
    made = perturbed(made, seed, 0.2).eval()
    for key, value in made.state_dict().items():
        if key == "final_logits_bias":
            value.normal_(generator=torch.Generator().manual_seed(seed))
    if "T5" in name and hasattr(made.lm_head, "weight"):
        made.lm_head.weight = nn.Parameter(made.lm_head.weight.detach().flip(0))
    return made


def save(made: Any, folder: Path) -> Path:
    made.save_pretrained(folder)
    form = "decoder" if made.config.model_type == "bart" else "encoder-decoder"  # whose texts begin with a token
    word_tokenizer(form, ends_texts=True).save_pretrained(folder)
    return folder
