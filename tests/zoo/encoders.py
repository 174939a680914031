"""Encoders of texts, made small by transformers itself, and saved as it saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.cases import perturbed, with_seed
from tests.zoo.small import DEBERTA, small
from tests.zoo.tokenizers import word_tokenizer

TEXTS = ("red green ? is it blue", "yes", "question : no red", "is it green ?")


_OTHERS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


def _builder(name: str, **settings: Any) -> Callable[[int], Any]:
    sizes = {"vocab_size": len(word_tokenizer("encoder")), "max_position_embeddings": 24, "pad_token_id": 0}
    whole = f"{name}ForSequenceClassification"
    return lambda classes: small(whole, num_labels=classes, **sizes, **settings)


ENCODERS: dict[str, Callable[[int], Any]] = {
    "BERT": _builder("Bert"),
    "RoBERTa": _builder("Roberta"),
    "DistilBERT": _builder("DistilBert"),
    "DeBERTa-v3": _builder("DebertaV2", **DEBERTA),
    "ModernBERT": _builder("ModernBert", classifier_pooling="mean", **_OTHERS),
}
"""By family, so many classes -> a classifier; all but the last are those of the loader `hf-encoder`."""

PARAMS = [pytest.param(name, marks=pytest.mark.family(name)) for name in list(ENCODERS)[:-1]]


def encoder(name: str, classes: int = 3, seed: int = 1, scale: float = 0.2) -> Any:
    """A model like a fine-tuned one, all its weights moved away from those that every seed begins with."""
    return perturbed(with_seed(lambda: ENCODERS[name](classes))().eval(), seed, scale)


def save(model: Any, folder: Path, classes: tuple[str, ...] = ()) -> Path:
    """As transformers saves it, tokenizer and class names beside it."""
    if classes:
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {name: row for row, name in enumerate(classes)}
    model.save_pretrained(folder)
    word_tokenizer("encoder").save_pretrained(folder)
    return folder


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the library's own model says of a batch; of the inputs it gets those that its forward names."""
    known = {key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found: Tensor = model(**known).logits
    return found
