"""Small folders of sentence-transformers, laid out as that library saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.zoo.cases import perturbed, with_seed
from tests.zoo.small import small
from tests.zoo.tokenizers import word_tokenizer

DECODER = {"head_dim": 8, "num_key_value_heads": 1, "bos_token_id": 2, "eos_token_id": 3}
EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", {}),
    "MPNet": ("MPNetModel", {}),
    "XLM-RoBERTa": ("XLMRobertaModel", {}),
    "ModernBERT embeddings": (
        "ModernBertModel",
        {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "NomicBERT": ("NomicBertModel", {}),
    "GTE": ("GteModel", {}),
    "Qwen3-Embedding": ("Qwen3Model", DECODER),
    "EmbeddingGemma": ("Gemma3TextModel", DECODER | {"use_bidirectional_attention": True}),
}
"""By family, the transformer's class in transformers, and what of its configuration is not as small models have it."""


def embedder(family: str, seed: int, scale: float = 0.2) -> Any:
    """The transformer of a family, its weights moved away from those that every seed begins with."""
    name, settings = EMBEDDERS[family]
    sizes = {"vocab_size": len(tokenizer_of(family)), "pad_token_id": 0, "max_position_embeddings": 24}
    return perturbed(with_seed(lambda: small(name, **sizes, **settings))().eval(), seed, scale)


def tokenizer_of(family: str) -> Any:
    """The tokenizer of a family, whose decoders end every text."""
    is_decoder = "head_dim" in EMBEDDERS[family][1]
    return word_tokenizer("decoder" if is_decoder else "encoder", ends_texts=is_decoder)


def sentences(
    root: Path,
    seed: int,
    *,
    family: str = "BERT",
    inside: str = "",
    pooling: dict[str, Any] | None = None,
    dense: float = 1.0,
    settings: dict[str, Any] | None = None,
    changes: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """A folder whose transformer lies in the root or in a folder `inside`, with Pooling, Dense and Normalize.

    `dense` scales its map, `settings` are those of the library for the whole, `changes` of any file by its name.
    """
    model = embedder(family, seed)
    model.save_pretrained(root / inside)
    tokenizer_of(family).save_pretrained(root / inside)
    width, places = model.config.hidden_size, [inside, "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [
        {"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, place) in enumerate(zip(("Transformer", "Pooling", "Dense", "Normalize"), places, strict=True))
    ]
    for place in places[1:]:
        (root / place).mkdir(exist_ok=True)
    stated = {"word_embedding_dimension": width} | (pooling or {"pooling_mode_cls_token": True})
    modes = stated.get("pooling_mode", "")
    entries = width * (1 if isinstance(modes, str) else len(modes))
    entries = entries if modes else width * max(1, sum(stated.get(key) is True for key in stated if "mode" in key))
    matrix = dense * torch.randn(width, entries, generator=torch.Generator().manual_seed(0))
    weights = {"linear.weight": matrix, "linear.bias": torch.zeros(width)}
    save_file(weights, root / "2_Dense" / "model.safetensors", {"format": "pt"})
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    contents: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": stated,
        "2_Dense/config.json": {"in_features": entries, "out_features": width, "bias": True} | activation,
        "config_sentence_transformers.json": settings or {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
        f"{inside or '.'}/sentence_bert_config.json": {"max_seq_length": 7, "do_lower_case": False},
    }
    for name, content in contents.items():
        more = (changes or {}).get(name, {})
        (root / name).write_text(json.dumps(content | more if isinstance(content, dict) else content))
    return root
