"""What tests of a calibration share: copies of a finished run, and frames that must not move."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import driftlens as dl
from driftlens.config.requests import CalibrationRequest
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.model_selection import HeldOutScorer
from driftlens.runs.run import DriftRun
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import Cancelled
from driftlens.utils.progress import CancelToken, ProgressEvent
from tests.zoo.world import CLASSES, World, write_images

TABLES = ("layers", "samples", "outputs", "params", "accuracy")
NAME, VARIANT, CONTROL = "featcal", "calibrated:featcal", "baseline:featcal-anchor"


def copied(run: DriftRun, folder: Path) -> Path:
    """A copy of a run that a test may add to."""
    return Path(shutil.copytree(run.path, folder))


def request(name: str = NAME, **changes: Any) -> CalibrationRequest:
    return CalibrationRequest(name=name, **changes)


def calibrate_until(folder: Path, stop: Callable[[ProgressEvent], bool], **changes: Any) -> None:
    """A calibration that is cancelled as soon as `stop` says so of an event."""
    token = CancelToken()

    def watch(event: ProgressEvent) -> None:
        if stop(event):
            token.cancel()

    try:
        calibrate(folder, request(**changes), JobContext(on_progress=watch, cancel=token))
    except Cancelled:
        return
    raise AssertionError("the calibration was not stopped")


def same_rows(found: DriftRun, expected: DriftRun) -> None:
    """Every row of `expected` stands in `found`, bit for bit."""
    for table in TABLES:
        rows, wanted = getattr(found, table)(), getattr(expected, table)()
        rows = rows[rows["variant"].isin(set(wanted["variant"]))].reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, wanted, check_exact=True, obj=table)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


COUNT = 16
"""Calibration samples of every task."""


def roomy_run(world: World, folder: Path, **changes: Any) -> DriftRun:
    """A finished run of the world's models on images of its own, without Jacobians; `changes` as for `World.spec`."""
    data: dict[str, Any] = {"defaults": {"n": COUNT, "n_diagnosis": 5, "batch_size": 8}}
    for seed, task in enumerate(world.tasks):
        write_images(folder / f"{task}.npz", CLASSES[task], seed, train=COUNT)
        data[task] = {"kind": "npz", "file": str(folder / f"{task}.npz")}
    spec = world.spec(data=data, metrics={"jacobian": False}, **changes)
    return dl.analyze(spec, out=folder / "run", progress="none")


def spoil_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let merged model and base look bad, so that calibrations are chosen among: few samples rarely show it."""
    measured = HeldOutScorer.score_model

    def spoilt(self: HeldOutScorer, model: str, *at: Any) -> dict[str, Any]:
        found = measured(self, model, *at)
        as_is = model in ("merged", "base")
        if not as_is:
            return found
        return {task: {kind: np.full_like(of, 1e3) for kind, of in at.items()} for task, at in found.items()}

    monkeypatch.setattr(HeldOutScorer, "score_model", spoilt)


def scored_again(folder: Path) -> DriftRun:
    """The run in the folder, whose scores are forgotten and measured anew from its files."""
    from driftlens.pipelines.analyze import measure_missing_parts

    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["phases"] = {name: at for name, at in manifest["phases"].items() if "evaluate:" not in name}
    file.write_text(json.dumps(manifest))
    return measure_missing_parts(folder)
