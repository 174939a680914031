"""What tells others, which need not load any tensors, that a calibration can be gone on with."""

from __future__ import annotations

import pathlib

from driftlens.jobs.calibrate.solution import CalibrationScratch
from driftlens.runs.layout import begun_calibration


def test_the_file_is_there_from_the_beginning_to_the_end(tmp_path: pathlib.Path) -> None:
    file = tmp_path / begun_calibration("mine")
    scratch = CalibrationScratch(tmp_path, "mine")
    assert not file.exists() and not scratch.is_there
    scratch.begin({"lam": 0.5})
    assert file.is_file() and scratch.is_there
    assert not (tmp_path / begun_calibration("other")).exists()
    scratch.remove()
    assert not file.exists() and not scratch.is_there


def test_a_name_stays_within_the_run() -> None:
    assert ".." not in pathlib.PurePath(begun_calibration("../../up")).parts
