"""The real checkpoints, where they are at hand: one model in two formats, its heads and its accuracies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import StateSource
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.heads import file_head, text_head
from tests.quick import few
from tests.zoo.towers import under_transformers_names
from tests.zoo.walking import chain_states

FORMS: dict[str, Callable[[Path, str], tuple[Architecture, StateSource]]] = {
    "transformers": lambda real, model: (
        load_architecture("hf-clip", str(real / "hf" / "base")),
        open_checkpoint(real / "hf" / model),
    ),
    "open_clip": lambda real, model: (
        load_architecture("open-clip", str(real / "open_clip" / "model_config.json")),
        open_checkpoint(real / "open_clip" / f"{model}.safetensors"),
    ),
}
TASKS = ["fashion_mnist", "sign_digits", "omniglot_alphabets", "clothing10"]


def suite(real: Path) -> dict[str, Any]:
    return json.loads((real / "suite.json").read_text())


def features(architecture: Architecture, source: StateSource, images: Any) -> Tensor:
    aligned, module = architecture.align(source), architecture.skeleton
    module.load_state_dict({key: aligned.read(key).float() for key in architecture.keys}, assign=True)
    assert architecture.preprocess is not None
    return chain_states(architecture.chain, module, architecture.preprocess(list(images)))[-1]["hidden"]


def test_both_forms_of_a_real_model_are_one_model(real: Path) -> None:
    """open_clip's files are the other ones, rounded to float16: equal after rounding, close before."""
    for model in ("base", "clothing10"):
        whole = load_file(real / "open_clip" / f"{model}.safetensors")
        visual = {
            key.removeprefix("visual."): value for key, value in whole.items() if key.startswith("visual.")
        }
        theirs = load_file(real / "hf" / model / "model.safetensors")
        converted = under_transformers_names(visual)
        assert converted.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key].half()) for key, value in converted.items())
    images = np.load(real / "data" / "clothing10.npz")["x_test"][:40]
    first, second = (features(*form(real, "clothing10"), images) for form in FORMS.values())
    assert (first - second).norm() / first.norm() < 1e-3


def test_real_class_embeddings_are_made_from_the_names_and_templates(real: Path) -> None:
    stated = suite(real)
    architecture, base = FORMS["open_clip"](real, "base")
    for task in ("sign_digits", "clothing10"):
        names = np.load(real / "data" / f"{task}.npz")["class_names"].tolist()
        made = text_head(architecture.text_tower(base), names, stated["templates"])
        kept = file_head(real / "heads.safetensors", task, stated["logit_scale"], names)
        torch.testing.assert_close(made.embeddings, kept.embeddings, rtol=0, atol=2e-4)  # the base is float16
        assert made.logit_scale == pytest.approx(kept.logit_scale, rel=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", few(["base", "expert"], quick=["expert"]))
@pytest.mark.parametrize("task", few(TASKS, ["clothing10"], some=["omniglot_alphabets"]))
def test_real_accuracies_are_those_measured_when_the_models_were_made(
    real: Path, task: str, model: str, form: str
) -> None:
    data, stated = np.load(real / "data" / f"{task}.npz"), suite(real)
    head = file_head(real / "heads.safetensors", task, stated["logit_scale"], data["class_names"].tolist())
    scores = head.scores(features(*FORMS[form](real, task if model == "expert" else "base"), data["x_test"]))
    accuracy = (scores.argmax(dim=1) == torch.tensor(data["y_test"])).double().mean().item()
    # Float16 weights may turn a single image; the measured values are printed to four digits.
    tolerance = 5e-5 + (1 / len(data["y_test"]) if form == "open_clip" else 0)
    assert accuracy == pytest.approx(stated["test_accuracy"][task][model], abs=tolerance)


def whole_of_transformers(real: Path, folder: Path) -> Path:
    """open_clip's text tower under transformers' names, and its tokenizer as vocabulary and merges."""
    from open_clip import SimpleTokenizer

    folder.mkdir()
    whole = load_file(real / "open_clip" / "base.safetensors")
    visual = {key.removeprefix("visual."): value for key, value in whole.items() if key.startswith("visual.")}
    text = {key: value for key, value in whole.items() if not key.startswith("visual.")}
    save_file(
        {
            key: value.float().contiguous()
            for key, value in {
                **under_transformers_names(visual),
                **text_under_transformers_names(text),
            }.items()
        },
        folder / "model.safetensors",
    )
    tokenizer = SimpleTokenizer()
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {special.get(token, token): index for token, index in tokenizer.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, tokenizer.bpe_ranks), ""]))
    vision = json.loads((real / "hf" / "base" / "config.json").read_text())
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": "quick_gelu"}
    shape = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 49408, "max_position_embeddings": 16}
    config = {"model_type": "clip", "projection_dim": 128, "vision_config": vision}
    config["text_config"] = {**layers, **shape, "eos_token_id": 2, "bos_token_id": 0}  # as OpenAI's files say
    (folder / "config.json").write_text(json.dumps(config))
    processor = (real / "hf" / "base" / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").write_text(processor)
    return folder


def test_transformers_reads_the_real_text_tower_too(real: Path, tmp_path: Path) -> None:
    folder = whole_of_transformers(real, tmp_path / "whole")
    names, templates = (
        np.load(real / "data" / "clothing10.npz")["class_names"].tolist(),
        suite(real)["templates"],
    )
    tower = load_architecture("hf-clip", str(folder)).text_tower(open_checkpoint(folder))
    made = text_head(tower, names, templates)
    architecture, base = FORMS["open_clip"](real, "base")
    expected = text_head(architecture.text_tower(base), names, templates)
    torch.testing.assert_close(made.embeddings, expected.embeddings, rtol=0, atol=1e-5)
    torch.testing.assert_close(F.normalize(made.embeddings), made.embeddings)


def text_under_transformers_names(text: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {
        "logit_scale": text["logit_scale"],
        "text_projection.weight": text["text_projection"].T,
        "text_model.embeddings.token_embedding.weight": text["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": text["positional_embedding"],
        "text_model.final_layer_norm.weight": text["ln_final.weight"],
        "text_model.final_layer_norm.bias": text["ln_final.bias"],
    }
    # Blocks are named alike in both towers, so the image tower's conversion serves the text tower.
    blocks = {key: value for key, value in text.items() if key.startswith("transformer.resblocks.")}
    around = {
        f"ln_{place}.{part}": torch.empty(0) for place in ("pre", "post") for part in ("weight", "bias")
    }
    rest = dict.fromkeys(
        ("proj", "class_embedding", "conv1.weight", "positional_embedding"), torch.empty(0, 0)
    )
    for key, value in under_transformers_names({**blocks, **around, **rest}).items():
        if ".encoder." in key:
            renamed[key.replace("vision_model.", "text_model.")] = value
    return renamed
