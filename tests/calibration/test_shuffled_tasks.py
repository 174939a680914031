"""A repair trained with the tasks of the samples mixed up loses against one that was told the right ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from driftlens.calibration.distill import Distill
from driftlens.calibration.interv_merge import IntervMerge
from driftlens.calibration.react import ReACT
from driftlens.calibration.surgery import ProbSurgery, Surgery, SurgeryV2
from driftlens.data.samples import Batch
from tests.calibration.helpers import TASKS, Subject, given, ground, subject

HALF = 6
METHODS = [
    ReACT(),
    Surgery(steps=150, lr=1e-2),
    ProbSurgery(steps=150, lr=1e-2),
    SurgeryV2(steps=40, lr=1e-2),
    IntervMerge(rank=4, steps=40, lr=1e-2),
    Distill(steps=40, batch=12, lr=3e-3),
]


def remaining(models: Subject, method: Any, shown: dict[str, str]) -> float:
    """Of the repaired model, the mean distance to each task's own expert on its own samples.

    Half of the samples are one task's; `shown` says whose the repair takes for a task's.
    """
    halves = dict(zip(TASKS, models.inputs.split(HALF), strict=True))
    parts = {task: given([Batch(0, HALF, halves[shown[task]])]) for task in TASKS}
    pool = models.pool
    layers = list(method.calibrate(ground(models, parts=parts, sites={})))
    maps = {(task, at.layer): each for at in layers for task, each in at.attachments.items()}
    weights = {at.layer: at.updates for at in layers}
    total = 0.0
    with torch.no_grad():
        for task, half in halves.items():
            start, side = pool.chain.start(half)
            ends = []
            for variant in ("merged", f"expert:{task}"):
                state = start
                for layer in pool.chain.layers:
                    walked = pool.layer_map(variant, layer, task)
                    if variant == "merged":
                        parameters = {**walked.parameters, **weights.get(layer.index, {})}
                        walked = dataclasses.replace(
                            walked, parameters=parameters, attachment=maps.get((task, layer.index))
                        )
                    state = walked(state, side)
                ends.append(state["hidden"])
            total += float((ends[0] - ends[1]).norm(dim=1).mean())
    return total


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_it_loses(method: Any) -> None:
    models = subject(n=2 * HALF)
    right = remaining(models, method, {task: task for task in TASKS})
    shuffled = remaining(models, method, dict(zip(TASKS, reversed(TASKS), strict=True)))
    assert right < 0.9 * shuffled
