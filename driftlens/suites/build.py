"""Draws, trains, measures and writes the embedded suite into an empty folder."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import Tensor

from driftlens.files import sha256_of, write_json_atomic
from driftlens.progress import Reporter
from driftlens.suites.pictures import TaskPictures, draw_all
from driftlens.suites.recipe import Recipe
from driftlens.suites.seeds import stream
from driftlens.suites.training import build_clip, train_base, train_expert
from driftlens.suites.zero_shot import accuracy, class_embeddings, tokenizer

CONFIG, BASE, RECORD = "open_clip_config.json", "base.safetensors", "suite.json"
FORMAT = 1
"""Version of the folder's layout and of the record."""


def expert_file(task: str) -> str:
    """Where the expert's image tower lies in the folder."""
    return f"experts/{task}.safetensors"


def data_file(task: str) -> str:
    """Where the pictures of a task lie in the folder."""
    return f"data/{task}.npz"


def build(folder: pathlib.Path, recipe: Recipe, seed: int, reporter: Reporter) -> None:
    """Fill the empty `folder` with models, pictures, and a record of what is there, written last.

    Raises:
        Cancelled: somebody asked to stop; the folder is then incomplete.
    """
    maker = _Maker(folder, recipe, seed, reporter)
    maker.write_config()
    maker.draw()
    maker.train_base()
    maker.train_experts()
    maker.write_record()


class _Maker:
    """The steps of `build`, and what they hand to one another."""

    def __init__(self, folder: pathlib.Path, recipe: Recipe, seed: int, reporter: Reporter) -> None:
        self._folder = folder
        self._recipe = recipe
        self._seed = seed
        self._reporter = reporter
        self._tokenize = tokenizer(recipe.context_length)
        self._clip = build_clip(recipe.model_config(), stream(seed, "weights"))
        self._pictures: list[TaskPictures] = []
        self._accuracy: dict[str, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}

    def write_config(self) -> None:
        from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

        preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
        config = {"model_cfg": self._recipe.model_config(), "preprocess_cfg": preprocess}
        write_json_atomic(self._folder / CONFIG, config)

    def draw(self) -> None:
        with self._timed("draw"):
            self._pictures = draw_all(self._recipe, self._seed, self._reporter)
            (self._folder / "data").mkdir()
            for pictures in self._pictures:
                pictures.save(self._folder / data_file(pictures.task.name))

    def train_base(self) -> None:
        steps = self._recipe.base.steps

        def on_step(done: int, loss: float) -> None:
            self._reporter.step("train base", done, steps, loss=loss)

        with self._timed("train base"):
            on_step(0, float("nan"))
            seed = stream(self._seed, "base")
            train_base(self._clip, self._tokenize, self._pictures, self._recipe, seed, on_step)
        _save(self._clip.state_dict(), self._folder / BASE)

    def train_experts(self) -> None:
        (self._folder / "experts").mkdir()
        base = {key: tensor.clone() for key, tensor in self._clip.visual.state_dict().items()}
        with self._timed("train experts"):
            for position in range(len(self._pictures)):
                self._clip.visual.load_state_dict(base)
                self._train_expert(position)

    def _train_expert(self, position: int) -> None:
        one, schedule = self._pictures[position], self._recipe.expert
        name, count = one.task.name, len(self._pictures)
        total = count * schedule.steps

        def on_step(done: int, loss: float) -> None:
            label = f"{name} ({position + 1} of {count})"
            self._reporter.step("train experts", position * schedule.steps + done, total, label, loss=loss)

        embeddings = class_embeddings(self._clip, self._tokenize, one.task)
        head = self._clip.logit_scale.exp().item() * embeddings
        tower, labels = self._clip.visual, torch.from_numpy(one.test.labels)
        pixels = one.test.pixels()
        before = accuracy(tower, pixels, labels, embeddings)
        train_expert(
            tower,
            one.train.pixels(),
            torch.from_numpy(one.train.labels),
            head,
            schedule,
            stream(self._seed, f"expert/{name}"),
            on_step,
        )
        self._accuracy[name] = {"base": before, "expert": accuracy(tower, pixels, labels, embeddings)}
        weights = {f"visual.{key}": tensor for key, tensor in tower.state_dict().items()}
        _save(weights, self._folder / expert_file(name))

    def write_record(self) -> None:
        """What the folder holds, how it came about, and what it is worth: the last file, so that it vouches for all."""
        tasks = [one.task for one in self._pictures]
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        record = {
            "format": FORMAT,
            "digest": self._recipe.digest(self._seed),
            "seed": self._seed,
            "recipe": asdict(self._recipe),
            "logit_scale": self._clip.logit_scale.exp().item(),
            "heads": {
                task.name: {"classes": list(task.class_names), "templates": list(task.templates)}
                for task in tasks
            },
            "test_accuracy": self._accuracy,
            "seconds": self._seconds,
            "files": {
                path.relative_to(self._folder).as_posix(): {
                    "bytes": path.stat().st_size,
                    "sha256": sha256_of(path),
                }
                for path in files
            },
        }
        write_json_atomic(self._folder / RECORD, record)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[phase] = round(time.monotonic() - start, 1)


def _save(weights: dict[str, Tensor], path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({key: tensor.detach().contiguous() for key, tensor in weights.items()}, path)
