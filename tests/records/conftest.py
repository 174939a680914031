"""Saved runs: one that tests only read, and one of their own."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from driftlens.records.run import DriftRun, open_run
from tests.records.factory import write_run


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished run for reading."""
    return write_run(tmp_path_factory.mktemp("runs") / "saved")


@pytest.fixture
def run(saved: pathlib.Path) -> DriftRun:
    return open_run(saved)


@pytest.fixture
def own(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A finished run that the test may spoil."""
    return pathlib.Path(shutil.copytree(saved, tmp_path / "own"))
