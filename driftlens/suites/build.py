"""Draws, trains, measures and writes the embedded suite into an empty folder."""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from driftlens.files import write_json_atomic
from driftlens.progress import Reporter
from driftlens.suites.drawing.task import Purpose, tasks
from driftlens.suites.embedded import BASE, CONFIG, FORMAT, RECORD, data_file, expert_file, file_digests
from driftlens.suites.pictures import Pictures, TaskPictures, draw
from driftlens.suites.recipe import Recipe, stream
from driftlens.suites.training import (
    accuracy,
    build_clip,
    class_embeddings,
    tokenizer,
    train_base,
    train_expert,
)
from driftlens.suites.workers import NUM_WORKERS, Share, Workers, tell


@dataclass
class _Work:
    """What the steps of `build` share; `seconds` fills up as they pass."""

    folder: pathlib.Path
    recipe: Recipe
    seed: int
    reporter: Reporter
    workers: Workers
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note how long the block takes."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)


def build(folder: pathlib.Path, recipe: Recipe, seed: int, reporter: Reporter) -> None:
    """Fill the empty `folder` with models and pictures, then with a record that vouches for every file.

    Raises:
        Cancelled: somebody asked to stop; the folder is then incomplete and has no record.
        RunError: a process that helps with it ended unexpectedly.
    """
    reporter.step("draw", 0, None, "starting two processes")
    untrained = build_clip(recipe.model_config(), stream(seed, "weights"))
    with Workers(sum(parameter.numel() for parameter in untrained.parameters())) as workers:
        work = _Work(folder, recipe, seed, reporter, workers)
        with work.phase("draw"):
            pictures = _draw(work)
        with work.phase("train base"):
            logit_scale = _train_base(work, pictures)
        with work.phase("train experts"):
            measured = _train_experts(work, pictures)
    _describe(work, logit_scale, measured)


def _draw(work: _Work) -> list[TaskPictures]:
    """Draw the pictures of every task, by task name, and save those that aren't the base's alone."""
    recipe = work.recipe
    counts = {"base": recipe.num_base, "train": recipe.num_train, "test": recipe.num_test}
    jobs = [(name, purpose, count, work.seed) for name in tasks for purpose, count in counts.items()]
    done = itertools.count(1)

    def report(name: str, purpose: Purpose) -> None:
        work.reporter.step("draw", next(done), len(jobs), f"{name}, {purpose}")

    work.reporter.step("draw", 0, len(jobs))
    drawn = dict(zip([job[:2] for job in jobs], work.workers.run(_draw_some, jobs, report), strict=True))
    pictures = [
        TaskPictures(task, **{purpose: drawn[name, purpose] for purpose in counts})
        for name, task in tasks.items()
    ]
    (work.folder / "data").mkdir()
    for one in pictures:
        one.save(work.folder / data_file(one.task.name))
    return pictures


def _draw_some(name: str, purpose: Purpose, count: int, seed: int) -> Pictures:
    """In a worker: the pictures of one task for one purpose."""
    pictures = draw(tasks[name], purpose, count, seed)
    tell(name, purpose)
    return pictures


def _train_base(work: _Work, pictures: Sequence[TaskPictures]) -> float:
    """Train and save the base; its logit scale."""
    steps = work.recipe.base.steps
    jobs = [(rank, work.folder, work.recipe, work.seed, pictures) for rank in range(NUM_WORKERS)]

    def report(done: int, loss: float) -> None:
        work.reporter.step("train base", done, steps, loss=loss)

    work.reporter.step("train base", 0, steps)
    # All workers end with the same weights; the first one saves them.
    return work.workers.run(_train_base_share, jobs, report)[0]


def _train_base_share(
    rank: int, folder: pathlib.Path, recipe: Recipe, seed: int, pictures: Sequence[TaskPictures]
) -> float:
    """In a worker: train the base together with the others; its logit scale."""
    clip = build_clip(recipe.model_config(), stream(seed, "weights"))
    share = Share(rank, NUM_WORKERS)

    def report(done: int, loss: float) -> None:
        if rank == 0:
            tell(done, loss)

    try:
        train_base(
            clip, tokenizer(recipe.context_length), pictures, recipe, stream(seed, "base"), report, share
        )
    except BaseException:
        share.leave()
        raise
    if rank == 0:
        _save(clip.state_dict(), folder / BASE)
    return clip.logit_scale.exp().item()


def _train_experts(work: _Work, pictures: Sequence[TaskPictures]) -> dict[str, dict[str, float]]:
    """Train and save one expert per task, and give base's and expert's accuracies on the task's test pictures."""
    (work.folder / "experts").mkdir()
    jobs = [(work.folder, work.recipe, work.seed, one) for one in pictures]
    steps, done = work.recipe.expert.steps, dict.fromkeys((one.task.name for one in pictures), 0)

    def report(name: str, step: int, loss: float) -> None:
        done[name] = step
        finished = sum(steps <= each for each in done.values())
        label = f"{name} ({finished} of {len(jobs)} done)"
        work.reporter.step("train experts", sum(done.values()), len(jobs) * steps, label, loss=loss)

    work.reporter.step("train experts", 0, len(jobs) * steps)
    return dict(zip(done, work.workers.run(_train_expert, jobs, report), strict=True))


def _train_expert(
    folder: pathlib.Path, recipe: Recipe, seed: int, pictures: TaskPictures
) -> dict[str, float]:
    """In a worker: train and save one expert; accuracies of base and expert."""
    from safetensors.torch import load_file

    name = pictures.task.name
    clip = build_clip(recipe.model_config(), 0)
    clip.load_state_dict(load_file(folder / BASE))
    clip.eval()
    embeddings = class_embeddings(clip, tokenizer(recipe.context_length), pictures.task)
    test, test_labels = pictures.test.pixels(), torch.from_numpy(pictures.test.labels)
    of_base = accuracy(clip.visual, test, test_labels, embeddings)
    train_expert(
        clip.visual,
        pictures.train.pixels(),
        torch.from_numpy(pictures.train.labels),
        clip.logit_scale.exp().item() * embeddings,
        recipe.expert,
        stream(seed, f"expert/{name}"),
        lambda step, loss: tell(name, step, loss),
    )
    tower = {f"visual.{key}": tensor for key, tensor in clip.visual.state_dict().items()}
    _save(tower, folder / expert_file(name))
    return {"base": of_base, "expert": accuracy(clip.visual, test, test_labels, embeddings)}


def _save(weights: Mapping[str, Tensor], path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({key: tensor.detach().contiguous() for key, tensor in weights.items()}, path)


def _describe(work: _Work, logit_scale: float, measured: dict[str, dict[str, float]]) -> None:
    """Write what open_clip needs to open the base, and at last the record."""
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
    config = {"model_cfg": work.recipe.model_config(), "preprocess_cfg": preprocess}
    write_json_atomic(work.folder / CONFIG, config)
    heads = {
        name: {"classes": list(task.class_names), "templates": list(task.templates)}
        for name, task in tasks.items()
    }
    record = {
        "format": FORMAT,
        "digest": work.recipe.digest(work.seed),
        "seed": work.seed,
        "recipe": asdict(work.recipe),
        "logit_scale": logit_scale,
        "heads": heads,
        "test_accuracy": measured,
        "seconds": work.seconds,
        "files": file_digests(work.folder),
    }
    write_json_atomic(work.folder / RECORD, record)
