"""The jobs that make runs, as New run and Runs show them: what went wrong, in lines, until it is dismissed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.config.types import parse_yaml
from driftlens.runs.manifest import RunStatus
from driftlens.runs.writer import write_status
from driftlens.utils.errors import RunError
from driftlens_app import processes
from driftlens_app.job_requests import MAX_SPEC_BYTES, analyze_request, spec_files
from driftlens_app.processes import Job, dismiss_job, newest_job, run_json_command, start_job
from driftlens_app.settings import Settings
from driftlens_app.views.new_run import data_option_values
from tests.app.conftest import Open, until
from tests.app.pages import PROBLEMS, errors, failed, newest, said, state

pytestmark = pytest.mark.usefixtures("worker")


def analyse(root: Path, name: str) -> Job:
    """The job of an analysis, at work."""
    (root / "mine.yaml").write_text("version: 1\n")
    job = start_job(analyze_request(Settings(root), "mine.yaml", name))
    until(lambda: state(root / name) == "running", "it runs")
    return job


def kill(job: Job) -> None:
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: state(job.run) == "stopped", "its end is noticed")


def titles(app: AppTest) -> list[str]:
    return [text for text in said(app).splitlines() if text.startswith("**Analysis")]


def dismiss_buttons(app: AppTest) -> list[str]:
    return [button.key for button in app.button if button.label == "Dismiss"]


@pytest.mark.slow
def test_the_end_of_an_older_job_is_told_while_a_newer_one_runs(open_app: Open, root: Path) -> None:
    older = analyse(root, "older")
    analyse(root, "newer")
    app = open_app(root, "new_run")
    assert titles(app) == ["**Analysis newer**", "**Analysis older**"] and not app.error
    kill(older)
    app.run()
    assert "older stopped unexpectedly" in errors(app)
    assert len(dismiss_buttons(app)) == 1 and len(titles(app)) == 2


def test_every_bad_end_is_shown_until_it_is_dismissed(open_app: Open, root: Path) -> None:
    failed(root, "one")
    failed(root, "two")
    app = open_app(root, "new_run")
    assert titles(app) == ["**Analysis one**", "**Analysis two**"] and len(app.error) == 2
    app.button(key=dismiss_buttons(app)[0]).click().run()
    assert titles(app) == ["**Analysis two**"] and len(app.error) == 1
    again = open_app(root, "runs")  # another tab, another page
    assert titles(again) == ["**Analysis two**"]


def test_a_read_only_dashboard_dismisses_nothing(open_app: Open, root: Path) -> None:
    failed(root, "one")
    app = open_app(root, "new_run", read_only=True)
    assert titles(app) == ["**Analysis one**"] and not dismiss_buttons(app)


def test_a_run_that_was_finished_later_has_no_bad_end(open_app: Open, root: Path) -> None:
    job = failed(root, "one")
    job.run.mkdir()
    write_status(job.run, RunStatus("done", heartbeat="2026-01-01T00:00:00.000Z"))  # before the job
    assert titles(open_app(root, "new_run")) == ["**Analysis one**"]
    write_status(job.run, RunStatus("done", heartbeat="2026-01-03T00:00:00.000Z"))
    assert titles(open_app(root, "new_run")) == []


@pytest.mark.slow
def test_dismissing_leaves_the_record_of_a_newer_job_alone(root: Path) -> None:
    old = failed(root, "one")
    new = analyse(root, "one")
    dismiss_job(old)
    assert newest_job(root / "one") == new


def test_further_lines_of_a_message_are_a_list(open_app: Open, root: Path) -> None:
    failed(root, "one")
    (box,) = open_app(root, "new_run").error
    head, problems, hint = box.value.replace("\\", "").split("\n\n")
    assert head == "**Error**: run.yaml: 2 problems"
    assert problems.splitlines() == [
        "- a0: unknown key; allowed here: base",
        "- data.cars: missing (This *key* is required.)",
    ]
    assert hint == "Correct *them*." and r"\*key\*" in box.value and "\ufffd" not in box.value


def test_an_error_of_the_command_is_told_with_its_hint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 2, "", f"Some notice\nerror: {PROBLEMS}\nhint: Correct it.\n")
    monkeypatch.setattr(processes, "run_command", lambda *_: done)
    with pytest.raises(RunError) as refusal:
        run_json_command(("validate", "run.yaml", "--json"), root)
    assert (refusal.value.message, refusal.value.hint) == (PROBLEMS, "Correct it.")


@pytest.mark.slow
@pytest.mark.parametrize("view", ["new_run", "runs", "overview"])
def test_a_folder_that_was_deleted_while_open_is_said_to_be_gone(open_app: Open, root: Path, view: str) -> None:
    app = open_app(root, view)
    shutil.rmtree(root)
    app.run()
    assert "is gone" in errors(app) and "driftlens ui FOLDER" in errors(app)
    assert "defect" not in said(app) and len(app.error) == 1
    assert not [button for button in app.button if button.label == "Run the demo"]


def test_a_folder_that_cannot_be_listed_hides_only_its_own_specs(
    root: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Path.iterdir

    def iterdir(folder: Path) -> object:
        if folder.name == "private":
            raise PermissionError(13, "Permission denied")
        return look(folder)

    (root / "private").mkdir()
    (root / "mine.yaml").write_text("version: 1\n")
    monkeypatch.setattr(Path, "iterdir", iterdir)
    app = open_app(root, "new_run")
    assert not app.error and app.selectbox(key="spec").options == ["mine.yaml"]


def laid_out(root: Path) -> None:
    for place in ("zoo/base/config.json", "zoo/cars.safetensors", "sets/cars/train.csv", "sets/signs.npz"):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).touch()


def filled(app: AppTest, **fields: str) -> AppTest:
    """The form with these fields, sent."""
    values = {"new-name": "mine", "base": "zoo/base", "data": "sets"} | fields
    for key, value in values.items():
        app.text_input(key=key).set_value(value)
    app.text_area(key="experts").set_value("zoo/cars.safetensors\nsigns=owner/model\n")
    return app.button(key="start-new").click().run()


@pytest.mark.slow
def test_models_and_data_become_a_spec_whose_analysis_is_started(open_app: Open, root: Path) -> None:
    laid_out(root)
    app = filled(open_app(root, "new_run"))
    assert not app.error, errors(app)
    made = dict(parse_yaml((root / "mine.yaml").read_text(), "spec"))
    assert (made["base"], made["experts"]) == ("zoo/base", ["zoo/cars.safetensors", "signs=owner/model"])
    data = ["--data=cars=sets/cars", "--data=signs=sets/signs.npz"]
    assert made["options"] == [*data, '--set=merge={"method": "task_arithmetic"}', '--set=name="mine"', "--json"]
    until(lambda: state(root / "mine") == "running", "it runs")
    job = newest(root / "mine")
    assert f'called with analyze {root}/mine.yaml --out {root}/mine --set=name="mine"' in job.log.read_text()
    again = filled(open_app(root, "new_run"))
    assert "exists already" in errors(again)


def test_a_model_that_is_merged_already_takes_the_place_of_a_method(open_app: Open, root: Path) -> None:
    laid_out(root)
    filled(open_app(root, "new_run"), merged="zoo/merged.safetensors", data="")
    made = dict(parse_yaml((root / "mine.yaml").read_text(), "spec"))
    weights = '--set=merged.weights="zoo/merged.safetensors"'
    assert made["options"] == ["--set=merge=null", weights, '--set=name="mine"', "--json"]


def test_what_no_spec_can_be_made_of_starts_nothing(open_app: Open, root: Path) -> None:
    laid_out(root)
    app = open_app(root, "new_run")
    assert "is not in" in errors(filled(app, data=".."))
    assert "base or experts are missing" in errors(filled(app, data="", base=""))
    assert "is not a valid folder name" in errors(filled(app, base="zoo/base", **{"new-name": "a/b"}))
    assert "nothing beside nothing.pt says how it is built" in errors(filled(app, base="nothing.pt"))
    assert not [*root.glob("*.yaml")] and not (root / "mine").exists()


def test_the_data_of_all_tasks_are_one_folder_where_not_each_has_an_entry(root: Path) -> None:
    laid_out(root)
    assert data_option_values(root, "sets", ["zoo/cars.safetensors", "birds=owner/x"]) == ["sets"]
    assert data_option_values(root, "", ["zoo/cars.safetensors"]) == []


def test_a_read_only_dashboard_has_no_form(open_app: Open, root: Path) -> None:
    app = open_app(root, "new_run", read_only=True)
    assert not app.button and not app.text_input and "read-only" in said(app)


def test_a_file_that_is_larger_than_a_spec_may_be_is_not_offered(root: Path) -> None:
    (root / "large.yaml").write_text("#" * (MAX_SPEC_BYTES + 1))
    (root / "small.yaml").write_text("#" * MAX_SPEC_BYTES)
    assert spec_files(root) == ["small.yaml"]
