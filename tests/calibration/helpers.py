"""Small models, and one-line calibrations and trainings of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.calibration.calibrator import Calibrator
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from tests.zoo.cases import family
from tests.zoo.solvable import WORLDS, World

TASKS = ("a", "b")


@dataclass(frozen=True)
class Subject:
    """A base, two experts and their merge, with samples that both tasks share."""

    world: World
    pool: ModelPool
    modules: dict[str, nn.Module]
    inputs: Any
    n: int

    def batches(self, size: int | None = None) -> list[Batch]:
        """All samples in batches of one size."""
        return batched(self.inputs, size or self.n)

    def samples(self, size: int | None = None) -> dict[str, InMemoryBatches]:
        return {task: given(self.batches(size)) for task in TASKS}


def given(batches: Iterable[Batch]) -> InMemoryBatches:
    """The samples of a task that these batches are."""
    known = list(batches)
    return InMemoryBatches(lambda: known)


def batched(inputs: Any, size: int) -> list[Batch]:
    leaf = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    starts = range(0, len(leaf), size)
    return [Batch(i, min(i + size, len(leaf)), part(inputs, slice(i, i + size))) for i in starts]


def part(inputs: Any, rows: slice) -> Any:
    return {k: v[rows] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def subject(name: str = "open_clip_vit", n: int = 4, device: str | torch.device = "cpu") -> Subject:
    world = WORLDS[name]
    models = family(world.case, n=n, batch_size=n, device=device)
    return Subject(world, models.pool, models.modules, models.batches[0].inputs, n)


def context(models: Subject, update: Sequence[str] = ("linear", "bias", "norm"), **options: Any) -> CalibrationContext:
    """All default sites of a subject, on all its samples; `options` replace what is said here."""
    sites = select_sites(models.pool.chain, update=update)
    return CalibrationContext(**{"pool": models.pool, "parts": models.samples(), "sites": sites, **options})


def layers_of(models: Subject, calibrator: Calibrator, **options: Any) -> list[CalibratedLayer]:
    """Calibrated layers; `options` as for `context`."""
    return list(calibrator.calibrate(context(models, calibrator.update, **options)))


def calibrated(models: Subject, calibrator: Calibrator, **options: Any) -> dict[tuple[int, str], Tensor]:
    """New parameters by layer and name."""
    return updates_of(layers_of(models, calibrator, **options))


def updates_of(layers: Iterable[CalibratedLayer]) -> dict[tuple[int, str], Tensor]:
    return {(layer.layer, name): value for layer in layers for name, value in layer.updates.items()}


def quiet(epoch: int, total: int, loss: float) -> None:
    assert epoch <= total and torch.tensor(loss).isfinite()


def trained(models: Subject, method: Any, **options: Any) -> dict[str, Any]:
    """What is attached, by task, by training on batches of two."""
    on = context(models, **{"parts": models.samples(2), "sites": {}, **options})
    return {task: each for at in method.calibrate(on) for task, each in at.attachments.items()}


def final_features(module: nn.Module, inputs: Any) -> Tensor:
    """What the library's own forward pass gives, rows of tokens that count where there are tokens."""
    if isinstance(inputs, Tensor):
        found = module(inputs)
        return getattr(found, "image_embeds", found)
    hidden = module.model(**inputs).last_hidden_state
    return hidden[inputs["attention_mask"].bool()]
