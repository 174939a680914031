"""The list of runs where work on a run ended early, goes on, or has been taken up again."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.runs.manifest import RunStatus, read_manifest, write_manifest
from driftlens.runs.writer import RunWriter, write_status
from driftlens.utils.errors import Cancelled
from driftlens_app import processes
from driftlens_app.processes import poll_job
from tests.app.conftest import Open, until
from tests.app.pages import OF_A_RUN, begin, finish, said, state, step


def test_a_cancelled_calibration_is_told_beside_a_run_that_is_done(open_app: Open, root: Path) -> None:
    with pytest.raises(Cancelled), RunWriter.resume(root / "full") as writer:
        writer.begin_variants(["calibrated:x"])
        with writer.phase("calibrate:x"):
            raise Cancelled("cancelled")
    app = open_app(root)
    assert app.dataframe[0].value["state"].tolist() == ["done"]
    (told,) = [entry.value for entry in app.info if "calibration 'x' is unfinished" in entry.value.replace("\\", "")]
    assert told.startswith("**full**") and "resume" in told


@pytest.mark.slow
@pytest.mark.parametrize("view", OF_A_RUN)
def test_a_damaged_status_is_told_and_keeps_no_page_from_its_run(open_app: Open, root: Path, view: str) -> None:
    (root / "full" / "status.json").write_text('{"state": "done", "done": "x"}')
    app = open_app(root, view)
    assert not app.error and app.query_params["run"] == "full"
    told = "status.json can't be read: done: input should be a valid integer, got 'x'. Remove it; "
    told += "the results do not depend on it."
    assert (told in said(app)) == (view == "overview")
    assert told in said(open_app(root, "runs"))


def shown_state(app: AppTest) -> str:
    return str(app.run().dataframe[0].value["state"].item())


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_the_row_of_a_run_tells_how_far_its_job_is(open_app: Open, root: Path) -> None:
    begin(root / "full", "steady")
    step(root / "full", 0)
    until(
        lambda: (view := poll_job(root / "full")) is not None and view.progress is not None,
        "it says something",
    )
    until(lambda: (view := poll_job(root / "full")) is not None and view.progress.done == 1, "it goes on")  # type: ignore[union-attr]
    app = open_app(root)
    assert shown_state(app) == "solving 33 %"
    finish(root / "full")
    until(lambda: state(root / "full") == "done", "it is done")
    assert shown_state(app) == "done"


@pytest.mark.usefixtures("worker")
def test_a_run_that_is_restarted_is_not_called_cancelled(
    open_app: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its new process still loads its libraries, what the old one wrote last is all that the run holds."""
    run = root / "full"
    write_manifest(run, dataclasses.replace(read_manifest(run), finished=""))
    write_status(run, RunStatus("cancelled"))
    app = open_app(root)
    assert shown_state(app) == "cancelled"
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    begin(run, "steady")
    assert shown_state(app) == "starting" and "cancelled" not in said(app)
