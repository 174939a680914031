"""No refusal sends to a loader that refuses, too: hints are followed, for all model types of transformers."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import ViTImageProcessor
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from driftlens.base.access import Access
from driftlens.base.errors import DriftLensError, IncompatibleModelsError, SpecError
from driftlens.models.architecture import load_architecture
from tests.zoo.tokenizers import word_tokenizer

_SHORT = re.compile(r"(num_)?(hidden_|encoder_|decoder_)?layers?|n_layers?|depth|num_(en|de)coder_layers")
_BY_LAYER = ("layer_types", "block_types", "layers_block_type", "mlp_layer_types")
_TASKS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    auto.MODEL_MAPPING,
)
FEW = ("bert", "funnel", "gpt2", "mixtral", "wav2vec2")
"""Sent on, hopeless, causal, a mixture, one that reads sound."""
GROUPS = 12


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
        elif key.endswith("_token_id"):
            config[key] = 0 if key in ("pad_token_id", "decoder_start_token_id") else 2
    return config


def _described(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """A type's first model with a head, or its core, by class; none where defaults don't do."""
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # whatever configurations ask for that have no defaults
        return []
    stated = _short(config.to_dict())
    if stated.get("is_encoder_decoder"):
        stated["decoder_start_token_id"] = 0  # which is in every folder, if not among the defaults
    names = []
    for mapping in _TASKS:
        with contextlib.suppress(ValueError):  # the library lists some that it lacks
            if type(config) in mapping:
                entry = mapping[type(config)]
                names.append((entry[0] if isinstance(entry, tuple) else entry).__name__)
    return [(name, stated | {"model_type": kind, "architectures": [name]}) for name in names[:1]]


def _refusal(loader: str, folder: Path, blocks: str | None = None) -> DriftLensError | None:
    try:
        load_architecture(loader, str(folder), blocks=blocks, access=Access(offline=True))
    except DriftLensError as error:
        return error
    return None


def _follow(folder: Path) -> str:
    """What is wrong with where a refusal sends; "" where nothing is."""
    first = _refusal("hf-clip", folder)
    if first is None:
        return ""
    if not first.hint:
        return f"no hint: {first}"
    sent = re.search(r"^(?:Its loader is|The loader) (\S+?)[: ]", first.hint)
    if sent is None:
        return ""
    second = _refusal(sent[1], folder)
    if isinstance(second, SpecError) and (path := re.search(r"blocks='([^']+)'", second.hint)):
        second = _refusal(sent[1], folder, path[1])
    return "" if second is None else f"sent to {sent[1]}: {second}"


def _check(kinds: list[str], folder: Path) -> None:
    word_tokenizer("decoder").save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)
    wrong, count = {}, 0
    for kind in kinds:
        for name, config in _described(kind):
            count += 1
            (folder / "config.json").write_text(json.dumps(config, default=str))
            if reason := _follow(folder):
                wrong[kind, name] = reason
    assert count > len(kinds) // 2 and not wrong


def test_a_refusal_sends_to_a_loader_that_takes_the_model(tmp_path: Path) -> None:
    _check(list(FEW), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_model_type_of_transformers_is_sent_in_vain(tmp_path: Path, group: int) -> None:
    _check(sorted(CONFIG_MAPPING)[group::GROUPS], tmp_path)


def test_where_a_loader_refuses_too_its_reason_stands_in_the_hint(tmp_path: Path) -> None:
    word_tokenizer("decoder").save_pretrained(tmp_path)
    for kind, reason in {"wav2vec2": "reads input_values", "funnel": "No list of"}.items():
        *_, (_, config) = _described(kind)
        (tmp_path / "config.json").write_text(json.dumps(config))
        refusal = _refusal("hf-clip", tmp_path)
        assert isinstance(refusal, IncompatibleModelsError) and reason in refusal.hint
        assert refusal.hint.startswith("Nor does the loader hf-auto take it")
