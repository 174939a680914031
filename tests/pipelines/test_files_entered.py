"""How far a reader has to go: one batch of pixels on its way into the tables, one flag on its way to a solve."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import driftlens
from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.residual import ResidualCal
from driftlens.cli import main
from driftlens.engine.walk import walk
from driftlens.pipelines.analyze import reopen_study
from driftlens.pipelines.drift import _DriftRecorder, measure_task
from driftlens.runs.run import DriftRun
from driftlens.utils.distributed import JobContext, Permissions, ProgressReporter
from tests.pipelines.calibrating import copied

ROOM = Path(driftlens.__file__).parent
# Counted, so that one more file shows. CLIP's blocks run through `models/tracing`, as those of all families do.
IN_MEMORY = 18
TO_THE_FIRST_SOLVE = 18
PASSING_ON = ("calibration", "cli", "engine", "experiment", "front", "linalg", "pipelines")
"""Folders that pass a request on; the others open and store, which all commands share."""
MAKING = {"utils/registry.py"}
"""Makes a calibrator from its name and its settings."""


@contextmanager
def entering() -> Iterator[set[str]]:
    """Files of driftlens in which a function is called in this block; importing them does not count."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        is_import = frame.f_code.co_name == "<module>" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and not is_import and frame.f_code.co_filename.startswith(f"{ROOM}/"):
            files.add(Path(frame.f_code.co_filename).relative_to(ROOM).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


def test_a_batch_of_pixels_enters_few_files_on_its_way_into_tables(light: DriftRun) -> None:
    study, _ = reopen_study(light.path, JobContext(access=Permissions(device="cpu")))
    task = next(iter(study.tasks))
    at_hand = study.tasks[task]
    pixels = at_hand.diagnosis.load(range(len(at_hand.diagnosis)))
    in_memory = dataclasses.replace(at_hand.diagnosis, load=lambda rows: pixels[list(rows)])
    tasks = {**study.tasks, task: dataclasses.replace(at_hand, diagnosis=in_memory)}
    study = dataclasses.replace(study, tasks=tasks)

    def look() -> None:
        measure_task(study, task, ProgressReporter())

    look()  # finds the diagnostics and whatever else is found once
    with entering() as files:
        look()
    assert len(files) <= IN_MEMORY, "\n".join(sorted(files))


def test_a_flag_passes_through_few_files_on_its_way_to_the_first_solve(
    light: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(BaseException):
        """The first solve."""

    def stop(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(ResidualCal, "solve", stop)
    assert "residual" in calibrators  # all are imported now, which is no part of the path
    arguments = ["--name", "residual", "--method", "residual", "--progress", "none"]
    with entering() as files, pytest.raises(Reached):
        main(["calibrate", str(copied(light, tmp_path / "run")), *arguments])
    path = {file for file in files if file.startswith(PASSING_ON) or file in MAKING}
    path.add("calibration/residual.py")
    assert len(path) <= TO_THE_FIRST_SOLVE, "\n".join(sorted(path))


def test_pooled_features_hold_no_other_tokens(light: DriftRun) -> None:
    """One token of each sample, kept as a view, would keep the whole features of every layer."""
    study, _ = reopen_study(light.path, JobContext(access=Permissions(device="cpu")))
    task, variant = next(iter(study.tasks)), study.variants[0]
    recorder = _DriftRecorder("cls", variant, study.settings.active_diagnostics)
    with torch.no_grad():
        for view in walk(study.pool, task, [variant], study.tasks[task].diagnosis.batches()):
            recorder.add(view)
    kept = [part for parts in recorder._features.values() for part in parts]
    assert kept and all(part.base.untyped_storage().nbytes() == part.nbytes for part in kept)
