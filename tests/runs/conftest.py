"""Saved runs, small ones and full ones: for reading, and for a test to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from driftlens.runs.run import DriftRun, open_run
from tests.runs.full_run import write_full_run, write_run
from tests.runs.judged import SIZE


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for reading."""
    return write_run(tmp_path_factory.mktemp("runs") / "saved")


@pytest.fixture
def run(saved: Path) -> DriftRun:
    return open_run(saved)


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A finished run that the test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "own"))


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with everything in it, for reading."""
    return write_full_run(tmp_path_factory.mktemp("runs") / "full", size=SIZE)


@pytest.fixture
def full(written: Path) -> DriftRun:
    return open_run(written)


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    """A run with everything in it that the test may spoil."""
    return Path(shutil.copytree(written, tmp_path / "copy"))
