"""A run with enough calibration samples to hold some out."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import driftlens as dl
from driftlens.jobs.contest.trials import HeldOut
from driftlens.runs.run import DriftRun
from tests.zoo.world import CLASSES, World, write_images

COUNT = 16
"""Calibration samples of every task."""


def roomy_run(world: World, folder: pathlib.Path, **changes: Any) -> DriftRun:
    """A finished run of the world's models on images of its own, without Jacobians; `changes` as for `World.spec`."""
    data: dict[str, Any] = {"defaults": {"n": COUNT, "n_diagnosis": 5, "batch_size": 8}}
    for seed, task in enumerate(world.tasks):
        write_images(folder / f"{task}.npz", CLASSES[task], seed, train=COUNT)
        data[task] = {"kind": "npz", "file": str(folder / f"{task}.npz")}
    spec = world.spec(data=data, metrics={"jacobian": False}, **changes)
    return dl.analyze(spec, out=folder / "run", progress="none")


def spoil_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let merged model and base look bad, so that calibrations are chosen among: few samples rarely show it."""
    measured = HeldOut.of

    def spoilt(self: HeldOut[Any], model: str) -> dict[str, Any]:
        found = measured(self, model)
        as_is = model in ("merged", "base")
        return {task: np.full_like(at, 1e3) for task, at in found.items()} if as_is else found

    monkeypatch.setattr(HeldOut, "of", spoilt)
