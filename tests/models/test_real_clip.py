"""The real checkpoints, where they are at hand: one model in two formats, its heads and its accuracies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.heads import head_from_file
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
        visual = {key.removeprefix("visual."): value for key, value in whole.items() if key.startswith("visual.")}
        theirs = load_file(real / "hf" / model / "model.safetensors")
        converted = under_transformers_names(visual)
        assert converted.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key].half()) for key, value in converted.items())
    images = np.load(real / "data" / "clothing10.npz")["x_test"][:40]
    first, second = (features(*form(real, "clothing10"), images) for form in FORMS.values())
    assert (first - second).norm() / first.norm() < 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", few(["base", "expert"], quick=["expert"]))
@pytest.mark.parametrize("task", few(TASKS, ["clothing10"], some=["omniglot_alphabets"]))
def test_real_accuracies_are_those_measured_when_the_models_were_made(
    real: Path, task: str, model: str, form: str
) -> None:
    data, stated = np.load(real / "data" / f"{task}.npz"), suite(real)
    head = head_from_file(real / "heads.safetensors", task, stated["logit_scale"], data["class_names"].tolist())
    scores = head.scores(features(*FORMS[form](real, task if model == "expert" else "base"), data["x_test"]))
    accuracy = (scores.argmax(dim=1) == torch.tensor(data["y_test"])).double().mean().item()
    # Float16 weights may turn a single image; the measured values are printed to four digits.
    tolerance = 5e-5 + (1 / len(data["y_test"]) if form == "open_clip" else 0)
    assert accuracy == pytest.approx(stated["test_accuracy"][task][model], abs=tolerance)
