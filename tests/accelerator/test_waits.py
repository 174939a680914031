"""How often the host waits for a device, phase by phase: for values that it reads, and for copies to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import driftlens as dl
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.engine.walk import Crossing
from driftlens.runs.writer import RunWriter
from tests.accelerator import Counts, counted
from tests.accelerator.subjects import models, pool_on
from tests.calibration.helpers import batched, given, ground
from tests.zoo.world import DEPTH, World, build

pytestmark = pytest.mark.slow

LAYERS = DEPTH + 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world") / "models")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is read of every batch."""
    take = Crossing.take

    def reading(self: Crossing, *given: Any, **named: Any) -> Any:
        left = take(self, *given, **named)
        left[self.layer.stream].sum().item()
        return left

    monkeypatch.setattr(Crossing, "take", reading)


def by_phase(world: World, out: Path, batch_size: int, num_baselines: int) -> dict[str, tuple[int, int]]:
    """Values read and copies to the host in every phase of an analysis of two tasks with four samples."""
    defaults = {"n": 4, "n_diagnosis": 4, "batch_size": batch_size}
    spec = world.spec(metrics={"jacobian": {"samples": 2, "nodes": 4, "max_nodes": 4}})
    spec["data"]["defaults"] = defaults
    weights = {"weights": str(world.weights(world.tasks[0]))}
    spec["baselines"] = {f"other{number}": weights for number in range(num_baselines)}
    seen: dict[str, tuple[int, int]] = {}
    phase = RunWriter.phase

    @contextmanager
    def counting(self: RunWriter, name: str) -> Iterator[dict[str, Any]]:
        before: Counts = counted()
        with phase(self, name) as usage:
            yield usage
        seen[name] = (counted() - before).read, (counted() - before).to_host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "phase", counting)
        dl.analyze(spec, out=out, device="sim", progress="none")
    return seen


def test_an_analysis_waits_per_layer(sim: torch.device, world: World, tmp_path: Path) -> None:
    few, narrow, many = (
        by_phase(world, tmp_path / f"{size}", size, num) for size, num in ((4, 1), (1, 1), (2, 3))
    )
    assert narrow == few
    for name in world.tasks:
        if (
            name != world.tasks[0]
        ):  # whose first two samples are also held against float64, variant by variant
            # Whether features are finite; columns, vectors and how far the library's are off.
            assert few[f"analyze:{name}"] == many[f"analyze:{name}"] == (LAYERS, 3 * LAYERS)
        # A look at each of base, merged model, expert and baselines, and their answers.
        assert few[f"evaluate:{name}"] == (4, 1) and many[f"evaluate:{name}"] == (6, 1)
        # Of each variant that is explained: whether features are finite, whether nodes suffice; the columns.
        ratio = [many[f"explain:{name}"][at] / few[f"explain:{name}"][at] for at in (0, 1)]
        assert ratio == [2.0, 2.0] and few[f"explain:{name}"][0] <= 2 * 2 * LAYERS


def test_a_value_read_of_every_batch_is_found(
    sim: torch.device, world: World, tmp_path: Path, planted: None
) -> None:
    seen = by_phase(world, tmp_path / "run", 2, 1)
    assert seen[f"analyze:{world.tasks[1]}"][0] > LAYERS and seen[f"evaluate:{world.tasks[1]}"][0] > 4


def waits(method: Calibrator, device: torch.device, batch_size: int, tasks: str) -> int:
    """Values read and copies to the host of a calibration on four samples of each task."""
    batches = batched(models().inputs, batch_size)
    parts = {task: given(batches) for task in tasks}
    on = ground(models(), method.update, pool=pool_on(models(), device), parts=parts)
    before = counted()
    for _ in method.calibrate(on):
        pass
    seen = counted() - before
    return seen.read + seen.to_host


METHODS: dict[str, Calibrator] = {
    "featcal": FeatCal(),
    "residual": ResidualCal(cv="off"),
    "uniform": ResidualCal(cv="off", weights="uniform"),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_calibration_waits_per_layer(sim: torch.device, method: Calibrator) -> None:
    assert waits(method, sim, 4, "a") == waits(method, sim, 1, "ab")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_calibration_that_reads_of_every_batch_is_found(
    sim: torch.device, method: Calibrator, planted: None
) -> None:
    assert waits(method, sim, 4, "a") < waits(method, sim, 1, "ab")
