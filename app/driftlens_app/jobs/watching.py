"""Where a job stands and what it told, from what is on disk: the run's status and events, and the job's log."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from driftlens.base.errors import Cancelled, RunError
from driftlens.base.files import from_json
from driftlens.base.progress import ProgressEvent
from driftlens.runs.layout import COMPARISON, EVENTS, STATUS
from driftlens.runs.status import Failure, Status, read_status
from driftlens_app.jobs.processes import exit_code, insist, told_failure
from driftlens_app.jobs.record import Job, Kind, job_of, write_job
from driftlens_app.settings import is_file_inside, is_inside

State = Literal["starting", "running", "cancelling", "cancelled", "failed", "stopped", "done"]

SILENT_SECONDS = 30.0
"""A worker whose process can't be seen counts as stopped after this long without a heartbeat."""

_START_TOLERANCE = 2.0
_LIVE = ("starting", "running", "cancelling")
_EVENT = TypeAdapter(ProgressEvent)
_TAIL_BYTES, _EVENT_BYTES = 65_536, 1_000_000


@dataclass(frozen=True)
class View:
    """Where a job stands: "stopped" where its process is gone without having said anything."""

    job: Job
    state: State
    progress: ProgressEvent | None = None
    failure: Failure | None = None

    @property
    def is_live(self) -> bool:
        """Whether it may still change."""
        return self.state in _LIVE


def watch(run: Path, kind: Kind | None = None) -> View | None:
    """Where the newest job, of this kind if one is given, of the run directory `run` stands; None without one.

    A job that was cancelled and does not stop is ended here once its grace period is over.
    """
    job = job_of(run, kind)
    if job is None:
        return None
    code = exit_code(job.pid) if job.code is None else None
    if code is not None:
        # On record for the next server; on a full disk this one tells it all the same, and tries again later.
        job = dataclasses.replace(job, code=code)
        with contextlib.suppress(RunError):
            write_job(job)
    status = _own_status(job)
    if job.code is None and job.owner.is_alive:
        insist(job)
        state: State = "cancelling" if job.cancelled else "running"
        progress = _progress(job, status)
        return View(job, state if progress is not None or job.cancelled else "starting", progress)
    return _ended(job, status)


def is_at_work(run: Path) -> bool:
    """Whether a job that writes to the run directory `run` is live."""
    view = watch(run)
    return view is not None and view.is_live


def is_finished_since(job: Job) -> bool:
    """Whether the job's run was finished after the job began, for example in a terminal, or its comparison."""
    if is_file_inside(job.run / COMPARISON):  # only the job that made the folder wrote to it
        return True
    status = _status(job.run)
    return status is not None and status.state == "done" and str(status.heartbeat) > job.started


def _own_status(job: Job) -> Status | None:
    """The run's status, if this job's process wrote it and not an earlier one."""
    status = _status(job.run)
    if status is None or status.pid != job.pid:
        return None
    times = status.process_started, job.process_started
    if None not in times and abs(times[0] - times[1]) > _START_TOLERANCE:  # type: ignore[operator]
        return None
    return status


def _status(run: Path) -> Status | None:
    """The run's status; a damaged one, or one behind a link that leaves the root, counts as none."""
    try:
        return read_status(run) if is_inside(run / STATUS) else None
    except RunError:
        return None


def _ended(job: Job, status: Status | None) -> View:
    progress = _progress(job, status)
    says, error = (None, None) if status is None else (status.state, status.error)
    failure = error or told_failure(log_text(job.log))
    was_killed = job.code is None or job.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    if job.code == 0 or (job.code is None and says == "done"):
        return View(job, "done", progress)
    if says == "cancelled" or job.code == Cancelled.exit_code or (job.cancelled and was_killed):
        return View(job, "cancelled", progress)
    if says == "failed" or (failure is not None and not was_killed):
        return View(job, "failed", progress, failure or Failure("Error", "it gave no reason"))
    if job.code is None and _is_fresh(status):
        # Its process can't be seen from here, but it has just written: wait before calling it dead.
        return View(job, "running", progress)
    if job.code is not None and job.code > 0:
        return View(job, "failed", progress, Failure("Error", f"it ended with exit code {job.code}"))
    return View(job, "stopped", progress)


def _is_fresh(status: Status | None) -> bool:
    if status is None or status.state not in ("running", "cancelling") or not status.heartbeat:
        return False
    age = datetime.now(UTC) - datetime.fromisoformat(status.heartbeat)
    return age.total_seconds() < SILENT_SECONDS


def _progress(job: Job, status: Status | None) -> ProgressEvent | None:
    """From the run's status, or before there is one, from the log: a demo trains models before its run begins."""
    if status is not None and status.phase:
        return ProgressEvent(status.phase, status.done, status.total, status.label, status.seconds)
    return last_progress(job.log)


def log_text(log: Path) -> str:
    """The end of the log without its progress lines, for reading; empty where there is none yet."""
    return "\n".join(_said(line) for line in _lines(log) if _event_in(line) is None)


def last_progress(log: Path) -> ProgressEvent | None:
    """The newest progress event in the log, or None."""
    found = [event for line in _lines(log) if (event := _event_in(line)) is not None]
    try:
        return _EVENT.validate_python({**found[-1], "metrics": {}}) if found else None
    except ValueError:
        return None


def running_drift(job: Job) -> dict[int, float]:
    """Mean drift at the boundary behind each layer that the job has calibrated, by layer index."""
    found: dict[int, float] = {}
    for event in map(_object, _lines(job.run / EVENTS, _EVENT_BYTES)):
        if event is None or str(event.get("time", "")) < job.started:
            continue  # half a line, left for the next look, or an earlier job's
        numbers = event.get("metrics", event)
        layer, drift = numbers.get("layer"), numbers.get("drift_l2_mean")
        if isinstance(layer, int | float) and isinstance(drift, int | float):
            found[int(layer)] = float(drift)
    return dict(sorted(found.items()))


def _said(line: str) -> str:
    """What a line says to a person; beside progress as JSON, remarks are JSON too."""
    remark = _object(line) if line.startswith('{"event": "log"') else None
    return line if remark is None else str(remark.get("message", ""))


def _event_in(line: str) -> dict[str, Any] | None:
    return _object(line) if line.startswith('{"event": "progress"') else None


def _object(line: str) -> dict[str, Any] | None:
    try:
        event = from_json(line)
    except ValueError:  # half a line: the job is writing it
        return None
    return event if isinstance(event, dict) else None


def _lines(file: Path, most: int = _TAIL_BYTES) -> list[str]:
    """The lines that begin in the last bytes of a file; none where it can't be read, or leaves the root."""
    if not is_file_inside(file):
        return []
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - most))
            lines = opened.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return lines if size <= most else lines[1:]
