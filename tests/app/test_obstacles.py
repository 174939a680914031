"""Reasons that keep a calibration from starting, next to its button."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from driftlens.runs.run import DriftRun, open_run, resume_command
from driftlens.runs.schema import ANALYZE
from driftlens.runs.writer import RunLock, RunWriter
from driftlens_app.show import insert_run_path
from driftlens_app.views.repair import calibration_obstacle
from tests.app.conftest import Open
from tests.app.pages import is_disabled, said

pytestmark = pytest.mark.usefixtures("worker")
BEST = "Find the best repair"
START = "Calibration is not possible: "


@pytest.fixture
def run(root: Path) -> Path:
    """A run whose analysis has its phases on record."""
    run = root / "full"
    with RunWriter.resume(run) as writer:
        for kind, task in itertools.product(("analyze", "evaluate"), writer.manifest.tasks):
            with writer.phase(f"{kind}:{task}"):
                pass
    return run


def edit(run: Path, entry: str, **values: Any) -> DriftRun:
    """The run after values of one entry of its manifest were replaced or added."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest[entry] |= values
    (run / "manifest.json").write_text(json.dumps(manifest))
    return open_run(run)


@pytest.mark.parametrize("state", ["failed", "running", None])
def test_an_unfinished_run_says_what_is_still_to_be_done(run: Path, state: str | None) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    if state is None:
        del manifest["phases"]["analyze:mnist"]
    else:
        manifest["phases"]["analyze:mnist"]["state"] = state
    (run / "manifest.json").write_text(json.dumps(manifest | {"finished": ""}))
    unfinished = open_run(run)
    text = "the run is unfinished; still to be done: analyze:mnist. Resume its analysis first"
    assert calibration_obstacle(unfinished) == text


def test_what_a_chart_lacks_is_told_with_the_folder_of_its_run(run: Path) -> None:
    lacking, at = f"needs drift; `{ANALYZE}` adds it.", shlex.quote(str(run))
    assert (
        insert_run_path(open_run(run), lacking)
        == f"needs drift; `driftlens analyze {at}/spec.yaml --out NEW` adds it."
    )
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"finished": ""}))
    assert insert_run_path(open_run(run), lacking) == f"needs drift; `{resume_command(run)}` adds it."


@pytest.mark.slow
def test_obstacles_are_named(open_app: Open, root: Path, run: Path) -> None:
    opened = open_run(run)
    assert calibration_obstacle(opened) == ""
    lock = RunLock(run)
    lock.acquire()
    text = calibration_obstacle(opened)
    assert "is being written to by" in text and str(os.getpid()) in text
    app = open_app(root, "repair")
    assert f"{START}{run} is being written to" in said(app) and is_disabled(app, BEST)
    lock.release()
    assert not is_disabled(open_app(root, "repair"), BEST)
    live = "the run's live modules are not here; `run.calibrate(...)` in Python takes them"
    assert calibration_obstacle(edit(run, "architecture", loader="live")) == live
