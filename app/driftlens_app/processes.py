"""Jobs: the command line as a process, asked for an answer or watched from outside.

A job's state is on disk: a record of the newest job of each kind (process, start, settings) next to its log, and the
run's own status.json, run.lock and events.jsonl. So a page that is closed, drawn twice or served by a restarted
server finds the same job, and never starts a second one.

    job = start(calibrate_request(run, settings))   # the new job, or the one that runs already
    view = watch(run.path)                          # of the newest job: state, progress, failure
    cancel(view.job)                                # asks; after a grace period, `watch` kills
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter

from driftlens.runs.manifest import (
    CANDIDATE,
    EVENTS,
    STATUS,
    Failure,
    Owner,
    Status,
    living_owner_of,
    process_started,
    read_status,
    utc_now,
)
from driftlens.utils.errors import Cancelled, DriftLensError, RunError, RunLockedError
from driftlens.utils.files import Guard, from_json, write_json_atomic
from driftlens.utils.progress import ProgressEvent
from driftlens_app.settings import Settings, is_file_inside, is_inside, require_inside, require_links_inside

COMMAND = (sys.executable, "-P", "-m", "driftlens")
"""The command line program, without the runs' folder on the module path; tests replace it."""

PATIENCE_SECONDS = 300.0
"""Longest time until a page responds, in seconds."""

_TURNS = threading.BoundedSemaphore(2)

GRACE_SECONDS = 60.0
"""How long a job that was asked may take to reach the end of its batch or layer and clean up."""

_GUARD = "start.lock"
_START_SECONDS = 5.0
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}

State = Literal["starting", "running", "cancelling", "cancelled", "failed", "stopped", "done"]

SILENT_SECONDS = 30.0
"""A worker whose process can't be seen counts as stopped after this long without a heartbeat."""

_START_TOLERANCE = 2.0
_LIVE = ("starting", "running", "cancelling")
_EVENT = TypeAdapter(ProgressEvent)
_TAIL_BYTES, _EVENT_BYTES = 65_536, 1_000_000

Kind = Literal["demo", "analyze", "calibrate", "sweep", "explain"]
MAKING: tuple[Kind, ...] = ("demo", "analyze")
"""Kinds of jobs that make the folder that they write to."""

_SIDE = ".driftlens"
"""Folder next to the runs for logs of jobs that make a run, whose own folder must be empty at first."""

_LOG = re.compile(r"[a-z]+-[0-9]+\.log")


@dataclass(frozen=True)
class JobRequest:
    """A job to start: the run it writes to, a description (`name`) and the values of its form (`settings`)."""

    kind: Kind
    name: str
    run: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of its record and log."""
        return _new_run_job_folder(self.run) if self.kind in MAKING else self.run / "logs"


@dataclass(frozen=True)
class Job:
    """A job that was started, and what became of it: when it was `cancelled`, its exit `code` (negative: a signal)."""

    kind: Kind
    name: str
    run: Path
    log: Path
    pid: Annotated[int, Field(gt=1, lt=2**31)]
    process_started: float | None
    host: str
    started: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cancelled: str = ""
    code: int | None = None
    dismissed: bool = False

    @property
    def owner(self) -> Owner:
        """Its process, as locks know processes."""
        return Owner(self.pid, self.process_started, self.host, self.started)


_RECORDS = TypeAdapter(Job)


def write_job(job: Job) -> None:
    """Replace the record of the run's newest job of this kind, whole or not at all."""
    record = dataclasses.asdict(job)
    # Relative, so that a folder of runs may be moved.
    record |= {"run": job.run.name, "log": job.log.name, "settings": dict(job.settings)}
    write_json_atomic(job.log.parent / f"{job.kind}-job.json", record)


def dismiss(job: Job) -> None:
    """Record that the user has read the job's end; a newer job of the run keeps its record."""
    newest = job_of(job.run, job.kind)
    if newest is not None and newest.log == job.log:
        write_job(dataclasses.replace(newest, dismissed=True))


def job_of(run: Path, kind: Kind | None = None) -> Job | None:
    """Return the newest job, optionally of one kind, that wrote to a run directory, which need not exist yet."""
    jobs = [*_newest_jobs(run / "logs", run), *_newest_jobs(_new_run_job_folder(run), run)]
    wanted = [job for job in jobs if kind in (None, job.kind)]
    return max(wanted, key=lambda job: job.started, default=None)


def jobs_beside(root: Path) -> list[Job]:
    """List the jobs that make runs inside `root`, newest first."""
    side = root / _SIDE
    folders = sorted(side.iterdir()) if side.is_dir() and is_inside(side) else []
    jobs = [job for folder in folders for job in _newest_jobs(folder, root / folder.name)]
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def _new_run_job_folder(run: Path) -> Path:
    return run.parent / _SIDE / run.name


def _newest_jobs(folder: Path, run: Path) -> list[Job]:
    """List the newest job of each kind in `folder`."""
    return [job for kind in get_args(Kind) if (job := _read_job_record(folder, kind, run)) is not None]


def _read_job_record(folder: Path, kind: Kind, run: Path) -> Job | None:
    """Read the newest job of a kind from its record in `folder`; an invalid record counts as none."""
    file = folder / f"{kind}-job.json"
    if not is_file_inside(file):
        return None
    try:
        record = from_json(file.read_text(encoding="utf-8"))
        # Validated strictly as JSON, so that `true` is not accepted as a process id.
        job = _RECORDS.validate_json(json.dumps({**record, "run": ""}), strict=True)
        times = [job.started, *([job.cancelled] if job.cancelled else [])]
        is_sane = job.kind == kind and _LOG.fullmatch(str(job.log)) is not None
        if not is_sane or any(datetime.fromisoformat(moment).tzinfo is None for moment in times):
            return None
        # The path in a record is not trusted; the run is the folder that has the record.
        return dataclasses.replace(job, run=run, log=folder / job.log)
    except (OSError, ValueError, TypeError):
        return None


def _job_environment() -> dict[str, str]:
    """Return the environment of a job: this server's without its own settings, with plain-text logs."""
    settings = Settings(Path()).environment()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in settings and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "DRIFTLENS_LOG_JSON": "0", "PYTHONUNBUFFERED": "1"}


def answer(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command `driftlens ARGUMENTS`; two run at a time, and the timeout starts with the command."""
    with _TURNS:
        return subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            env=_job_environment(),
            timeout=PATIENCE_SECONDS,
            check=False,
        )


def ask(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the document that `driftlens ARGUMENTS` prints, or raise its error."""
    try:
        done = answer(arguments, folder)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"`driftlens {arguments[0]}` did not answer within {PATIENCE_SECONDS:.0f} seconds",
            hint="Run it in a terminal, which has no time limit.",
        ) from None
    try:
        document = json.loads(done.stdout)
    except ValueError:
        failure = _parse_printed_error(done.stderr)
        if failure is None:
            reason = f"exited with code {done.returncode} without output"
            raise RunError(f"`driftlens {arguments[0]}` {reason}") from None
        raise RunError(failure.message, hint=failure.hint) from None
    assert isinstance(document, dict)
    return document


def _parse_printed_error(output: str) -> Failure | None:
    """Parse the error that the command line printed as `error: ...` and `hint: ...`; None without."""
    _, sign, text = "\n".join(["", *output.splitlines()]).rpartition("\nerror: ")
    message, _, hint = text.partition("\nhint: ")
    return Failure("Error", message, hint) if sign else None


def start(request: JobRequest) -> Job:
    """Start a job, or return it if it is running; refuse while another job or process writes to the run."""
    # Otherwise `mkdir` below would recreate a removed root around this one run.
    if not request.run.parent.is_dir():
        raise RunError(f"the folder {request.run.parent} is gone", hint="Open the dashboard on another one.")
    for path in (request.run, request.folder, request.folder / _GUARD):
        require_inside(path)
    require_links_inside(request.run, Settings.from_environment().root)
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        # Held between check and start, so that a second click, tab or server cannot start the job twice.
        with Guard(request.folder / _GUARD, _START_SECONDS):
            return _running_job(request) or _start_process(request)
    except DriftLensError:
        raise
    except OSError as error:
        raise RunError(
            f"can't start a job with its log in {request.folder}: {error.strerror or error}",
            hint="Check the folder's permissions and free disk space.",
        ) from error


def _running_job(request: JobRequest) -> Job | None:
    """Return the running job if it is the requested one; refuse if another one is running."""
    run, job = request.run, job_of(request.run)
    if job is not None and job.code is None and job.owner.is_alive:
        # Compared as JSON, since the record on disk has lists in place of tuples.
        settings = from_json(json.dumps(dict(request.settings)))
        if (job.kind, job.name, dict(job.settings)) == (request.kind, request.name, settings):
            return job
        raise RunLockedError(
            f"{run.name} has a running job: {job.kind} {job.name}, started at {job.started[11:16]} UTC",
            hint="Wait for it or cancel it, then try again.",
        )
    owner = living_owner_of(run)
    if owner is not None:
        raise RunLockedError(
            f"{run.name} is being written to by {owner}, which was not started here",
            hint="Wait for it or stop it, then try again.",
        )
    return None


def _start_process(request: JobRequest) -> Job:
    started = utc_now()
    stamp = re.sub(r"\D", "", started)
    log = request.folder / f"{request.kind}-{stamp}.log"
    # Mode x does not follow a symbolic link that was placed at this path.
    with log.open("xb") as output:
        process = subprocess.Popen(
            [*COMMAND, *request.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=request.run.parent,
            env=_job_environment(),
            # In its own process group, a job outlives the server, and cancelling reaches its child processes.
            start_new_session=True,
        )
    _CHILDREN[process.pid] = process
    try:
        job = Job(
            kind=request.kind,
            name=request.name,
            run=request.run,
            log=log,
            pid=process.pid,
            process_started=process_started(process.pid),
            host=platform.node(),
            started=started,
            settings=dict(request.settings),
        )
        write_job(job)
    except BaseException:
        # Without a record nobody could watch or cancel the process.
        _signal_process_group(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return job


def _child_exit_code(pid: int) -> int | None:
    """Return the exit code of a child of this server, or minus its signal; None while it runs, or for others."""
    child = _CHILDREN.get(pid)
    return None if child is None else child.poll()


def cancel(job: Job) -> None:
    """Ask the job to stop at its next batch, like Ctrl-C, even if recording this fails."""
    if job.cancelled or not _is_alive_on_this_machine(job):
        return
    try:
        # Written first, so that a restarted server knows that the user cancelled the job.
        write_job(dataclasses.replace(job, cancelled=utc_now()))
    finally:
        _signal_process_group(job.pid, signal.SIGINT)


def _kill_overdue_job(job: Job) -> None:
    """Kill the job's processes if it was asked to stop longer ago than the grace period."""
    if not job.cancelled or not _is_alive_on_this_machine(job):
        return
    elapsed = datetime.now(UTC) - datetime.fromisoformat(job.cancelled)
    if elapsed.total_seconds() > GRACE_SECONDS:
        _signal_process_group(job.pid, signal.SIGKILL)


def _is_alive_on_this_machine(job: Job) -> bool:
    """Return True if the process id still belongs to the job on this machine."""
    return job.code is None and job.host == platform.node() and job.owner.is_alive


def _signal_process_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        # A job leads its own process group.
        os.killpg(pid, number)


@dataclass(frozen=True)
class View:
    """The state of a job; "stopped" if its process is gone without a result."""

    job: Job
    state: State
    progress: ProgressEvent | None = None
    failure: Failure | None = None

    @property
    def is_live(self) -> bool:
        """True if the state may still change."""
        return self.state in _LIVE


def watch(run: Path, kind: Kind | None = None) -> View | None:
    """Return the state of the newest job (of a kind); kill a cancelled job after its grace period."""
    job = job_of(run, kind)
    if job is None:
        return None
    code = _child_exit_code(job.pid) if job.code is None else None
    if code is not None:
        # Recorded for a restarted server. A full disk must not hide the state; it is recorded at a later call.
        job = dataclasses.replace(job, code=code)
        with contextlib.suppress(RunError):
            write_job(job)
    status = _status_written_by_job(job)
    if job.code is None and job.owner.is_alive:
        _kill_overdue_job(job)
        state: State = "cancelling" if job.cancelled else "running"
        progress = _read_progress(job, status)
        return View(job, state if progress is not None or job.cancelled else "starting", progress)
    return _ended_job_view(job, status)


def live_job(run: Path, kind: Kind | None = None) -> View | None:
    """Return the state of the newest job if it is live; else None."""
    view = watch(run, kind)
    return view if view is not None and view.is_live else None


def is_at_work(run: Path) -> bool:
    """Return True if a job that writes to the run is live."""
    return live_job(run) is not None


def is_finished_since(job: Job) -> bool:
    """Return True if the run was finished after the job began, for example in a terminal."""
    status = _read_run_status(job.run)
    return status is not None and status.state == "done" and str(status.heartbeat) > job.started


def _status_written_by_job(job: Job) -> Status | None:
    """Return the run's status if this job's process wrote it."""
    status = _read_run_status(job.run)
    if status is None or status.pid != job.pid:
        return None
    times = status.process_started, job.process_started
    if None not in times and abs(times[0] - times[1]) > _START_TOLERANCE:  # type: ignore[operator]
        return None
    return status


def _read_run_status(run: Path) -> Status | None:
    """Read the run's status; a damaged one, or one outside the root, counts as none."""
    try:
        return read_status(run) if is_inside(run / STATUS) else None
    except RunError:
        return None


def _ended_job_view(job: Job, status: Status | None) -> View:
    progress = _read_progress(job, status)
    state, error = (None, None) if status is None else (status.state, status.error)
    failure = error or _parse_printed_error(log_text(job.log))
    was_killed = job.code is None or job.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    if job.code == 0 or (job.code is None and state == "done"):
        return View(job, "done", progress)
    # During imports, libraries may convert an interrupt to any exit code.
    was_stopped = job.cancelled and (was_killed or (state is None and failure is None))
    if state == "cancelled" or job.code == Cancelled.exit_code or was_stopped:
        return View(job, "cancelled", progress)
    # A printed error means that the job ended by itself, even if no server was running to read its exit code.
    if state == "failed" or (failure is not None and (job.code is None or not was_killed)):
        return View(job, "failed", progress, failure or Failure("Error", "no reason was reported"))
    if job.code is None and _has_recent_heartbeat(status):
        # The process may run on another host: a recent heartbeat means that it is alive.
        return View(job, "running", progress)
    if job.code is not None and job.code > 0:
        return View(job, "failed", progress, Failure("Error", f"exit code {job.code}"))
    return View(job, "stopped", progress)


def _has_recent_heartbeat(status: Status | None) -> bool:
    if status is None or status.state not in ("running", "cancelling") or not status.heartbeat:
        return False
    age = datetime.now(UTC) - datetime.fromisoformat(status.heartbeat)
    return age.total_seconds() < SILENT_SECONDS


def _read_progress(job: Job, status: Status | None) -> ProgressEvent | None:
    """Read progress from the run's status, or from the log before there is a run."""
    if status is not None and status.phase:
        return ProgressEvent(status.phase, status.done, status.total, status.label, status.seconds)
    events = [event for _, event in _read_last_lines(job.log) if event.get("event") == "progress"]
    try:
        return _EVENT.validate_python({**events[-1], "metrics": {}}) if events else None
    except ValueError:
        return None


def log_text(log: Path) -> str:
    """Return the end of the log without progress lines; empty if there is none yet."""
    lines = ((line, event) for line, event in _read_last_lines(log) if event.get("event") != "progress")
    # With `--progress jsonl`, log messages are JSON too.
    return "\n".join(
        str(event.get("message", "")) if event.get("event") == "log" else line for line, event in lines
    )


def running_drift(job: Job) -> dict[int, float]:
    """Return the mean drift after each layer that the job has calibrated, by layer index."""
    drifts: dict[int, float] = {}
    for event in _job_events(job):
        numbers = event.get("metrics", event)
        layer, drift = numbers.get("layer"), numbers.get("drift_l2_mean")
        if isinstance(layer, int | float) and isinstance(drift, int | float):
            drifts[int(layer)] = float(drift)
    return dict(sorted(drifts.items()))


def running_scores(job: Job) -> dict[str, float]:
    """Return held-out scores of the candidates that the job's choice has tried so far, by name."""
    scores: dict[str, float] = {}
    for event in _job_events(job):
        name, score = event.get("name"), event.get("score")
        if event.get("event") == CANDIDATE and isinstance(name, str):
            scores[name] = float(score) if isinstance(score, int | float) else math.inf
    return scores


def _job_events(job: Job) -> Iterator[dict[str, Any]]:
    """Yield the run's events since the job began; an incomplete line is left for the next call."""
    return (
        event
        for _, event in _read_last_lines(job.run / EVENTS, _EVENT_BYTES)
        if str(event.get("time", "")) >= job.started
    )


def _read_last_lines(file: Path, most: int = _TAIL_BYTES) -> list[tuple[str, dict[str, Any]]]:
    """Return the last lines of a file, each with its JSON object; empty for plain text."""
    if not is_file_inside(file):
        return []
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - most))
            lines = opened.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [(line, _parse_json_object(line)) for line in (lines if size <= most else lines[1:])]


def _parse_json_object(line: str) -> dict[str, Any]:
    try:
        event = from_json(line) if line.startswith("{") else None
    # The last line may be incomplete while the job writes it.
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {}
