"""The embedded suite: a small real CLIP and its experts, made here once without network, and kept."""

from __future__ import annotations

import itertools
import pathlib
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from driftlens.base.files import write_json_atomic
from driftlens.base.progress import Reporter
from driftlens.suites.cache import SCALING, Heard, Suite, describe, save
from driftlens.suites.drawing import PURPOSES, Purpose, tasks
from driftlens.suites.recipe import Recipe, stream
from driftlens.suites.training import (
    Pictures,
    accuracy,
    build_clip,
    class_embeddings,
    tokenizer,
    train_base,
    train_expert,
)
from driftlens.suites.workers import Worker, work_together

CONFIG, BASE = "open_clip_config.json", "base.safetensors"
_DRAWN = "drawn"
"""Folder for pictures as they come, until all is built."""


@dataclass(frozen=True)
class ImageSuite(Suite):
    """A CLIP, experts fine-tuned from its image tower, and their pictures."""

    prefix = "embedded"
    usual = Recipe()

    def spec(self) -> dict[str, Any]:
        """The run spec of this suite, all paths absolute: Task Arithmetic of the experts, zero-shot heads."""
        folder = self.folder.resolve()
        return {
            "version": 1,
            "name": "embedded",
            "architecture": {"loader": "open-clip", "source": str(folder / CONFIG)},
            "base": {"weights": str(folder / BASE)},
            "merge": {"method": "task_arithmetic", "scaling": SCALING},
            "experts": {task: {"weights": str(folder / expert_file(task))} for task in self.tasks},
            "heads": self.record()["heads"],
            # Jacobians are the dear part; a demo is about the way there, not about the third digit.
            "metrics": {"jacobian": {"samples": 8}},
            "data": {
                "defaults": {"n": 64, "n_diagnosis": 128, "n_test": "all"},
                **{task: {"kind": "npz", "file": str(folder / data_file(task))} for task in self.tasks},
            },
        }

    @staticmethod
    def build(folder: pathlib.Path, recipe: Recipe, seed: int, reporter: Reporter) -> None:
        """As of a `Suite`."""
        reporter.step("draw", 0, None, "starting two processes")
        for name in (_DRAWN, "data", "experts"):
            (folder / name).mkdir()
        untrained = build_clip(recipe.model_config(), stream(seed, "weights"))
        sizes = {
            "draw": (len(tasks) * len(PURPOSES), 1),
            "train base": (1, recipe.base.steps),
            "train experts": (len(tasks), recipe.expert.steps),
        }
        heard = Heard(sizes, reporter)
        num_values = sum(parameter.numel() for parameter in untrained.parameters())
        work_together(_work, (folder, recipe, seed), heard, num_values)
        shutil.rmtree(folder / _DRAWN)
        _describe(folder, recipe, seed, heard)


embedded_suite = ImageSuite.made


def expert_file(task: str) -> str:
    """Where the expert's image tower lies in the folder."""
    return f"experts/{task}.safetensors"


def data_file(task: str) -> str:
    """Where the pictures of a task lie in the folder."""
    return f"data/{task}.npz"


def _work(worker: Worker, folder: pathlib.Path, recipe: Recipe, seed: int) -> None:
    """In every worker: its share of all the work."""
    counts = {"base": recipe.num_base, "train": recipe.num_train, "test": recipe.num_test}
    for name, purpose in worker.jobs(list(itertools.product(tasks, PURPOSES))):
        images, labels = tasks[name].pictures(purpose, counts[purpose], seed)
        np.savez(folder / _DRAWN / f"{name}-{purpose}.npz", images=images, labels=labels)
        worker.tell("draw", f"{name}, {purpose}", 1)
    worker.meet()
    _train_base(worker, folder, recipe, seed)
    worker.meet()
    for name in worker.jobs(list(tasks)):
        _train_expert(worker, folder, recipe, seed, name)


def _drawn(folder: pathlib.Path, name: str, purpose: Purpose) -> Pictures:
    with np.load(folder / _DRAWN / f"{name}-{purpose}.npz") as file:
        return Pictures(tasks[name], **file)


def _train_base(worker: Worker, folder: pathlib.Path, recipe: Recipe, seed: int) -> None:
    """Train the base together with the others; all end with the same weights, and the first one saves them."""

    def report(done: int, loss: float) -> None:
        if worker.rank == 0:
            worker.tell("train base", "", done, loss)

    clip = build_clip(recipe.model_config(), stream(seed, "weights"))
    pictures = [_drawn(folder, name, "base") for name in tasks]
    train_base(clip, tokenizer(recipe.context_length), pictures, recipe, stream(seed, "base"), report, worker)
    if worker.rank == 0:
        save(clip.state_dict(), folder / BASE)
        worker.tell("", "logit_scale", 0, clip.logit_scale.exp().item())


def _train_expert(worker: Worker, folder: pathlib.Path, recipe: Recipe, seed: int, name: str) -> None:
    """Train and save one expert, and save the pictures of its task; tell accuracies of base and expert."""
    from safetensors.torch import load_file

    train, test = _drawn(folder, name, "train"), _drawn(folder, name, "test")
    np.savez_compressed(
        folder / data_file(name),
        x_train=train.images,
        y_train=train.labels,
        x_test=test.images,
        y_test=test.labels,
        class_names=np.array(train.task.class_names),
    )
    clip = build_clip(recipe.model_config(), 0)
    clip.load_state_dict(load_file(folder / BASE))
    clip.eval()
    embeddings = class_embeddings(clip, tokenizer(recipe.context_length), train.task)
    of_base = accuracy(clip.visual, test.pixels(), torch.from_numpy(test.labels), embeddings)
    train_expert(
        clip.visual,
        train,
        clip.logit_scale.exp().item() * embeddings,
        recipe.expert,
        stream(seed, f"expert/{name}"),
        lambda step, loss: worker.tell("train experts", name, step, loss),
    )
    tower = {f"visual.{key}": tensor for key, tensor in clip.visual.state_dict().items()}
    save(tower, folder / expert_file(name))
    of_expert = accuracy(clip.visual, test.pixels(), torch.from_numpy(test.labels), embeddings)
    worker.tell("", name, 0, {"base": of_base, "expert": of_expert})


def _describe(folder: pathlib.Path, recipe: Recipe, seed: int, heard: Heard) -> None:
    """Write what open_clip needs to open the base, and at last the record."""
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
    config = {"model_cfg": recipe.model_config(), "preprocess_cfg": preprocess}
    write_json_atomic(folder / CONFIG, config)
    describe(
        folder,
        recipe,
        seed,
        heard,
        logit_scale=heard.measured["logit_scale"],
        heads={
            name: {"classes": list(task.class_names), "templates": list(task.templates)}
            for name, task in tasks.items()
        },
        test_accuracy={name: heard.measured[name] for name in tasks},
    )
