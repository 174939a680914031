"""A status.json that is damaged: what is wrong with it is said, and the run is read all the same."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from driftlens.base.errors import RunError
from driftlens.findings.listing import find_runs
from driftlens.runs.run import open_run
from driftlens.runs.standing import current_state, last_work, left_undone
from driftlens.runs.status import RunLock, Status, read_status, write_status


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1]", "5", "null", '"x"', "{}", "[" * 100_000], ids=lambda text: text[:3]
)
def test_what_is_no_status_is_damaged(tmp_path: pathlib.Path, text: str) -> None:
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
        {"process_started": "x"},
        {"error": "x"},
        {"error": {"type": "Error"}},
        {"error": {"type": "Error", "message": 5}},
        {"error": {"type": "Error", "message": "", "cause": ""}},
    ],
    ids=lambda values: str(values)[:40],
)
def test_a_value_of_another_type_is_damage(tmp_path: pathlib.Path, values: dict[str, Any]) -> None:
    write_status(tmp_path, Status("running", metrics={"loss": float("nan")}))
    assert read_status(tmp_path) is not None
    file = tmp_path / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(RunError, match="can't be read"):
        read_status(tmp_path)


def test_keys_of_a_later_version_are_passed_over(tmp_path: pathlib.Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "done", "progress": "x"}')
    assert read_status(tmp_path) == Status("done")


def test_a_finished_run_is_listed_as_done_with_what_is_damaged(own: pathlib.Path) -> None:
    (own / "status.json").write_text("[]")
    run = open_run(own)
    (said,) = left_undone(run)
    assert said.startswith("status.json can't be read: expected an object") and "Remove it" in said
    (summary,) = find_runs(own)
    assert (summary.problem, summary.state, summary.left) == ("", "done", (said,))
    assert (last_work(run)[0], current_state(run)) == ("unknown", "done")


def test_a_status_that_was_removed_as_the_hint_says_leaves_a_finished_run_done(own: pathlib.Path) -> None:
    (own / "status.json").unlink()
    (summary,) = find_runs(own)
    assert (summary.problem, summary.state, summary.left) == ("", "done", ())


@pytest.mark.parametrize("text", ["[]", None], ids=["damaged", "removed"])
def test_a_run_that_is_worked_on_is_running_whatever_its_status(own: pathlib.Path, text: str | None) -> None:
    (own / "status.json").unlink()
    if text is not None:
        (own / "status.json").write_text(text)
    lock = RunLock(own)
    lock.acquire()
    run = open_run(own)
    assert (last_work(run)[0], current_state(run)) == ("running", "running")
    lock.release()
    assert (last_work(run)[0], current_state(run)) == ("unknown", "done")
