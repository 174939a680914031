"""The jobs that make runs, as New run and Runs show them: what went wrong, in lines, until it is dismissed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.base.errors import DriftLensError, RunLockedError, SpecError
from driftlens.runs.manifest import read_manifest, write_manifest
from driftlens.runs.status import Status, write_status
from driftlens.spec.yaml_text import from_yaml
from driftlens_app.drafts import PASTED, PASTED_AS
from driftlens_app.jobs import Job, processes, start
from driftlens_app.jobs.processes import ask
from driftlens_app.jobs.record import dismiss, job_of
from driftlens_app.jobs.requests import MOST_BYTES, analyze_request, compare_request
from driftlens_app.settings import Settings
from driftlens_app.views.new_run import proposed_name
from tests.app.conftest import Open, opened_drawers, until
from tests.app.pages import PROBLEMS, errors, failed, is_disabled, newest, press, said, state

pytestmark = pytest.mark.usefixtures("worker")


def analyse(root: Path, name: str) -> Job:
    """The job of an analysis, at work."""
    (root / "mine.yaml").write_text("version: 1\n")
    job = start(analyze_request(Settings(root), "mine.yaml", name))
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
    assert "the process behind older is gone" in errors(app)
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
    write_status(job.run, Status("done", heartbeat="2026-01-01T00:00:00.000Z"))  # before the job
    assert titles(open_app(root, "new_run")) == ["**Analysis one**"]
    write_status(job.run, Status("done", heartbeat="2026-01-03T00:00:00.000Z"))
    assert titles(open_app(root, "new_run")) == []


def test_dismissing_leaves_the_record_of_a_newer_job_alone(root: Path) -> None:
    old = failed(root, "one")
    new = analyse(root, "one")
    dismiss(old)
    assert job_of(root / "one") == new


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


@pytest.mark.parametrize(
    ("code", "kind"), [(2, SpecError), (5, RunLockedError), (4, DriftLensError), (1, DriftLensError)]
)
def test_an_answer_that_is_an_error_is_of_the_kind_its_exit_code_says(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type
) -> None:
    done = subprocess.CompletedProcess([], code, "", f"Some notice\nerror: {PROBLEMS}\nhint: Correct it.\n")
    monkeypatch.setattr(processes, "answer", lambda *_: done)
    with pytest.raises(DriftLensError) as refusal:
        ask(("validate", "run.yaml", "--json"), root)
    assert type(refusal.value) is kind
    assert (refusal.value.message, refusal.value.hint) == (PROBLEMS, "Correct it.")


@pytest.mark.slow
@pytest.mark.parametrize("view", ["new_run", "runs", "overview"])
def test_a_folder_that_was_deleted_while_open_is_said_to_be_gone(
    open_app: Open, root: Path, view: str
) -> None:
    app = open_app(root, view)
    shutil.rmtree(root)
    app.run()
    assert "which the dashboard was opened on, is gone" in errors(app) and "driftlens ui FOLDER" in errors(
        app
    )
    assert "defect" not in said(app) and len(app.error) == 1
    assert not [button for button in app.button if button.label == "Make the demo run"]


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
    assert not app.error and app.selectbox(key="spec").options == ["mine.yaml", "full/spec.yaml", PASTED]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("run.yaml", "run"),
        ("sub/my_spec-1.2.yml", "my_spec-1.2"),
        ("mein spec \u00fcber.yaml", "mein-spec-uber"),
        ("  (copy) of it.yaml", "copy-of-it"),
        ("-x.yaml", "x"),
        ("\u6e2c\u8a66.yaml", "run"),
        (f"{'a' * 100}.yaml", "a" * 80),
        ("made before/spec.yaml", "made-before"),
    ],
)
def test_the_proposed_name_of_a_folder_is_accepted(root: Path, spec: str, name: str) -> None:
    assert proposed_name(spec) == name
    (root / spec).parent.mkdir(exist_ok=True)
    (root / spec).write_text("version: 1\n")
    assert analyze_request(Settings(root), spec, proposed_name(spec)).run == root / name


def test_what_a_run_of_live_modules_was_made_from_is_not_offered(open_app: Open, root: Path) -> None:
    assert open_app(root, "new_run").selectbox(key="spec").options == ["full/spec.yaml", PASTED]
    manifest = read_manifest(root / "full")
    live = dataclasses.replace(manifest, architecture={**manifest.architecture, "loader": "live"})
    write_manifest(root / "full", live)
    assert open_app(root, "new_run").selectbox(key="spec").options == [PASTED]
    assert "There is no spec" in said(open_app(root, "new_run", read_only=True))


def choose(app: AppTest, *merges: str) -> AppTest:
    app.session_state["new-merge"] = True
    return app.run().multiselect(key="merges").set_value([*merges]).run()


def told(root: Path, name: str) -> str:
    """What the command line was called with for the folder."""
    until(lambda: state(root / name) == "running", "it runs")
    job = newest(root / name)
    return job.log.read_text()


@pytest.mark.slow
def test_several_merges_are_compared_by_a_job_and_shown(open_app: Open, root: Path) -> None:
    (root / "mine.yaml").write_text("version: 1\n")
    app = choose(open_app(root, "new_run"), "average", "task_arithmetic")
    app.number_input(key="merge.task_arithmetic.scaling").set_value(0.5)
    press(press(app, "Check the spec"), "Compare the merges")
    assert "--compare=average,task_arithmetic:scaling=0.5 --out" in told(root, "mine-merges")
    assert "Comparison of merges mine" in said(app.run()).replace("\\", "") and "Compared merges" not in said(
        app
    )
    job = newest(root / "mine-merges")
    kill(job)
    assert "is gone without a word" in errors(app.run())
    ends = {
        f"{key}{end}": 0.5 for key in ("hellinger", "drift_rel", "behind") for end in ("", "_low", "_high")
    }
    row = {"merge": "average", "place": 1, "is_tied": False, "reason": "", **ends}
    other = {"merge": "*ties*", "place": None, "reason": "it <b>can't</b>"}
    document = {
        "name": "mine",
        "score": "hellinger",
        "samples": {"cars": 4},
        "held_out": False,
        "merges": [row, other],
    }
    (job.run / "merges.json").write_text(json.dumps(document))
    app.run()
    assert not app.error and "not made, as it <b>can't</b>" in said(app).replace("\\", "")
    assert app.dataframe[0].value["merge"].tolist() == ["average"]
    of_old = json.dumps(document).replace("hellinger", "kl")
    (job.run / "merges.json").write_text(of_old)
    assert not errors(app.run()) and "Ranked by KL to the experts" in said(app)
    with pytest.raises(SpecError, match="exists already"):
        compare_request(Settings(root), "mine.yaml", "mine-merges", {"average": {}})
    (job.run / "merges.json").write_text('{"merges": [1]}')
    assert "holds no comparison of merges" in errors(app.run())


DROP = "Drop a file, or pick base, experts and data"
BROKEN, MENDED = "version: 1\nnmae: mine\n", "version: 1\nname: mine\n"


def paste(app: AppTest, text: str) -> AppTest:
    app.selectbox(key="spec").set_value(PASTED).run()
    return app.text_area(key="pasted").set_value(text).run()


def picked(app: AppTest) -> dict[str, Any]:
    """What the command line was asked for by the pickers, as the stand-in writes it into the field."""
    assert not errors(press(app, "Write the spec")), errors(app)
    assert "Built-in texts are read." in said(app)
    return dict(from_yaml(app.text_area(key="pasted").value, "spec"))


def test_base_experts_and_data_are_picked_into_a_spec(open_app: Open, root: Path, tmp_path: Path) -> None:
    """What lies in the folder is offered, what leaves it or is hidden is not; the command line makes the spec."""
    places = ("zoo/base/config.json", "zoo/cars.safetensors", ".hidden/a.safetensors", "sets/cars/train.csv")
    places += ("sets/cars/test.csv", "sets/signs/train/a/1.png", "sets/signs/val/a/1.png", "sets/rows.jsonl")
    for place in places:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).touch()
    (root / "leaves").symlink_to(tmp_path.parent)
    app = open_app(root, "new_run")
    assert app.selectbox(key="spec").value == PASTED, "who has no spec of their own has models"
    assert app.selectbox(key="pick-base").options == ["zoo/base", "zoo/cars.safetensors"]
    assert is_disabled(app, "Write the spec")
    app.selectbox(key="pick-base").set_value("zoo/base")
    app.multiselect(key="pick-experts").set_value(["zoo/cars.safetensors", "owner/signs"]).run()
    assert picked(app)["options"] == ["--json"], "the family follows from the base"
    data = opened_drawers(app, DROP) and app.selectbox(key="pick-data-zoo/cars.safetensors")
    assert data.options == ["sets/cars", "sets/rows.jsonl", "sets/signs"]
    data.set_value("sets/cars").run()
    assert is_disabled(app, "Write the spec"), "data of the other task is missing"
    app.selectbox(key="pick-loader").set_value("hf-clip")
    app.selectbox(key="pick-data-owner/signs").set_value("sets/signs")
    app.text_input(key="pick-task-zoo/cars.safetensors").set_value("autos").run()
    made = picked(app)
    assert (made["base"], made["experts"]) == (
        "zoo/base",
        ["autos=zoo/cars.safetensors", "signs=owner/signs"],
    )
    family = "--set=architecture.loader=hf-clip"
    assert made["options"] == ["--data=autos=sets/cars", "--data=signs=sets/signs", family, "--json"]


def test_one_folder_that_holds_all_fills_the_pickers(open_app: Open, root: Path) -> None:
    places = ("base/config.json", "base/model.safetensors", "experts/cars.safetensors", "experts/signs.pt")
    for place in (*places, "data/cars/train.csv", "data/cars/test.csv", "merged.safetensors"):
        (root / "zoo" / place).parent.mkdir(parents=True, exist_ok=True)
        (root / "zoo" / place).touch()
    (root / "zoo/data/signs.npz").touch()
    app = open_app(root, "new_run")
    for wrong, why in (("..", "is no folder in"), ("zoo/data", "no base and experts, but no model")):
        app.text_input(key="pick-folder").set_value(wrong).run()
        assert why in errors(press(app, "Fill in from the folder"))
    app.text_input(key="pick-folder").set_value("zoo").run()
    assert not errors(press(app, "Fill in from the folder"))
    made = picked(app)
    assert made["base"] == "zoo/base"
    assert made["experts"] == ["cars=zoo/experts/cars.safetensors", "signs=zoo/experts/signs.pt"]
    assert made["options"] == ["--data=cars=zoo/data/cars", "--data=signs=zoo/data/signs.npz", "--json"]


def test_what_no_spec_can_be_made_of_is_told_where_the_text_would_stand(open_app: Open, root: Path) -> None:
    (root / "nothing.pt").touch()
    app = open_app(root, "new_run")
    app.selectbox(key="pick-base").set_value("nothing.pt")
    app.multiselect(key="pick-experts").set_value(["owner/signs"]).run()
    press(app, "Write the spec")
    assert "nothing beside nothing.pt says how it is built" in errors(app) and "Say it." in errors(app)
    assert not app.text_area(key="pasted").value


@pytest.mark.slow
def test_the_button_of_the_verdict_fills_in_the_merges_to_compare(open_app: Open, root: Path) -> None:
    """The run's own spec, though another one lies in the folder, with the merges that its command names."""
    (root / "mine.yaml").write_text("version: 1\n")
    app = press(open_app(root, "overview"), "Compare merges").switch_page("views/new_run.py").run()
    assert app.selectbox(key="spec").value == "full/spec.yaml"
    assert app.multiselect(key="merges").value == ["average", "ties", "iso_c", "tsv_m"]


def test_the_button_of_the_verdict_fills_in_the_nearer_merge_and_its_settings(
    open_app: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json.dumps({"method": "ties", "scaling": 0.4})
    command = f"driftlens analyze {root}/full/spec.yaml --set 'merge={made}' --set merged=null --out x"
    monkeypatch.setattr("driftlens.findings.verdict.next_command", lambda *_: command)
    app = press(open_app(root, "overview"), "Analyze the nearer merge").switch_page("views/new_run.py").run()
    assert app.selectbox(key="spec").value == "full/spec.yaml"
    assert app.multiselect(key="merges").value == ["ties"]
    assert app.number_input(key="merge.ties.scaling").value == 0.4


def test_a_draft_takes_no_other_files_place(open_app: Open, root: Path, tmp_path: Path) -> None:
    (root / "pasted.yaml").write_text("of somebody else")
    (root / "pasted-1.yaml").symlink_to(tmp_path / "outside.yaml")
    app = press(paste(open_app(root, "new_run"), MENDED), "Check the spec")
    assert (root / "pasted-2.yaml").read_text() == MENDED and not (tmp_path / "outside.yaml").exists()
    (root / "pasted-2.yaml").write_text("changed in an editor")
    app.text_area(key="pasted").set_value(BROKEN).run()
    press(app, "Check the spec")
    assert (root / "pasted-2.yaml").read_text() == "changed in an editor"
    assert (root / "pasted-3.yaml").read_text() == BROKEN
    assert (root / "pasted.yaml").read_text() == "of somebody else"


def test_a_pasted_text_is_no_larger_than_a_spec_may_be(open_app: Open, root: Path) -> None:
    app = paste(open_app(root, "new_run"), "\u00fc" * (MOST_BYTES // 2 + 1))
    assert "a spec may have" in errors(app) and not [*root.glob(f"{PASTED_AS}*")]


def test_nothing_is_pasted_into_a_read_only_dashboard(open_app: Open, root: Path) -> None:
    app = open_app(root, "new_run", read_only=True)
    assert app.selectbox(key="spec").options == ["full/spec.yaml"]
    assert is_disabled(app, "Check the spec") and is_disabled(app, "Start the analysis")
