"""Saved runs to report on."""

from __future__ import annotations

import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.build import Report
from tests.runs.full_run import Size, write_full_run, write_run

SMALL = Size(blocks=2, samples=8, width=4, classes=3, tests=50)
HOSTILE = "<script>alert('drift')</script>"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    folder = tmp_path_factory.mktemp("runs")
    variants = ["base", "merged", "calibrated:featcal"]
    return open_run(write_run(folder / "run", synthetic=True, variants=variants))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run whose names would do harm wherever they were not escaped."""
    folder = tmp_path_factory.mktemp("runs")
    return open_run(write_run(folder / "run", name=HOSTILE, tasks=[HOSTILE, "\x1b[31mred\nline", "手写数字"]))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run without labels: no accuracy, no shares, no self-checks."""
    folder = tmp_path_factory.mktemp("runs")
    return open_run(write_run(folder / "run", has_labels=False, has_heads=False))


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run with everything in it: calibrated, with a control, labels and scores."""
    return open_run(write_full_run(tmp_path_factory.mktemp("runs") / "full", size=SMALL))


@pytest.fixture(scope="session")
def standard(full: DriftRun) -> Report:
    """The standard report on the run with everything in it; its content is put together once."""
    return Report(full)


@pytest.fixture(scope="session")
def everything(full: DriftRun) -> Report:
    """The report with every section, chart and sample."""
    return Report(full, "full")
