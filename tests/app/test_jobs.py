"""Jobs: one process whatever is clicked, and the truth about it from what is on disk."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from driftlens.runs.run import open_run
from driftlens.runs.writer import RunLock
from driftlens.utils.errors import RunError, RunLockedError, SpecError
from driftlens_app import processes
from driftlens_app.job_requests import analyze_request, attribution_request, demo_request
from driftlens_app.processes import cancel_job, drift_so_far, log_tail, newest_job, poll_job, start_job
from driftlens_app.settings import Settings
from tests.app.conftest import until
from tests.app.pages import begin, finish, state, step

pytestmark = pytest.mark.usefixtures("worker")


@pytest.mark.slow
def test_a_job_goes_from_starting_to_done_and_its_curve_grows(run: Path) -> None:
    job = begin(run, "steady")
    assert state(run) in ("starting", "running")
    until(lambda: (view := poll_job(run)) is not None and view.progress is not None, "it has said something")
    step(run, 0)
    until(lambda: (view := poll_job(run)) is not None and view.progress.done == 1, "the first layer is done")  # type: ignore[union-attr]
    assert state(run) == "running" and drift_so_far(job) == {2: 1.5}
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    assert drift_so_far(job) == {2: 1.5, 3: 0.75, 4: 0.5}


@pytest.mark.slow
def test_a_job_of_another_kind_leaves_the_record_of_the_last_one(run: Path) -> None:
    calibration = begin(run, "steady")
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    traced = start_job(attribution_request(open_run(run)))
    until(lambda: state(run) == "done", "the samples are traced")
    newest, earlier = poll_job(run), poll_job(run, "calibrate")
    assert newest is not None and newest.job.pid == traced.pid
    assert earlier is not None and (earlier.job.pid, earlier.state) == (calibration.pid, "done")
    assert earlier.job.settings["name"] == "steady"
    assert poll_job(run, "analyze") is None


@pytest.mark.slow
def test_many_clicks_at_once_start_one_process(run: Path) -> None:
    with ThreadPoolExecutor(6) as clicks:
        jobs = list(clicks.map(lambda _: begin(run, "steady"), range(6)))
    assert len({job.pid for job in jobs}) == 1 and len(processes._CHILDREN) == 1
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    assert begin(run, "steady").pid != jobs[0].pid  # once it is over, a new one may begin


def test_a_run_that_another_program_writes_to_is_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunLock(run)
    lock.acquire()
    try:
        with pytest.raises(RunLockedError, match="was not started here"):
            begin(run, "steady")
    finally:
        lock.release()
    assert not processes._CHILDREN


@pytest.mark.slow
def test_cancelling_asks_and_the_job_says_that_it_stopped(run: Path) -> None:
    job = begin(run, "steady")
    until(lambda: state(run) == "running", "it runs")
    cancel_job(job)
    assert state(run) in ("cancelling", "cancelled")
    until(lambda: state(run) == "cancelled", "it has stopped")
    # Its process ends a moment after it has said so.
    until(lambda: (seen := poll_job(run)) is not None and seen.job.code is not None, "its process has ended")
    view = poll_job(run)
    assert view is not None and view.job.code == 130


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the disk be full from now on, for this process."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", full)


@pytest.mark.slow
def test_a_cancel_that_can_not_be_noted_is_told_and_stops_the_job(run: Path, fill_disk: Callable[[], None]) -> None:
    job = begin(run, "steady")
    until(lambda: state(run) == "running", "it runs")
    fill_disk()
    with pytest.raises(RunError, match="No space left on device"):
        cancel_job(job)
    until(lambda: state(run) == "cancelled", "it has stopped")


def test_a_full_disk_does_not_hide_how_a_job_ended(run: Path, fill_disk: Callable[[], None]) -> None:
    begin(run, "refused")
    fill_disk()
    until(lambda: state(run) == "failed", "it is refused")
    # Its process ends a moment after it has said so.
    until(lambda: (seen := poll_job(run)) is not None and seen.job.code is not None, "its process has ended")
    view, written = poll_job(run), newest_job(run)
    assert view is not None and written is not None
    assert (view.job.code, written.code) == (2, None)


@pytest.mark.slow
def test_a_job_that_does_not_stop_is_ended_after_the_grace_period(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = begin(run, "deaf")
    until(lambda: state(run) == "running", "it runs")
    cancel_job(job)
    assert state(run) == "cancelling"
    assert processes._child_exit_code(job.pid) is None  # it was asked, not ended
    monkeypatch.setattr("driftlens_app.processes.GRACE_SECONDS", 0.0)
    until(lambda: state(run) == "cancelled", "it has been ended")
    assert processes._child_exit_code(job.pid) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "message", "hint"),
    [
        ("failing", "SingularGramError", "the Gram matrix is *singular*", "Raise lam."),
        ("refused", "Error", "lam is -1, expected at least 0", "Choose another ridge."),
    ],
    ids=["in the middle", "before it begins"],
)
def test_a_failure_tells_cause_and_hint(run: Path, name: str, kind: str, message: str, hint: str) -> None:
    job = begin(run, name)
    step(run, 0)
    until(lambda: state(run) == "failed", "it has failed")
    view = poll_job(run)
    assert view is not None and view.failure is not None
    assert (view.failure.type, view.failure.message, view.failure.hint) == (kind, message, hint)
    assert f"error: {message}" in log_tail(job.log)


@pytest.mark.slow
def test_a_restarted_server_finds_the_same_job(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = begin(run, "steady")
    until(lambda: state(run) == "running", "it runs")
    known = dict(processes._CHILDREN)
    monkeypatch.setattr(processes, "_CHILDREN", {})  # all that a server forgets when it restarts
    assert state(run) == "running" and begin(run, "steady").pid == job.pid
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    for process in known.values():
        process.wait()


def test_a_killed_worker_reads_as_stopped_and_not_as_running(run: Path) -> None:
    job = begin(run, "steady")
    until(lambda: state(run) == "running", "it runs")
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: state(run) == "stopped", "its end is noticed")
    assert begin(run, "steady").pid != job.pid


def test_the_status_of_an_earlier_process_is_not_taken_for_the_jobs(run: Path) -> None:
    """The run is finished and says so; a job that has just begun is not done."""
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    begin(run, "refused")
    assert state(run) != "done"
    until(lambda: state(run) == "failed", "it is refused")


def test_a_recycled_process_id_is_not_signalled(run: Path) -> None:
    from driftlens_app.processes import write_job_record

    job = begin(run, "steady")
    until(lambda: state(run) == "running", "it runs")
    stranger = replace(job, process_started=(job.process_started or 0.0) - 1000)
    write_job_record(stranger)
    cancel_job(stranger)
    assert processes._child_exit_code(job.pid) is None and newest_job(run) == stranger
    write_job_record(job)


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/b", "", "-x", ".hidden", "a" * 81, "a\nb"], ids=repr)
def test_a_new_run_can_only_go_into_a_folder_under_the_root(root: Path, name: str) -> None:
    (root / "my.yaml").write_text("version: 1\n")
    with pytest.raises(SpecError):
        analyze_request(Settings(root), "my.yaml", name)


@pytest.mark.parametrize("spec", ["../secret.yaml", "/etc/passwd", "link.yaml", "full/manifest.json", "no.yaml"])
def test_only_specs_under_the_root_are_read(root: Path, spec: str) -> None:
    (root.parent / "secret.yaml").write_text("version: 1\n")
    (root / "link.yaml").symlink_to(root.parent / "secret.yaml")
    with pytest.raises(SpecError, match="no spec"):
        analyze_request(Settings(root), spec, "new")


@pytest.mark.slow
def test_a_demo_is_only_forced_over_what_a_job_left(root: Path) -> None:
    settings = Settings(root)
    assert "--force" not in demo_request(settings).arguments
    assert demo_request(settings, "text").arguments[:3] == ("demo", "--suite", "text")
    finish(root / "driftlens-demo")
    start_job(demo_request(settings))
    until(lambda: state(root / "driftlens-demo") == "done", "it is done")
    (root / "driftlens-demo" / "manifest.json").write_text((root / "full" / "manifest.json").read_text())
    assert "--force" in demo_request(settings).arguments
