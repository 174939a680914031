"""No refusal sends to a loader that refuses, too: hints are followed, for all model types of transformers."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from driftlens.base.access import Access
from driftlens.base.errors import DriftLensError
from driftlens.models.architecture import load_architecture
from tests.zoo.tokenizers import word_tokenizer

_SHORT = re.compile(r"(num_)?(hidden_|encoder_|decoder_)?layers?|n_layers?|depth|num_(en|de)coder_layers")
_BY_LAYER = ("layer_types", "block_types", "layers_block_type", "mlp_layer_types")
_LARGE = {"intermediate_size": (16_000, 256), "image_size": (1008, 336)}
"""Sizes from which computing on them takes a quarter of a minute, and what does in their place."""
_TASKS = (
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    auto.MODEL_MAPPING,
)
DEAR = "gemma3n_vision"
"""Pictures through its tower, a MobileNet of 300 million weights, take two minutes."""


def _short(config: dict[Any, Any]) -> dict[str, Any]:
    """A configuration of two layers that knows the words of the tokenizer beside it."""
    for key, value in config.items():
        if isinstance(value, dict):
            _short(value)
        elif not isinstance(key, str):  # of labels or layers
            continue
        elif isinstance(value, int) and _SHORT.fullmatch(key):
            config[key] = 2
        elif isinstance(value, list) and key in _BY_LAYER:
            config[key] = value[:2]
        elif key == "vocab_size":
            config[key] = 26
        elif key in _LARGE and isinstance(value, int) and value >= _LARGE[key][0]:
            config[key] = _LARGE[key][1]
        elif key.endswith("_token_id"):
            config[key] = 0 if key in ("pad_token_id", "decoder_start_token_id") else 2
    return config


def _described(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """A type's models with each kind of head, and its core, by class; none where defaults don't do."""
    if kind == DEAR:
        return []
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # whatever configurations ask for that have no defaults
        return []
    stated = _short(config.to_dict())
    if stated.get("is_encoder_decoder"):
        stated["decoder_start_token_id"] = 0  # which is in every folder, if not among the defaults
    named = []
    for mapping in _TASKS:
        with contextlib.suppress(ValueError):  # the library lists some that it lacks
            if type(config) in mapping:
                entry = mapping[type(config)]
                named.append((entry[0] if isinstance(entry, tuple) else entry).__name__)
    return [(name, stated | {"model_type": kind, "architectures": [name]}) for name in dict.fromkeys(named)]


def _refusal(loader: str, folder: Path, blocks: str | None = None) -> DriftLensError | None:
    try:
        load_architecture(loader, str(folder), blocks=blocks, access=Access(offline=True))
    except DriftLensError as error:
        return error
    return None


@pytest.mark.parametrize("start", ["hf-clip", "hf-encoder"])
def test_a_loader_that_has_refused_is_not_named_again(start: str, tmp_path: Path) -> None:
    """BERT with the head of a language model: what else reads BERT doesn't read that."""
    word_tokenizer("encoder").save_pretrained(tmp_path)
    heads = dict(_described("bert"))
    (tmp_path / "config.json").write_text(json.dumps(heads["BertLMHeadModel"]))
    refusal = _refusal(start, tmp_path)
    assert refusal is not None and "Its loader is" not in refusal.hint and "live modules" in refusal.hint
