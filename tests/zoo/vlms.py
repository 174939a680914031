"""Vision-language models, made small by transformers itself, with questions about words or pictures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import SLIDING, TINY
from tests.zoo.suite import files_of, spec_of_folders
from tests.zoo.tokenizers import WORDS, word_tokenizer

TASKS = {"a": ("yes", "no"), "b": ("red", "green", "blue")}
IMAGE = 39
"""The token that stands for a piece of an image."""
_TOWER: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
_QWEN_IDS = {"video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36}
_QWEN_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16, "depth": 3},
    **{"patch_size": 4, "spatial_merge_size": 2},
}


def _of(kind: str, tower: Any, text: Any, **settings: Any) -> Any:
    ids = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    return transformers.AutoConfig.for_model(kind, vision_config=tower, text_config=text, **ids | settings)


def _text(kind: str, *without: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": kind, **{key: size for key, size in TINY.items() if key not in without}, **settings}


def _idefics(kind: str) -> Any:
    tower = {"model_type": f"{kind}_vision", **_TOWER}
    return _of(kind, tower, _text("llama"), scale_factor=2, pad_token_id=0, tie_word_embeddings=False)


VLMS = {
    "LLaVA": lambda: _of(
        "llava", {"model_type": "clip_vision_model", **_TOWER}, _text("llama"), tie_word_embeddings=False
    ),
    "Gemma 3 with images": lambda: _of(
        "gemma3",
        {"model_type": "siglip_vision_model", **_TOWER},
        _text(
            "gemma3_text",
            sliding_window=3,
            layer_types=SLIDING["layer_types"],
        ),
        **{"boi_token_index": 37, "eoi_token_index": 38, "mm_tokens_per_image": 4},
    ),
    "Qwen2.5-VL": lambda: _of(
        "qwen2_5_vl",
        _QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        _text("qwen2_5_vl_text", "head_dim", rope_parameters=_MROPE),
        **_QWEN_IDS,
    ),
    "Qwen3-VL": lambda: _of(
        "qwen3_vl",
        _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        _text("qwen3_vl_text", rope_parameters=_MROPE),
        **_QWEN_IDS,
    ),
    "InternVL 3": lambda: _of(
        "internvl",
        {"model_type": "internvl_vision", **_TOWER},
        _text("qwen2", "head_dim"),
        downsample_ratio=0.5,
    ),
    "Mistral 3": lambda: _of(
        "mistral3", {"model_type": "pixtral", "head_dim": 8, **_TOWER}, _text("mistral"), spatial_merge_size=2
    ),
    "SmolVLM": lambda: _idefics("smolvlm"),
    "Idefics 3": lambda: _idefics("idefics3"),
}
"""A configuration of each family."""


def vlms(*fast: str) -> list[Any]:
    """Parameters of tests that show what works with each family; all but `fast` ones are slow."""
    slow = {name: [] if name in fast else [pytest.mark.slow] for name in VLMS}
    return [pytest.param(name, id=name, marks=[pytest.mark.family(name), *slow[name]]) for name in VLMS]


def model_of(name: str) -> Any:
    """A model of a family with random weights."""
    return with_seed(lambda: transformers.AutoModelForImageTextToText.from_config(VLMS[name]()))()


def saved_vlms(name: str, folder: Path) -> None:
    """A base and an expert for each task, near it."""
    base = perturbed(model_of(name), 0, 0.2)
    for at, part in enumerate(("base", *TASKS)):
        model = perturbed(base, at, 0.1) if at else base
        model.save_pretrained(folder / part)
        word_tokenizer().save_pretrained(folder / part)


def text_spec(folder: Path, **more: Any) -> dict[str, Any]:
    """A spec of the models in a folder and questions in words, whose files are written."""
    for first, (task, answers) in enumerate(TASKS.items()):
        questions = [" ".join(some) for some in itertools.permutations(WORDS[5 * first : 5 * first + 5], 3)]
        rows = [{"input": text, "target": answers[at % len(answers)]} for at, text in enumerate(questions)]
        for split, part in (("train", rows[::2]), ("test", rows[1::2])):
            (folder / f"{task}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    data = {task: files_of(folder, task, classes=True) for task in TASKS}
    data["defaults"] = {"n": 12, "n_diagnosis": 6, "batch_size": 4}
    experts = {task: folder / task for task in TASKS}
    return spec_of_folders("hf-vlm", folder / "base", experts, data, compute={"dtype": "float64"}) | more
