"""Draws, trains, measures and writes the embedded suite into an empty folder."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from driftlens.files import write_json_atomic
from driftlens.progress import Reporter
from driftlens.suites.drawing.task import tasks
from driftlens.suites.folder import BASE, CONFIG, FORMAT, RECORD, data_file, expert_file, file_digests
from driftlens.suites.pictures import TaskPictures, draw_all
from driftlens.suites.recipe import Recipe
from driftlens.suites.seeds import stream
from driftlens.suites.training import build_clip, train_base, train_expert
from driftlens.suites.workers import NUM_WORKERS, Share, Workers, tell
from driftlens.suites.zero_shot import accuracy, class_embeddings, tokenizer


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
    _write_config(work)
    _write_record(work, logit_scale, measured)


def _draw(work: _Work) -> list[TaskPictures]:
    (work.folder / "data").mkdir()
    pictures = draw_all(work.recipe, work.seed, work.reporter, work.workers)
    for one in pictures:
        one.save(work.folder / data_file(one.task.name))
    return pictures


@dataclass(frozen=True)
class _BaseJob:
    """One worker's share of the base's training."""

    rank: int
    folder: pathlib.Path
    recipe: Recipe
    seed: int
    pictures: list[TaskPictures]


def _train_base(work: _Work, pictures: list[TaskPictures]) -> float:
    """Train and save the base; its logit scale."""
    steps = work.recipe.base.steps
    jobs = [_BaseJob(rank, work.folder, work.recipe, work.seed, pictures) for rank in range(NUM_WORKERS)]

    def report(done: int, loss: float) -> None:
        work.reporter.step("train base", done, steps, loss=loss)

    work.reporter.step("train base", 0, steps)
    # All workers end with the same weights; the first one saves them.
    return work.workers.run(_train_base_share, jobs, report)[0]


def _train_base_share(job: _BaseJob) -> float:
    """In a worker: train the base together with the others; its logit scale."""
    clip = build_clip(job.recipe.model_config(), stream(job.seed, "weights"))
    share = Share(job.rank, NUM_WORKERS)

    def report(done: int, loss: float) -> None:
        if job.rank == 0:
            tell(done, loss)

    try:
        tokenize = tokenizer(job.recipe.context_length)
        train_base(clip, tokenize, job.pictures, job.recipe, stream(job.seed, "base"), report, share)
    except BaseException:
        share.leave()
        raise
    if job.rank == 0:
        _save(clip.state_dict(), job.folder / BASE)
    return clip.logit_scale.exp().item()


@dataclass(frozen=True)
class _ExpertJob:
    """One expert's training."""

    folder: pathlib.Path
    recipe: Recipe
    seed: int
    pictures: TaskPictures


def _train_experts(work: _Work, pictures: list[TaskPictures]) -> dict[str, dict[str, float]]:
    """Train and save one expert per task, and give base's and expert's accuracies on the task's test pictures."""
    (work.folder / "experts").mkdir()
    jobs = [_ExpertJob(work.folder, work.recipe, work.seed, one) for one in pictures]
    steps, done = work.recipe.expert.steps, dict.fromkeys((one.task.name for one in pictures), 0)

    def report(name: str, step: int, loss: float) -> None:
        done[name] = step
        finished = sum(steps <= each for each in done.values())
        label = f"{name} ({finished} of {len(jobs)} done)"
        work.reporter.step("train experts", sum(done.values()), len(jobs) * steps, label, loss=loss)

    work.reporter.step("train experts", 0, len(jobs) * steps)
    measured = work.workers.run(_train_expert, jobs, report)
    return {job.pictures.task.name: values for job, values in zip(jobs, measured, strict=True)}


def _train_expert(job: _ExpertJob) -> dict[str, float]:
    """In a worker: train and save one expert; accuracies of base and expert."""
    from safetensors.torch import load_file

    one, name = job.pictures, job.pictures.task.name
    clip = build_clip(job.recipe.model_config(), 0)
    clip.load_state_dict(load_file(job.folder / BASE))
    clip.eval()
    embeddings = class_embeddings(clip, tokenizer(job.recipe.context_length), one.task)
    test, test_labels = one.test.pixels(), torch.from_numpy(one.test.labels)
    of_base = accuracy(clip.visual, test, test_labels, embeddings)
    train_expert(
        clip.visual,
        one.train.pixels(),
        torch.from_numpy(one.train.labels),
        clip.logit_scale.exp().item() * embeddings,
        job.recipe.expert,
        stream(job.seed, f"expert/{name}"),
        lambda step, loss: tell(name, step, loss),
    )
    tower = {f"visual.{key}": tensor for key, tensor in clip.visual.state_dict().items()}
    _save(tower, job.folder / expert_file(name))
    return {"base": of_base, "expert": accuracy(clip.visual, test, test_labels, embeddings)}


def _save(weights: Mapping[str, Tensor], path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({key: tensor.detach().contiguous() for key, tensor in weights.items()}, path)


def _write_config(work: _Work) -> None:
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    preprocess = {"mean": list(OPENAI_DATASET_MEAN), "std": list(OPENAI_DATASET_STD)}
    config = {"model_cfg": work.recipe.model_config(), "preprocess_cfg": preprocess}
    write_json_atomic(work.folder / CONFIG, config)


def _write_record(work: _Work, logit_scale: float, measured: dict[str, dict[str, float]]) -> None:
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
