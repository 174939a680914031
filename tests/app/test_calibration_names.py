"""Names of calibrations on the page Calibrate: a free one to begin with, no taken one, the newest one shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.config.requests import CalibrationRequest
from driftlens.runs.manifest import calibration_marker
from driftlens.runs.run import open_run
from driftlens.utils.errors import SpecError
from driftlens_app import processes
from driftlens_app.calibration import START, next_free_name
from driftlens_app.job_requests import calibrate_request
from driftlens_app.processes import newest_job, start_job
from tests.app.conftest import Open, until
from tests.app.pages import calibrate_as, called, errors, finish, press, said, state
from tests.runs.full_run import VARIANTS, write_full_run

pytestmark = pytest.mark.usefixtures("worker")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the tables of three calibrations, two of which its manifest keeps to itself."""
    path = tmp_path / "runs" / "full"
    write_full_run(path, variants=(*VARIANTS, "calibrated:steady", "calibrated:featcal-2"))
    with_calibrations(path, ["featcal"])
    return path


def with_calibrations(run: Path, names: Sequence[str]) -> None:
    """Let the manifest list these calibrations, in this order."""
    path = run / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = manifest["calibrations"]["featcal"]
    path.write_text(json.dumps({**manifest, "calibrations": dict.fromkeys(names, entry)}))


def end(run: Path, names: Sequence[str]) -> None:
    """Let the running calibration finish and be listed."""
    until(lambda: state(run) == "running", "it runs")
    with_calibrations(run, names)
    finish(run)
    until(lambda: state(run) == "done", "it is done")


def chosen(app: AppTest) -> str:
    return str(app.selectbox(key="calibration").value)


@pytest.mark.parametrize(
    ("name", "taken", "free"),
    [
        ("featcal", [], "featcal"),
        ("featcal", ["other"], "featcal"),
        ("featcal", ["featcal"], "featcal-2"),
        ("featcal", ["featcal", "featcal-2"], "featcal-3"),
        ("featcal-2", ["featcal-2"], "featcal-2-2"),
        ("lam-0.5", ["lam-0.5"], "lam-0.5-2"),
    ],
)
def test_the_first_free_name_follows_its_stem(name: str, taken: list[str], free: str) -> None:
    assert next_free_name(name, taken) == free


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced_or_gone_on_with(run: Path) -> None:
    opened = open_run(run)
    with pytest.raises(SpecError, match="has a calibration 'featcal' already") as caught:
        calibrate_request(opened, CalibrationRequest(name="featcal"))
    assert caught.value.hint == "Check 'Replace a calibration of this name', or choose another name."
    for allowed in ({"replace": True}, {"resume": True}):
        assert calibrate_request(opened, CalibrationRequest(name="featcal", **allowed)).name == "featcal"


@pytest.mark.slow
def test_the_form_begins_with_a_free_name(open_app: Open, run: Path) -> None:
    assert open_app(run.parent, "repair").text_input(key="name").value == "featcal-2"


@pytest.mark.slow
def test_a_taken_name_starts_no_process(open_app: Open, run: Path) -> None:
    app = open_app(run.parent, "repair")
    calibrate_as(app, "featcal")
    assert "has a calibration 'featcal' already" in errors(app)
    assert app.checkbox(key="replace").label in errors(app)
    assert newest_job(run) is None and not processes._CHILDREN
    assert app.text_input(key="name").value == "featcal"


@pytest.mark.slow
def test_a_name_that_somebody_took_meanwhile_is_refused_and_not_changed(open_app: Open, run: Path) -> None:
    app = open_app(run.parent, "repair")
    with_calibrations(run, ["featcal", "featcal-2"])
    press(app, START)
    assert "has a calibration 'featcal-2' already" in errors(app) and newest_job(run) is None
    assert app.text_input(key="name").value == "featcal-2"
    assert app.run().text_input(key="name").value == "featcal-3"


@pytest.mark.slow
def test_a_finished_calibration_is_shown_in_every_tab_whatever_was_chosen_there(open_app: Open, run: Path) -> None:
    """Also without a choice: `tests/browser/test_repair.py`."""
    with_calibrations(run, ["featcal", "steady"])
    app, other = (open_app(run.parent, "repair") for _ in range(2))
    for tab in (app, other):
        assert chosen(tab) == "steady" and "is done" not in said(tab)
        tab.selectbox(key="calibration").set_value("featcal").run()
        assert chosen(tab.run()) == "featcal"
    calibrate_as(app, "featcal-2")
    assert chosen(other.run()) == "featcal"
    end(run, ["featcal", "steady", "featcal-2"])
    for tab in (app.run(), other.run(), open_app(run.parent, "repair")):
        assert chosen(tab) == "featcal-2"
        assert "Calibration featcal-2 is done." in said(tab) and "Before and after featcal-2" in said(tab)


@pytest.mark.slow
def test_one_that_is_replaced_is_shown_again(open_app: Open, run: Path) -> None:
    with_calibrations(run, ["steady", "featcal"])
    app = open_app(run.parent, "repair")
    start_job(calibrate_request(open_run(run), CalibrationRequest(name="steady", replace=True)))
    end(run, ["featcal", "steady"])
    assert chosen(app.run()) == "steady" and "Calibration steady is done." in said(app)


@pytest.mark.slow
def test_the_best_repair_has_the_name_of_its_method_also_when_it_goes_on(open_app: Open, run: Path) -> None:
    app = press(open_app(run.parent, "repair"), "Find the best repair")
    assert not any(part.startswith("--name") for part in called(run))
    assert "Calibration residual" in said(app.run())
    press(app, "Cancel")
    until(lambda: state(run) == "cancelled", "it has stopped")
    press(app.run(), "Continue where it stopped")
    assert {"--name=residual", "--auto", "--resume"} <= {*called(run)}
    end(run, ["featcal", "residual"])
    assert chosen(app.run()) == "residual" and "Calibration residual is done." in said(app)


@pytest.mark.slow
def test_going_on_is_offered_only_where_something_was_begun(open_app: Open, run: Path) -> None:
    app = calibrate_as(open_app(run.parent, "repair"), "failing")
    (run.parent / "step-0").touch()
    until(lambda: state(run) == "failed", "it has failed")
    assert "Continue where it stopped" in [button.label for button in app.run().button]
    (run / calibration_marker("failing")).unlink()
    assert "Continue where it stopped" not in [button.label for button in app.run().button]
