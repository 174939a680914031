"""The image suite: a small CLIP, experts fine-tuned from its image tower, and their pictures; heads are zero-shot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from safetensors.torch import load_file, save_file
from torch import Tensor

from driftlens.data.samples import random_order
from tools.build_demo import characters, drawing, figures, training, views
from tools.build_demo.drawing import Pixels, Purpose
from tools.build_demo.recipe import Recipe, stream

RECIPE = Recipe()
SEED = 0
CONFIG, BASE, EXPERT = "open_clip_config.json", "base.safetensors", "experts/{}.safetensors"
EMBEDDING = "token_embedding.weight"
SHIPPED = 64
"""Calibration pictures of a task that are shipped: those that a run draws, in an order in which it draws them so."""
PROBE = 96
"""Pictures for models that come without data: of every task as many."""

assert {characters, figures, views}
tasks = dict(sorted(drawing.tasks.items()))


def spec() -> dict[str, Any]:
    """Return the models and data of the suite's run spec; paths are relative to it."""
    return {
        "name": "image demo",
        "architecture": {"loader": "open-clip", "source": CONFIG},
        "base": {"weights": BASE},
        "experts": {name: {"weights": EXPERT.format(name)} for name in tasks},
        "heads": {
            name: {"templates": [*task.templates], "classes": [*task.class_names]} for name, task in tasks.items()
        },
        "data": {name: {"kind": "npz", "file": f"data/{name}.npz"} for name in tasks},
    }


def build(out: Path, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Train the suite, write weights and samples, and return test accuracies of base and expert by task."""
    (out / "experts").mkdir(parents=True)
    clip = _train_base(recipe)
    preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
    config = {"model_cfg": recipe.model_config(), "preprocess_cfg": preprocess}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _save(clip.state_dict() | {EMBEDDING: known_words(clip, recipe)}, out / BASE)
    measured = {name: _train_expert(out, recipe, name) for name in tasks}
    write_samples(out / "data", recipe)
    return measured


def prompt_tokens(recipe: Recipe = RECIPE) -> Tensor:
    """Return the sorted ids of all tokens that a prompt of a task has."""
    prompts = [
        template.replace("{}", name)
        for task in tasks.values()
        for template in task.templates
        for name in task.class_names
    ]
    return training.tokenizer(recipe.context_length)(prompts).unique()  # type: ignore[no-untyped-call]


def known_words(clip: Any, recipe: Recipe) -> Tensor:
    """Return the token embedding, which was never trained, with zeros for tokens that no prompt has."""
    kept = torch.zeros_like(clip.token_embedding.weight)
    used = prompt_tokens(recipe)
    kept[used] = clip.token_embedding.weight.detach()[used]
    return kept


def write_samples(folder: Path, recipe: Recipe = RECIPE) -> None:
    """Write each task's test pictures, and the calibration pictures that a run with `n: 64` draws."""
    folder.mkdir()
    for name, task in tasks.items():
        images, labels = task.pictures("train", recipe.num_train, SEED)
        count = min(SHIPPED, recipe.num_train)
        place = np.empty(count, dtype=int)
        place[random_order(count, 0, task=name, split="calibration")] = random_order(
            recipe.num_train, 0, task=name, split="calibration"
        )[:count]
        x_test, y_test = task.pictures("test", recipe.num_test, SEED)
        np.savez_compressed(
            folder / f"{name}.npz",
            x_train=images[place],
            y_train=labels[place],
            x_test=x_test,
            y_test=y_test,
            class_names=np.array(task.class_names),
        )


def probe() -> Pixels:
    """Return pictures [n, h, w, 3] of all tasks."""
    each = PROBE // len(tasks)
    return np.concatenate([task.pictures("test", each, SEED)[0] for task in tasks.values()])


def _drawn(name: str, purpose: Purpose, count: int) -> training.Pictures:
    return training.Pictures(tasks[name], *tasks[name].pictures(purpose, count, SEED))


def _train_base(recipe: Recipe) -> Any:
    clip = training.build_clip(recipe.model_config(), stream(SEED, "weights"))
    pictures = [_drawn(name, "base", recipe.num_base) for name in tasks]
    training.train_base(clip, training.tokenizer(recipe.context_length), pictures, recipe, stream(SEED, "base"))
    training.rounded(clip)
    return clip


def _train_expert(out: Path, recipe: Recipe, name: str) -> dict[str, float]:
    """Train and save one expert; return accuracies of base and expert."""
    train, test = _drawn(name, "train", recipe.num_train), _drawn(name, "test", recipe.num_test)
    clip = training.build_clip(recipe.model_config(), 0)
    clip.load_state_dict(load_file(out / BASE))
    clip.eval()
    embeddings = training.class_embeddings(clip, training.tokenizer(recipe.context_length), train.task)
    labels = torch.from_numpy(test.labels)
    of_base = training.accuracy(clip.visual, test.pixels(), labels, embeddings)
    scale = clip.logit_scale.exp().item()
    training.train_expert(clip.visual, train, scale * embeddings, recipe.expert, stream(SEED, f"expert/{name}"))
    training.rounded(clip.visual)
    _save(
        {f"visual.{key}": tensor for key, tensor in clip.visual.state_dict().items()},
        out / EXPERT.format(name),
    )
    return {"base": of_base, "expert": training.accuracy(clip.visual, test.pixels(), labels, embeddings)}


def _save(weights: dict[str, Tensor], path: Path) -> None:
    save_file({key: tensor.detach().contiguous() for key, tensor in weights.items()}, path, {"format": "pt"})
