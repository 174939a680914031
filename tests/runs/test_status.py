"""A status.json that is damaged: what is wrong with it is said, and the run is read all the same."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from driftlens.results.listing import find_runs
from driftlens.runs.manifest import RunStatus, read_status
from driftlens.runs.run import current_state, last_job_state, open_run, require_analyzed, unfinished_work
from driftlens.runs.writer import RunLock, RunWriter, write_status
from driftlens.utils.errors import Cancelled, RunError
from driftlens.utils.files import LockFile
from tests.refusing import refusing
from tests.runs.stopping import process


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1]", "5", "null", '"x"', "{}", "[" * 100_000], ids=lambda text: text[:3]
)
def test_what_is_no_status_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(RunError, match=r"status\.json can't be read") as caught:
        read_status(tmp_path)
    assert caught.value.hint == "Remove it; the results do not depend on it."


@pytest.mark.parametrize(
    "values",
    [
        {"state": "resting"},
        {"state": ["done"]},
        {"phase": 5},
        {"done": "x"},
        {"done": True},
        {"total": "x"},
        {"total": 10**400},
        {"label": None},
        {"seconds": None},
        {"seconds": float("nan")},
        {"metrics": [1]},
        {"metrics": {"loss": "x"}},
        {"heartbeat": 5},
        {"heartbeat": "yesterday"},
        {"heartbeat": "2026-01-02T03:04:05"},
        {"pid": "1"},
        {"error": "x"},
        {"error": {"type": "Error"}},
        {"error": {"type": "Error", "message": 5}},
        {"error": {"type": "Error", "message": "", "cause": ""}},
    ],
    ids=lambda values: str(values)[:40],
)
def test_a_value_of_another_type_is_damage(tmp_path: Path, values: dict[str, Any]) -> None:
    write_status(tmp_path, RunStatus("running", metrics={"loss": float("nan")}))
    assert read_status(tmp_path) is not None
    file = tmp_path / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(RunError, match="can't be read"):
        read_status(tmp_path)


def test_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "done", "progress": "x"}')
    assert read_status(tmp_path) == RunStatus("done")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS], ids=["not mine", "read-only disk"])
def test_a_run_that_may_only_be_read_is_refused_with_what_can_be_done(
    own: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def acquire(self: LockFile) -> None:
        raise OSError(number, os.strerror(number), str(own / "run.lock.guard"))

    monkeypatch.setattr(LockFile, "acquire", acquire)
    with refusing(RunError, f"can't write to {own}: ", hint=("--out", "copy"), code=4):
        RunLock(own).acquire()


def test_a_finished_run_is_listed_as_done_with_what_is_damaged(own: Path) -> None:
    (own / "status.json").write_text("[]")
    run = open_run(own)
    (said,) = unfinished_work(run)
    assert said.startswith("status.json can't be read: expected an object") and "Remove it" in said
    (summary,) = find_runs(own)
    assert (summary.problem, summary.state, summary.left) == ("", "done", (said,))
    assert (last_job_state(run)[0], current_state(run)) == ("unknown", "done")


@pytest.mark.parametrize("text", ["[]", None], ids=["damaged", "removed"])
def test_a_run_that_is_worked_on_is_running_whatever_its_status(own: Path, text: str | None) -> None:
    (own / "status.json").unlink()
    if text is not None:
        (own / "status.json").write_text(text)
    lock = RunLock(own)
    lock.acquire()
    run = open_run(own)
    assert (last_job_state(run)[0], current_state(run)) == ("running", "running")
    lock.release()
    assert (last_job_state(run)[0], current_state(run)) == ("unknown", "done")


KILLED = """
import sys
from driftlens.runs.writer import RunWriter
with RunWriter.resume(sys.argv[1]) as writer:
    writer.begin_variants(["baseline:a b-anchor", "calibrated:a b"])
    with writer.phase("calibrate:a b"):
        print("ready", flush=True)
        sys.stdin.read()
"""


def end_early(folder: Path, phase: str, error: BaseException, *variants: str) -> None:
    with pytest.raises(type(error)), RunWriter.resume(folder) as writer:
        writer.begin_variants(variants)
        with writer.phase(phase):
            raise error


@pytest.mark.parametrize(
    ("error", "state"),
    [(Cancelled("cancelled"), "cancelled"), (RunError("the disk is full"), "failed")],
    ids=["cancelled", "failed"],
)
def test_a_calibration_that_ends_early_leaves_the_run_done(own: Path, error: Exception, state: str) -> None:
    end_early(own, "calibrate:x", error, "baseline:x-anchor", "calibrated:x")
    run = open_run(own)
    status = read_status(own)
    assert (status and status.state, last_job_state(run)[0], current_state(run)) == (state, state, "done")
    (summary,) = find_runs(own)
    assert summary.state == "done" and summary.left == unfinished_work(run)
    (said,) = summary.left
    assert said.startswith("calibration 'x' is unfinished; ")
    assert f"`driftlens calibrate {own} --name x --resume`" in said and "without --resume it starts again" in said


@pytest.mark.slow
def test_a_calibration_that_is_killed_leaves_the_run_done(own: Path) -> None:
    with process(KILLED, own) as writer:
        (running,) = find_runs(own)
        assert (running.state, running.left) == ("running", ())
        writer.kill()
        writer.wait()
    run = open_run(own)
    assert (last_job_state(run)[0], current_state(run)) == ("stopped", "done")
    (said,) = unfinished_work(run)
    assert said.startswith("calibration 'a b' is unfinished; ") and "--name 'a b' --resume" in said


def test_it_is_told_until_it_is_finished_or_taken_out(own: Path) -> None:
    end_early(own, "calibrate:x", Cancelled("cancelled"), "calibrated:x")
    RunWriter.resume(own).__exit__(None, None, None)  # other work, which succeeds
    assert last_job_state(open_run(own))[0] == "done" and len(unfinished_work(open_run(own))) == 1
    with RunWriter.resume(own) as writer:
        writer.remove_calibration("x")
    assert unfinished_work(open_run(own)) == ()


def test_nothing_is_added_to_a_run_that_was_stopped_before_its_scores(own: Path) -> None:
    manifest = json.loads((own / "manifest.json").read_text())
    missing = [f"evaluate:{task}" for task in manifest["tasks"]]
    for task in manifest["tasks"]:
        manifest["phases"].setdefault(f"analyze:{task}", {"state": "done"})
        manifest["phases"].pop(f"evaluate:{task}", None)

    def keep(finished: str) -> None:
        (own / "manifest.json").write_text(json.dumps({**manifest, "finished": finished}))

    keep("")
    with pytest.raises(RunError, match=f"is unfinished; missing: {', '.join(missing)}\n") as caught:
        require_analyzed(own)
    assert "--resume` resumes it, including accuracy" in caught.value.hint
    keep(manifest["finished"])  # which has no scores, and stands
    require_analyzed(own)


def test_work_that_leaves_nothing_to_go_on_with_is_told_while_it_is_the_last(own: Path) -> None:
    end_early(own, "sweep:0", RunError("the disk is full"))
    run = open_run(own)
    assert current_state(run) == "done"
    assert unfinished_work(run) == (
        "the last job on it ended early (failed: the disk is full); earlier results are complete",
    )
    RunWriter.resume(own).__exit__(None, None, None)
    assert unfinished_work(open_run(own)) == ()


def test_a_run_whose_own_analysis_ends_early_is_not_done(own: Path, tmp_path: Path) -> None:
    again = shutil.copytree(own, tmp_path / "again")
    end_early(again, "evaluate:cars", Cancelled("cancelled"))
    new = tmp_path / "new"
    with (
        pytest.raises(Cancelled),
        RunWriter.create(new, spec_yaml="", spec_digest="", name="new") as writer,
        writer.phase("analyze:cars"),
    ):
        raise Cancelled("cancelled")
    for folder in (again, new):
        (summary,) = find_runs(folder)
        assert (summary.state, summary.left) == ("cancelled", ())
