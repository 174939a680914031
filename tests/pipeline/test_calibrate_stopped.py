"""Calibrations whose run goes away under them, or that stop for want of room: what is said, and what is left."""

from __future__ import annotations

import errno
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from driftlens.base.access import Context
from driftlens.base.errors import Cancelled, RunError
from driftlens.base.progress import CancelToken, ProgressEvent
from driftlens.engine.forward_order import FeatureStore
from driftlens.engine.problems import CalibratedLayer
from driftlens.findings.listing import find_runs
from driftlens.jobs.calibrate import job as calibration_scratch
from driftlens.jobs.calibrate.job import CalibrationScratch, calibrate
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.status import read_status
from driftlens.runs.verify import verify
from tests.pipeline.calibrating import NAME, copied, request, same_rows

Stop = Callable[[ProgressEvent], bool]


@pytest.fixture
def folder(light: DriftRun, tmp_path: pathlib.Path) -> pathlib.Path:
    return copied(light, tmp_path / "run")


def solving(event: ProgressEvent) -> bool:
    return event.phase == "calibrate" and event.label.startswith("layer 3 of")


def analysing(event: ProgressEvent) -> bool:
    return event.phase == "analyze" and event.done > 2


def evaluating(event: ProgressEvent) -> bool:
    return event.phase == "evaluate"


STOPS = pytest.mark.parametrize("stop", [solving, analysing, evaluating])


@STOPS
@pytest.mark.parametrize("is_there_again", [False, True], ids=["removed", "replaced"])
def test_a_run_that_goes_away_ends_its_calibration(
    folder: pathlib.Path, light: DriftRun, stop: Stop, is_there_again: bool
) -> None:
    def remove(event: ProgressEvent) -> None:
        if stop(event) and open_run(folder).manifest.unfinished:
            shutil.rmtree(folder)
            if is_there_again:
                copied(light, folder)

    def watch(event: ProgressEvent) -> None:
        if folder.exists():
            remove(event)

    with pytest.raises(RunError, match="removed") as caught:
        calibrate(folder, request(), Context(on_progress=watch))
    assert "--resume" not in caught.value.hint
    if is_there_again:
        assert verify(folder).ok and not verify(folder).unlisted and not (folder / "run.lock").exists()
        assert read_manifest(folder) == light.manifest
    else:
        assert not folder.exists()


def test_nothing_of_the_scratch_folder_comes_back(tmp_path: pathlib.Path) -> None:
    scratch = CalibrationScratch(tmp_path / "run", NAME)
    (tmp_path / "run").mkdir()
    scratch.begin({})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match="was removed"):
        scratch.keep(CalibratedLayer(2, {}, (), {}), 1.0)
    with pytest.raises(RunError, match="can't be written"):
        FeatureStore(0, scratch.spill).write("cars", {"x": torch.zeros(1)})
    assert not (tmp_path / "run").exists()


@STOPS
def test_a_cancelled_calibration_says_which_command_goes_on(
    folder: pathlib.Path, light: DriftRun, stop: Stop
) -> None:
    token = CancelToken()
    with pytest.raises(Cancelled) as caught:
        calibrate(
            folder, request(), Context(on_progress=lambda event: stop(event) and token.cancel(), cancel=token)
        )
    command = f"`driftlens calibrate {folder} --name {NAME} --resume`"
    assert command in caught.value.hint
    status = read_status(folder)
    assert status is not None and status.error is not None and command in status.error.hint
    assert status.state == "cancelled" and find_runs(folder)[0].state == "done"
    assert set(read_manifest(folder).files) == set(light.manifest.files) and verify(folder).ok


def test_a_full_disk_leaves_the_run_done_and_says_which_command_goes_on(
    folder: pathlib.Path, light: DriftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RunError("can't write it: No space left on device", hint="Free some space.", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(calibration_scratch, "save_state_dict", full)
        with pytest.raises(RunError, match="No space left") as caught:
            calibrate(folder, request())
    assert (
        caught.value.hint.startswith("Free some space. ") and f"--name {NAME} --resume" in caught.value.hint
    )
    (summary,) = find_runs(folder)
    assert summary.state == "done" and f"calibration '{NAME}' failed" in summary.left[0]
    assert set(read_manifest(folder).files) == set(light.manifest.files) and verify(folder).ok
    same_rows(open_run(folder), light)
    same_rows(calibrate(folder, request(resume=True)), light)
    assert verify(folder).ok and not verify(folder).unlisted and find_runs(folder)[0].left == ()
