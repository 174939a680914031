"""Decoders and encoder-decoders that answer, made small by transformers itself."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

from driftlens.models.language.texts import TextReader
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


def plain(model: Any, reader: TextReader, question: str) -> list[int]:
    """One question at a time, the whole row anew for every token."""
    row = torch.tensor(reader.questions([question]))
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
    "OLMo 2": transformers.Olmo2Config(**{key: value for key, value in TINY.items() if key != "head_dim"}),
    "SmolLM3": transformers.SmolLM3Config(**TINY),
}
"""A model of each family, small enough for a window to matter."""


def saved(config: Any, folder: pathlib.Path, seed: int = 0) -> None:
    model = perturbed(with_seed(lambda: transformers.AutoModelForCausalLM.from_config(config))(), seed, 0.2)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
