"""The page Repair: its form, its button, its progress, and what it shows when the work is over."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pandas as pd
import pytest

from driftlens.results.calibration_summary import calibration_effect_tables
from driftlens.results.formatting import typeset_signs
from driftlens.results.verdict import verdict
from driftlens.runs.run import open_run
from driftlens.utils.errors import RunError
from driftlens_app.job_requests import sweep_request
from driftlens_app.processes import log_tail, poll_job
from tests.app.conftest import Open, opened_drawers, until
from tests.app.pages import (
    calibrate_as,
    called,
    errors,
    finish,
    is_disabled,
    newest,
    press,
    said,
    state,
    step,
)
from tests.runs.full_run import write_full_run

pytestmark = pytest.mark.usefixtures("worker")


@pytest.mark.slow
def test_the_button_starts_the_command_with_what_the_form_says(open_app: Open, root: Path, run: Path) -> None:
    app = open_app(root, "repair")
    app.number_input(key="featcal.lam").set_value(0.5)
    app.number_input(key="samples").set_value(16)
    app.multiselect(key="featcal.update").set_value(["norm", "linear"])
    app.text_input(key="layers").set_value("*.resblocks.*")
    calibrate_as(app, "refused")
    command, folder, *options = called(run)
    assert (command, folder) == ("calibrate", str(run))
    assert set(options[:-2]) == {
        "--name=refused",
        "--method=featcal",
        "--preset=paper-clip",
        "--samples=16",
        "--layers=*.resblocks.*",
        "--set=lam=0.5",
        '--set=update=["linear",',
        '"norm"]',
    }
    assert options[-2:] == ["--progress", "jsonl"]


@pytest.mark.slow
def test_a_failure_shows_cause_hint_and_log_and_the_form_stays_filled(open_app: Open, root: Path, run: Path) -> None:
    app = open_app(root, "repair")
    app.number_input(key="featcal.rho").set_value(1.5)
    calibrate_as(app, "failing")
    step(run, 0)
    until(lambda: state(run) == "failed", "it has failed")
    for tab in (open_app(root, "repair"), app.run()):
        assert "SingularGramError: the Gram matrix is *singular*" in errors(tab).replace("**", "")
        assert "Raise lam." in errors(tab)
        (log,) = opened_drawers(tab, "Log")
        assert "error: the Gram matrix" in log.code[0].value
    assert app.text_input(key="name").value == "failing"
    assert app.number_input(key="featcal.rho").value == 1.5


@pytest.mark.slow
def test_a_cancel_that_leaves_no_record_is_told_and_stops_the_job(
    open_app: Open, root: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = calibrate_as(open_app(root, "repair"), "deaf")
    until(lambda: state(run) == "running", "it runs")

    def full(_job: object) -> None:
        raise RunError("can't write the record: No space left on device", hint="Free some space.")

    sent: list[int] = []
    monkeypatch.setattr("driftlens_app.processes.write_job_record", full)
    monkeypatch.setattr("driftlens_app.processes._signal_process_group", lambda _job, number: sent.append(number))
    press(app.run(), "Cancel")
    assert not app.exception and sent == [signal.SIGINT]
    assert "No space left on device" in errors(app) and "Free some space." in errors(app)
    monkeypatch.undo()


@pytest.mark.slow
def test_going_on_after_a_cancel_writes_no_folder_beside_a_single_run(open_app: Open, root: Path, run: Path) -> None:
    app = calibrate_as(open_app(root, "repair"), "steady")
    until(lambda: state(run) == "running", "it runs")
    press(app.run(), "Cancel")
    until(lambda: state(run) == "cancelled", "it has stopped")
    assert "was cancelled" in said(app.run())
    record = run / "logs" / "calibrate-job.json"
    found = json.loads(record.read_text())
    found["settings"]["save_weights"] = "anywhere"
    record.write_text(json.dumps(found))
    press(open_app(run, "repair"), "Continue where it stopped")
    until(lambda: state(run) == "running", "it runs again")
    job = newest(run)
    assert "--resume" in log_tail(job.log) and "--save-weights" not in log_tail(job.log)


@pytest.mark.slow
def test_the_tables_of_a_finished_calibration_are_those_of_card_and_report(
    open_app: Open, root: Path, run: Path
) -> None:
    app = open_app(root, "repair")
    found = verdict(open_run(run), "featcal")
    (head,) = [entry.proto.body for entry in app.get("html") if "headline" in entry.proto.body]
    assert all(f"{100 * mean.value:.1f}" in head for mean in found.means.values())
    assert {"base", "merged", "featcal", "expert"} <= {*app.dataframe[0].proto.column_order}
    sheets = calibration_effect_tables(open_run(run), "featcal")
    assert len(app.dataframe) == 1  # the others are made once they are opened
    (numbers,) = opened_drawers(app, "All numbers")
    frames = [frame.value for frame in numbers.dataframe]
    for sheet in sheets:
        names = [sheet.columns[column.at[0]].name for column in sheet.display_columns()]
        _, *rows = sheet.formatted_rows()
        (shown,) = [frame for frame in frames if list(frame) == names]
        for head, *texts in zip(names, *rows, strict=True):
            if pd.api.types.is_numeric_dtype(shown[head]):
                exact = sheet.frame()[head].astype(float)
                is_percent = sheet.column_formats[head] in ("share", "points")
                assert shown[head].equals((100 * exact).round(1) if is_percent else exact), head
            else:
                assert shown[head].tolist() in (texts, [*map(typeset_signs, texts)]), head
        assert all(clause in said(app) for clause in re.split("[.;] ", sheet.notes()))
    assert len(sheets) == 6 and any("featcal, anchor only" in [*frame.get("model", [])] for frame in frames)
    assert app.get("plotly_chart")
    links = [link.proto.label for link in app.get("page_link")]
    assert links == ["Samples", "Export"]


@pytest.mark.slow
def test_the_first_numbers_are_shown_while_the_attribution_still_runs(open_app: Open, root: Path, run: Path) -> None:
    manifest = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(json.dumps({**json.loads(manifest), "calibrations": {}}))
    app = calibrate_as(open_app(root, "repair"), "featcal")
    until(lambda: (view := poll_job(run)) is not None and view.state == "running", "it runs")
    app.run()
    assert not [frame for frame in app.dataframe if "task" in frame.value]
    (run / "manifest.json").write_text(manifest)
    app.run()
    assert [frame for frame in app.dataframe if "task" in frame.value]
    assert "attribution to layers is still running" in said(app) and "is done" not in said(app)
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    app.run()
    assert "Calibration featcal is done." in said(app) and "still running" not in said(app)


@pytest.mark.slow
def test_a_sweep_is_a_press_away(open_app: Open, root: Path, run: Path) -> None:
    """Around the published settings, each coefficient within its range."""
    app = open_app(root, "repair")
    press(app, "Sweep lam, rho and alpha")
    until(lambda: state(run) == "running", "it runs")
    job = newest(run)
    assert job.kind == "sweep" and "Sweep of lam, rho and alpha" in said(app.run())
    assert called(run) == [
        *("sweep", str(run), "--resume", "--preset=paper-clip", "--param=lam=0.002,0.01,0.05,0.25,1.25"),
        *("--param=rho=0.5,1,2,3", "--param=alpha=0,0.15,0.3,0.6,0.9", "--progress", "jsonl"),
    ]
    assert is_disabled(app, "Sweep lam, rho and alpha") and "Find the best repair" not in {
        button.label for button in app.button
    }
    finish(run)
    until(lambda: state(run) == "done", "it is done")


def test_a_sweep_without_a_base_leaves_out_what_takes_one(tmp_path: Path) -> None:
    made = open_run(write_full_run(tmp_path / "run", variants=["merged"]))
    varied = [word.split("=")[1] for word in sweep_request(made).arguments if word.startswith("--param")]
    assert varied == ["lam", "alpha"]


@pytest.mark.slow
def test_checkpoint_and_card_can_be_taken_away(open_app: Open, root: Path, run: Path) -> None:
    folder = run / "calibrations" / "featcal"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"x" * 2_000_000)
    (folder / "README.md").write_text("# card")
    labels = [button.label for button in open_app(root, "repair").get("download_button")]
    assert "Calibrated checkpoint (2 MB)" in labels and "Model card" in labels
    (folder / "weights.safetensors").unlink()
    (folder / "weights.safetensors").symlink_to("/etc/hostname")
    labels = [button.label for button in open_app(root, "repair").get("download_button")]
    assert not [label for label in labels if label.startswith("Calibrated checkpoint")]
