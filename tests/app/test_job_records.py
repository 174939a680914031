"""A job record that is damaged, older or made up: no page fails over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driftlens.config.requests import CalibrationRequest
from driftlens.runs.manifest import RunStatus
from driftlens.runs.writer import write_status
from driftlens_app import processes
from driftlens_app.processes import newest_job, poll_job
from tests.app.conftest import Open
from tests.app.pages import errors, record_job

WANTED = CalibrationRequest(name="mine", samples=16, parameters={"lam": 0.5, "alpha": 0.25, "update": ("linear",)})


def as_json(settings: CalibrationRequest) -> dict[str, Any]:
    """The settings as a record has them."""
    return dict(json.loads(settings.model_dump_json()))


@pytest.fixture
def record(root: Path) -> Path:
    """The record of a calibration that has failed."""
    run = root / "full"
    job = record_job(run / "logs", run, settings=as_json(WANTED), code=4)
    job.log.write_text("error: no\n")
    return run / "logs" / "calibrate-job.json"


def with_values(record: Path, **values: Any) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), **values}))


@pytest.mark.parametrize(
    ("log", "state"), [("Traceback:\nImportError: interrupted\n", "cancelled"), ("error: no\n", "failed")]
)
def test_a_job_that_was_cancelled_before_it_could_say_so_is_no_failure(
    root: Path, record: Path, log: str, state: str
) -> None:
    """It was interrupted among its imports; what tells an error has failed by itself."""
    job = newest_job(root / "full")
    assert job is not None
    job.log.write_text(log)
    with_values(record, code=1, cancelled="2026-01-02T03:04:05+00:00")
    view = poll_job(root / "full")
    assert view is not None and view.state == state


@pytest.mark.parametrize(
    "values",
    [
        {"started": 5},
        {"started": ""},
        {"started": "yesterday"},
        {"started": "2026-01-02T03:04:05"},
        {"settings": [1]},
        {"settings": None},
        {"code": "a"},
        {"code": True},
        {"cancelled": 1},
        {"cancelled": "now"},
        {"pid": "4000000"},
        {"pid": 0},
        {"pid": -1},
        {"pid": 10**30},
        {"process_started": "soon"},
        {"host": None},
        {"name": {}},
        {"kind": "analyze"},
        {"kind": ["calibrate"]},
        {"log": 3},
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_counts_as_none(root: Path, record: Path, values: dict[str, Any]) -> None:
    assert newest_job(root / "full") is not None
    with_values(record, **values)
    assert newest_job(root / "full") is None and poll_job(root / "full") is None


@pytest.mark.slow
def test_a_page_is_drawn_beside_such_records(open_app: Open, root: Path, record: Path) -> None:
    written = record.read_text()
    app = open_app(root, "repair")
    assert errors(app), "what the record says of the job"
    for values in ({"settings": [1]}, {"code": "a"}, {"pid": 0}, {"kind": ["calibrate"]}, {"log": 3}):
        record.write_text(written)
        with_values(record, **values)
        app.run()
        assert not app.error and not app.exception, (values, errors(app))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "[" * 100_000, "\xff"], ids=lambda text: text[:3])
def test_a_record_that_is_no_object_counts_as_none(root: Path, record: Path, text: str) -> None:
    record.write_bytes(text.encode("latin-1"))
    assert newest_job(root / "full") is None


def test_an_older_record_without_what_has_a_default_is_read(root: Path, record: Path) -> None:
    values = json.loads(record.read_text())
    for name in ("settings", "cancelled", "code"):
        del values[name]
    record.write_text(json.dumps(values))
    job = newest_job(root / "full")
    assert job is not None and (dict(job.settings), job.cancelled, job.code) == ({}, "", None)


def test_a_job_out_of_sight_whose_status_has_no_heartbeat_is_stopped(root: Path, record: Path) -> None:
    with_values(record, code=None)
    (record.parent / "calibrate-1.log").write_text("no more than this\n")
    write_status(root / "full", RunStatus("running", pid=4_000_000))
    view = poll_job(root / "full")
    assert view is not None and view.state == "stopped"


def test_remarks_beside_progress_are_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "is_file_inside", Path.is_file)
    log = tmp_path / "calibrate.log"
    lines = [
        '{"event": "progress", "phase": "calibrate"}',
        '{"event": "log", "message": "computes with 1 thread"}',
        "end",
    ]
    log.write_text("\n".join(lines) + "\n")
    assert processes.log_tail(log) == "computes with 1 thread\nend"
