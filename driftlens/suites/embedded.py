"""The embedded suite: a small real CLIP and its experts, made here once without network, and kept."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import torch

from driftlens.base.files import write_json_atomic
from driftlens.suites import training
from driftlens.suites.cache import DRAWN, Suite, rounded, save
from driftlens.suites.drawing import Purpose, tasks
from driftlens.suites.recipe import Recipe, stream

CONFIG, BASE = "open_clip_config.json", "base.safetensors"


class ImageSuite(Suite):
    """A CLIP, experts fine-tuned from its image tower, and their pictures; heads are zero-shot."""

    prefix = "embedded"
    usual = Recipe()
    drawn = tasks
    loader, source, base, expert = "open-clip", CONFIG, BASE, "experts/{}.safetensors"

    @staticmethod
    def head(task: str) -> dict[str, Any]:
        """As of a `Suite`."""
        return {"classes": list(tasks[task].class_names), "templates": list(tasks[task].templates)}

    @staticmethod
    def data(folder: pathlib.Path, task: str) -> dict[str, Any]:
        """As of a `Suite`."""
        return {"kind": "npz", "file": str(folder / "data" / f"{task}.npz")}

    @staticmethod
    def untrained(recipe: Recipe, seed: int = 0) -> Any:
        """As of a `Suite`."""
        return training.build_clip(recipe.model_config(), seed)

    @staticmethod
    def draw(folder: pathlib.Path, task: str, recipe: Recipe, seed: int) -> None:
        """As of a `Suite`."""
        x_train, y_train = tasks[task].pictures("train", recipe.num_train, seed)
        x_test, y_test = tasks[task].pictures("test", recipe.num_test, seed)
        np.savez_compressed(
            folder / "data" / f"{task}.npz",
            x_train=x_train,
            y_train=y_train,
            x_test=x_test,
            y_test=y_test,
            class_names=np.array(tasks[task].class_names),
        )

    @staticmethod
    def draw_for_base(folder: pathlib.Path, task: str, recipe: Recipe, seed: int) -> None:
        """As of a `Suite`."""
        images, labels = tasks[task].pictures("base", recipe.num_base, seed)
        np.savez(folder / DRAWN / f"{task}.npz", x_base=images, y_base=labels)

    @staticmethod
    def work(worker: training.Worker, folder: pathlib.Path, recipe: Recipe, seed: int) -> None:
        """As of a `Suite`."""
        ImageSuite.draw_all(worker, folder, recipe, seed)
        _train_base(worker, folder, recipe, seed)
        worker.meet()
        for name in worker.jobs(list(tasks)):
            _train_expert(worker, folder, recipe, seed, name)


embedded_suite = ImageSuite.made


def _drawn(folder: pathlib.Path, name: str, purpose: Purpose) -> training.Pictures:
    with np.load(folder / (DRAWN if purpose == "base" else "data") / f"{name}.npz") as file:
        return training.Pictures(tasks[name], file[f"x_{purpose}"], file[f"y_{purpose}"])


def _train_base(worker: training.Worker, folder: pathlib.Path, recipe: Recipe, seed: int) -> None:
    """Train the base together with the others; all end with the same weights, and the first one saves them."""
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    clip = training.build_clip(recipe.model_config(), stream(seed, "weights"))
    pictures = [_drawn(folder, name, "base") for name in tasks]
    training.train_base(
        clip, training.tokenizer(recipe.context_length), pictures, recipe, stream(seed, "base"), worker
    )
    rounded(clip)
    if worker.rank == 0:
        preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
        config = {"model_cfg": recipe.model_config(), "preprocess_cfg": preprocess}
        write_json_atomic(folder / CONFIG, config)
        save(clip.state_dict(), folder / BASE)
        worker.tell("", "logit_scale", 0, clip.logit_scale.exp().item())


def _train_expert(
    worker: training.Worker, folder: pathlib.Path, recipe: Recipe, seed: int, name: str
) -> None:
    """Train and save one expert; tell accuracies of base and expert."""
    from safetensors.torch import load_file

    train, test = _drawn(folder, name, "train"), _drawn(folder, name, "test")
    clip = training.build_clip(recipe.model_config(), 0)
    clip.load_state_dict(load_file(folder / BASE))
    clip.eval()
    embeddings = training.class_embeddings(clip, training.tokenizer(recipe.context_length), train.task)
    of_base = training.accuracy(clip.visual, test.pixels(), torch.from_numpy(test.labels), embeddings)
    training.train_expert(
        clip.visual,
        train,
        clip.logit_scale.exp().item() * embeddings,
        recipe.expert,
        stream(seed, f"expert/{name}"),
        lambda step, loss: worker.tell("train experts", name, step, loss),
    )
    rounded(clip.visual)
    tower = {f"visual.{key}": tensor for key, tensor in clip.visual.state_dict().items()}
    save(tower, folder / ImageSuite.expert.format(name))
    of_expert = training.accuracy(clip.visual, test.pixels(), torch.from_numpy(test.labels), embeddings)
    worker.tell("", name, 0, {"base": of_base, "expert": of_expert})
