"""Draws, trains, measures and writes the embedded suite into an empty folder."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from driftlens.files import write_json_atomic
from driftlens.progress import Reporter
from driftlens.suites.folder import BASE, CONFIG, FORMAT, RECORD, data_file, expert_file, file_digests
from driftlens.suites.pictures import TaskPictures, draw_all
from driftlens.suites.recipe import Recipe
from driftlens.suites.seeds import stream
from driftlens.suites.training import build_clip, train_base, train_expert
from driftlens.suites.zero_shot import Tokenizer, accuracy, class_embeddings, tokenizer


@dataclass
class _Work:
    """What the steps of `build` share; `seconds` fills up as they pass."""

    folder: pathlib.Path
    recipe: Recipe
    seed: int
    reporter: Reporter
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note how long the block takes."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)

    def on_step(self, phase: str, before: int, total: int, label: str = "") -> Callable[[int, float], None]:
        """What a training calls after each step; `before` steps of the phase were done earlier."""

        def report(done: int, loss: float) -> None:
            self.reporter.step(phase, before + done, total, label, loss=loss)

        self.reporter.step(phase, before, total, label)
        return report


def build(folder: pathlib.Path, recipe: Recipe, seed: int, reporter: Reporter) -> None:
    """Fill the empty `folder` with models and pictures, then with a record that vouches for every file.

    Raises:
        Cancelled: somebody asked to stop; the folder is then incomplete and has no record.
    """
    work = _Work(folder, recipe, seed, reporter)
    pictures = _draw(work)
    tokenize = tokenizer(recipe.context_length)
    clip = _train_base(work, pictures, tokenize)
    measured = _train_experts(work, pictures, clip, tokenize)
    _write_config(work)
    _write_record(work, pictures, clip, measured)


def _draw(work: _Work) -> list[TaskPictures]:
    (work.folder / "data").mkdir()
    with work.phase("draw"):
        pictures = draw_all(work.recipe, work.seed, work.reporter)
        for one in pictures:
            one.save(work.folder / data_file(one.task.name))
    return pictures


def _train_base(work: _Work, pictures: list[TaskPictures], tokenize: Tokenizer) -> Any:
    recipe = work.recipe
    clip = build_clip(recipe.model_config(), stream(work.seed, "weights"))
    with work.phase("train base"):
        on_step = work.on_step("train base", 0, recipe.base.steps)
        train_base(clip, tokenize, pictures, recipe, stream(work.seed, "base"), on_step)
    _save(clip.state_dict(), work.folder / BASE)
    return clip


def _train_experts(
    work: _Work, pictures: list[TaskPictures], clip: Any, tokenize: Tokenizer
) -> dict[str, dict[str, float]]:
    """Train and save one expert per task, and give base's and expert's accuracies on the task's test pictures."""
    (work.folder / "experts").mkdir()
    base = {key: tensor.clone() for key, tensor in clip.visual.state_dict().items()}
    measured = {}
    with work.phase("train experts"):
        for position, one in enumerate(pictures):
            clip.visual.load_state_dict(base)
            measured[one.task.name] = _train_expert(work, one, clip, tokenize, position, len(pictures))
    return measured


def _train_expert(
    work: _Work, one: TaskPictures, clip: Any, tokenize: Tokenizer, position: int, count: int
) -> dict[str, float]:
    name, schedule = one.task.name, work.recipe.expert
    embeddings = class_embeddings(clip, tokenize, one.task)
    test, test_labels = one.test.pixels(), torch.from_numpy(one.test.labels)
    of_base = accuracy(clip.visual, test, test_labels, embeddings)
    train_expert(
        clip.visual,
        one.train.pixels(),
        torch.from_numpy(one.train.labels),
        clip.logit_scale.exp().item() * embeddings,
        schedule,
        stream(work.seed, f"expert/{name}"),
        work.on_step(
            "train experts",
            position * schedule.steps,
            count * schedule.steps,
            f"{name} ({position + 1} of {count})",
        ),
    )
    tower = {f"visual.{key}": tensor for key, tensor in clip.visual.state_dict().items()}
    _save(tower, work.folder / expert_file(name))
    return {"base": of_base, "expert": accuracy(clip.visual, test, test_labels, embeddings)}


def _save(weights: Mapping[str, Tensor], path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({key: tensor.detach().contiguous() for key, tensor in weights.items()}, path)


def _write_config(work: _Work) -> None:
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
    config = {"model_cfg": work.recipe.model_config(), "preprocess_cfg": preprocess}
    write_json_atomic(work.folder / CONFIG, config)


def _write_record(
    work: _Work, pictures: list[TaskPictures], clip: Any, measured: dict[str, dict[str, float]]
) -> None:
    heads = {
        one.task.name: {"classes": list(one.task.class_names), "templates": list(one.task.templates)}
        for one in pictures
    }
    record = {
        "format": FORMAT,
        "digest": work.recipe.digest(work.seed),
        "seed": work.seed,
        "recipe": asdict(work.recipe),
        "logit_scale": clip.logit_scale.exp().item(),
        "heads": heads,
        "test_accuracy": measured,
        "seconds": work.seconds,
        "files": file_digests(work.folder),
    }
    write_json_atomic(work.folder / RECORD, record)
