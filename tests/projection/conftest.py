"""A finished run of one task that a test may spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from driftlens.runs.run import DriftRun, open_run
from tests.records.full_run import Size, write_full_run

SIZE = Size(blocks=1, samples=20, width=6, tests=40)
VARIANTS = ("base", "merged", "calibrated:featcal")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("projection") / "run"
    return write_full_run(path, tasks=("cars",), variants=VARIANTS, size=SIZE)


@pytest.fixture
def run(written: Path, tmp_path: Path) -> DriftRun:
    return open_run(shutil.copytree(written, tmp_path / "run"))
