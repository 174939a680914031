"""Trained repairs: what they declare, what their features are, and that they learn from the right task."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from driftlens.calibration.calibrator import TrainedCalibrator, calibrators
from driftlens.calibration.surgery import ProbSurgery, Surgery, linear_init
from driftlens.data.samples import Batch
from tests.calibration.helpers import (
    TASKS,
    Subject,
    context,
    final_features,
    given,
    subject,
    trained,
)

TRAINED = [name for name, kind in calibrators.items() if issubclass(kind, TrainedCalibrator)]


@pytest.mark.parametrize("name", ["open_clip_vit", "llama"])
def test_what_is_trained_is_what_surgery_makes_of_the_librarys_own_final_features(name: str) -> None:
    """All samples at once, by `nn.L1Loss` and an optimiser of its own; of texts every token that counts."""
    models, task, steps = subject(name, n=4), TASKS[1], 5
    found = trained(models, Surgery(rank=2, steps=steps, batch=4))[task]
    with torch.no_grad():
        own, wanted = (
            final_features(models.modules[model].double(), models.inputs) for model in ("merged", f"expert:{task}")
        )
    width, last = own.shape[-1], len(models.pool.chain.layers)
    seed = torch.Generator().manual_seed(zlib.crc32(f"{last} {task}".encode()))
    down = linear_init(2, width, seed).requires_grad_()
    up = torch.zeros(width, 2, requires_grad=True)
    optimiser = torch.optim.Adam([down, up], lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        corrected = own - torch.relu(own @ down.double().T) @ up.double().T
        torch.nn.functional.l1_loss(corrected, wanted).backward()
        optimiser.step()
    torch.testing.assert_close(found.down, down.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.up, up.detach(), rtol=1e-4, atol=1e-6)
    assert found.up.abs().max() > 1e-3


def test_features_beyond_the_budget_wait_on_disk_and_give_the_same(tmp_path: Path) -> None:
    """The folder is empty afterwards."""
    method = Surgery(steps=7, batch=4)
    wanted, written = trained(subject(n=6), method), list[int]()

    def step(*_: Any) -> None:
        written.append(len(list(tmp_path.glob("spill/*"))))

    found = trained(subject(n=6), method, feature_budget=0, spill=tmp_path / "spill", on_step=step)
    assert max(written) > 3 and not list(tmp_path.iterdir())
    assert all(torch.equal(found[task].up, each.up) for task, each in wanted.items())


HALF = 6
SHUFFLED = [Surgery(steps=150, lr=1e-2), ProbSurgery(steps=150, lr=1e-2)]


def remaining(models: Subject, method: Any, shown: dict[str, str]) -> float:
    """Of the repaired model, the mean distance to each task's own expert on its own samples.

    Half of the samples are one task's; `shown` says whose the repair takes for a task's.
    """
    halves = dict(zip(TASKS, models.inputs.split(HALF), strict=True))
    parts = {task: given([Batch(0, HALF, halves[shown[task]])]) for task in TASKS}
    pool = models.pool
    layers = list(method.calibrate(context(models, parts=parts, sites={})))
    maps = {task: each for at in layers for task, each in at.attachments.items()}
    total = 0.0
    with torch.no_grad():
        for task, half in halves.items():
            start, side = pool.chain.start(half)
            ends = []
            for variant in ("merged", f"expert:{task}"):
                state = start
                for layer in pool.chain.layers:
                    walked = pool.layer_map(variant, layer, task)
                    if variant == "merged" and layer is pool.chain.layers[-1]:
                        walked = dataclasses.replace(walked, attachment=maps[task])
                    state = walked(state, side)
                ends.append(state["hidden"])
            total += float((ends[0] - ends[1]).norm(dim=1).mean())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("method", SHUFFLED, ids=lambda method: type(method).__name__)
def test_it_loses(method: Any) -> None:
    models = subject(n=2 * HALF)
    right = remaining(models, method, {task: task for task in TASKS})
    shuffled = remaining(models, method, dict(zip(TASKS, reversed(TASKS), strict=True)))
    assert right < 0.9 * shuffled
