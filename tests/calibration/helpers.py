"""Small models and one-line calibrations of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.data.samples import Batch
from driftlens.engine.forward_order import calibrate
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import CalibratedLayer, ClosedForm
from driftlens.engine.site_selection import select_sites
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

    def samples(self, size: int | None = None) -> dict[str, Callable[[], Iterable[Batch]]]:
        return {task: lambda: self.batches(size) for task in TASKS}


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


def layers_of(models: Subject, calibrator: ClosedForm, **options: Any) -> list[CalibratedLayer]:
    """Calibrated layers of all default sites; `options` are those of `calibrate` and replace what is said here."""
    update = getattr(calibrator, "update", ("linear", "bias", "norm"))
    arguments: dict[str, Any] = {
        "samples": models.samples(),
        "sites": select_sites(models.pool.chain, update=update),
        **options,
    }
    pool = arguments.pop("pool", models.pool)
    return list(calibrate(pool, arguments.pop("samples"), calibrator, **arguments))


def calibrated(models: Subject, calibrator: ClosedForm, **options: Any) -> dict[tuple[int, str], Tensor]:
    """New parameters by layer and name."""
    return updates_of(layers_of(models, calibrator, **options))


def updates_of(layers: Iterable[CalibratedLayer]) -> dict[tuple[int, str], Tensor]:
    return {(layer.layer, name): value for layer in layers for name, value in layer.updates.items()}
