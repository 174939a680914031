"""Beside the button of Calibrate: what the last work took, and what would stop a calibration, without asking."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from driftlens.records.lock import RunLock
from driftlens.records.manifest import PhaseInfo
from driftlens.records.run import open_run
from driftlens_app import outlook
from driftlens_app.jobs import processes
from driftlens_app.outlook import obstacles
from tests.app.conftest import Open
from tests.app.test_calibrate import press
from tests.app.test_pages import said

pytestmark = pytest.mark.usefixtures("worker")
START = "A calibration can't begin: "


@pytest.fixture
def run(root: Path) -> Path:
    """A run whose spec names weights that are there."""
    run = root / "full"
    for name in ("base", "expert"):
        (root / f"{name}.safetensors").write_bytes(b"x" * 1_500_000)
    spec = {
        "version": 1,
        "architecture": {"loader": "open-clip", "source": "ViT-tiny"},
        "base": {"weights": str(root / "base.safetensors")},
        "experts": {task: {"weights": str(root / "expert.safetensors")} for task in ("cars", "mnist")},
        "merge": {"method": "average"},
    }
    (run / "spec.yaml").write_text(json.dumps(spec))
    return run


def test_the_page_says_what_the_analysis_took_and_asks_nobody(open_app: Open, root: Path, run: Path) -> None:
    app = open_app(root, "calibrate")
    resources = open_run(run).resources()
    peak = f"{resources['peak_rss_bytes'].max() / 1e6:,.1f} MB"
    assert "The analysis of this run took" in said(app) and f"up to {peak} of memory" in said(app)
    assert START not in said(app) and not processes._CHILDREN


def test_the_newest_calibration_says_more_than_the_analysis(open_app: Open, root: Path, run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    for name, seconds in {
        "calibrate:featcal": 60,
        "calibrate:featcal:params": 5,
        "calibrate:featcal-2": 900,
    }.items():
        manifest["phases"][name] = vars(PhaseInfo("done", seconds, ""))
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "The calibration featcal of this run took 1 min 05 s." in said(open_app(root, "calibrate"))


def test_an_estimate_takes_the_place_of_what_was_known(open_app: Open, root: Path, run: Path) -> None:
    app = press(open_app(root, "calibrate"), "Estimate")
    assert "about 500.0 MB" in said(app) and "The analysis of this run took" not in said(app)


def test_weights_that_have_moved_are_named(open_app: Open, root: Path, run: Path) -> None:
    (root / "expert.safetensors").unlink()
    assert f"{START}there is no file {root / 'expert.safetensors'}; the run's spec" in said(
        open_app(root, "calibrate")
    )
    (root / "base.safetensors").unlink()
    assert f"{START}there is no file {root / 'base.safetensors'} and 1 more" in said(
        open_app(root, "calibrate")
    )
    assert START not in said(open_app(root, "calibrate", read_only=True))


def test_other_obstacles_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_run(run)
    assert obstacles(opened) == []
    lock = RunLock(run)
    lock.acquire()
    (text,) = obstacles(opened)
    assert "is being written to by" in text and str(os.getpid()) in text
    lock.release()
    monkeypatch.setattr(outlook, "free_bytes", lambda _path: 1_400_000)
    assert obstacles(opened) == ["its weights need 1.5 MB, and the disk has 1.4 MB free"]
    (run / "spec.yaml").write_text("version: 99\n")
    (text,) = obstacles(opened)
    assert "a newer DriftLens" in text
