"""Starting a job when something is in the way: no process is left that nobody knows of, and the text says why."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from filelock import FileLock

from driftlens.config.requests import CalibrationRequest
from driftlens.runs.run import open_run
from driftlens.utils.errors import RunError
from driftlens_app import processes
from driftlens_app.job_requests import calibrate_request, demo_request
from driftlens_app.processes import JobRequest, newest_job, start_job
from driftlens_app.settings import Settings

pytestmark = pytest.mark.usefixtures("worker")


@pytest.fixture
def request_(root: Path) -> JobRequest:
    """A calibration that would go on until it is told otherwise."""
    return calibrate_request(open_run(root / "full"), CalibrationRequest(name="steady"))


def test_a_job_whose_record_cannot_be_written_is_ended(request_: JobRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device") as refusal:
        start_job(request_)
    assert "bytes needed" in refusal.value.hint
    (process,) = processes._CHILDREN.values()
    assert process.returncode == -signal.SIGKILL  # ended, and waited for
    assert newest_job(request_.run) is None


def test_a_log_that_cannot_be_written_is_an_error_with_a_hint(
    request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(processes.Path, "open", refuse)
    with pytest.raises(RunError, match=r"can't start a job .* Permission denied") as refusal:
        start_job(request_)
    assert "permissions" in refusal.value.hint and not processes._CHILDREN


def test_a_start_that_takes_too_long_elsewhere_is_refused(
    request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_START_SECONDS", 0.0)
    request_.folder.mkdir(exist_ok=True)
    other = FileLock(request_.folder / "start.lock", timeout=0)
    other.acquire()
    try:
        with pytest.raises(RunError, match="can't start a job"):
            start_job(request_)
    finally:
        other.release()
    assert not processes._CHILDREN


def test_a_folder_that_is_gone_is_not_made_again(root: Path) -> None:
    request = demo_request(Settings(root))
    shutil.rmtree(root)
    with pytest.raises(RunError, match="is gone"):
        start_job(request)
    assert not root.exists()
