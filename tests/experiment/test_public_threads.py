"""Broken merges from public threads, rebuilt small: the checklist names the cause, and its remedy clears the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from driftlens.experiment.checklist import check_merge_files
from tests.experiment.test_checklist import (
    BASE,
    BIRDS,
    CARS,
    CLEAN,
    LAYERS,
    ROWS,
    Models,
    config,
    merged,
    models_of,
    write_adapter,
)

TABLE = "model.embed_tokens.weight"


@dataclass
class Thread:
    """A merge as reported and after the remedy; the line that names the cause, and what to do."""

    broken: Models
    mended: Models
    subject: str
    text: str
    hint: str
    finish: Callable[[Path, bool], dict[str, str]] = lambda root, is_mended: {}


def with_one_expert(change: Callable[[str, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Models:
    """A merge of a single change, as merge_and_unload makes it."""
    base = {key: value.bfloat16() for key, value in BASE.items()}
    made = {key: (value.float() + change(key, CARS[key])).to(dtype) for key, value in base.items()}
    return replace(models_of(base, CARS, BIRDS), tensors={**models_of(base, CARS, BIRDS).tensors, "merged": made})


def other_rotary_base(theta: float) -> Models:
    stated = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return config("cars", **stated)


def adapter(root: Path, is_mended: bool) -> dict[str, str]:
    place = write_adapter(root / "adapter", {0: 0.1, 1: 0.1, 2: 0.1})
    if not is_mended:
        file = root / "adapter" / "adapter_model.safetensors"
        save_file({key: torch.empty(0) for key in load_file(file)}, file)
    return {"cars": place}


def tokenizer(root: Path, is_mended: bool) -> dict[str, str]:
    for name in CLEAN.tensors:
        size = ROWS + 2 * (name == "merged" and not is_mended)
        stated = {"model": {"vocab": {f"w{number}": number for number in range(size)}}, "added_tokens": []}
        (root / name / "tokenizer.json").write_text(json.dumps(stated))
    return {}


def with_trained_head(*, is_tied: bool) -> Models:
    tensors = {**CLEAN.tensors["merged"], "lm_head.weight": CLEAN.tensors["merged"][TABLE] + 0.1}
    models = config("merged", tie_word_embeddings=is_tied)
    return replace(models, tensors={**models.tensors, "merged": tensors})


THREADS = {
    # A model of RoPE base 20,000,000 merged with models of 500,000.
    "arcee-ai/mergekit#325": Thread(
        *(other_rotary_base(2e7), other_rotary_base(1e4)),
        *("configuration", "rope_theta 20000000.0", "Merge models of one configuration"),
    ),
    # Adapters that DeepSpeed ZeRO-3 saved without their values.
    "huggingface/peft#1443": Thread(*(CLEAN, CLEAN, "expert of cars", "have shape [0]", "zero_to_fp32"), adapter),
    # A model saved in the same way; the thread shows an adapter, this is the whole model.
    "OpenRLHF/OpenRLHF#651": Thread(
        merged(lambda key, value: torch.empty(0) if "mlp" in key else value),
        *(CLEAN, "tensors", f"{LAYERS} tensors of shape [0]", "zero_to_fp32"),
    ),
    # The merged model is identical to the base; the adapters were not applied.
    "unslothai/unsloth#869": Thread(
        merged(lambda key, _: BASE[key]), CLEAN, "merged model", "equals the base", "names of adapters"
    ),
    # Ids from 64,000 on, in a model of 64,000 rows.
    "arcee-ai/mergekit#428": Thread(
        CLEAN, CLEAN, "vocabulary", f"ids up to {ROWS + 1}, but {TABLE} has {ROWS} rows", "these rows", tokenizer
    ),
    # Rows of tokens that no model uses are 0 / 0.
    "arcee-ai/mergekit#73": Thread(
        merged(lambda key, value: value.index_fill(0, torch.tensor([ROWS - 1]), torch.nan) if key == TABLE else value),
        *(CLEAN, "values", f"NaN or infinity in 1 tensor: {TABLE}", "tokenizer"),
    ),
    # A head that was trained beside its table, in a model whose configuration ties both.
    "huggingface/peft#1035": Thread(
        *(with_trained_head(is_tied=True), with_trained_head(is_tied=False)),
        *("tied head", "the stored head is lost", "tie_word_embeddings to false"),
    ),
    # Changes of 0.1 % of a weight merged into bfloat16, whose step is 0.4 to 0.8 %.
    "huggingface/peft#1388": Thread(
        with_one_expert(lambda key, value: 0.02 * value, torch.bfloat16),
        with_one_expert(lambda key, value: 0.02 * value),
        *("rounding", "merged model", "--out-dtype float32"),
    ),
    # An update scaled by alpha / sqrt(r), which was trained with alpha / r.
    "paiml/aprender#2189": Thread(
        *(with_one_expert(lambda key, value: 4 * value), with_one_expert(lambda key, value: value)),
        *("merged model", "coefficients", "LoRA scale"),
    ),
}


@pytest.mark.parametrize("name", THREADS)
def test_the_checklist_names_cause_and_remedy_of_a_merge_that_someone_reported(name: str, tmp_path: Path) -> None:
    thread, found = THREADS[name], []
    for is_mended, models in enumerate((thread.broken, thread.mended)):
        (root := tmp_path / str(is_mended)).mkdir()
        base, experts, merge = models.save(root)
        experts |= thread.finish(root, bool(is_mended))
        checklist = check_merge_files(base, experts, merge)
        found.append([line for line in checklist.findings if line.level != "ok" and line.subject == thread.subject])
    assert any(thread.text in line.text and thread.hint in line.hint for line in found[0]), found[0]
    assert not found[1]
