"""Jobs: commands that run as processes. Entry points: `start_job`, `poll_job`, `cancel_job`.

A job's state is on disk (a record next to its log, and the run's own files), so that every page and a restarted server
find the same job and never start a second one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter

from driftlens.runs.manifest import (
    EVENTS,
    STATUS,
    LockOwner,
    RunFailure,
    RunStatus,
    live_lock_owner,
    process_start_time,
    read_status,
    utc_now,
)
from driftlens.utils.errors import Cancelled, DriftLensError, RunError, RunLockedError
from driftlens.utils.files import LockFile, parse_json, write_json_atomic
from driftlens.utils.progress import ProgressEvent
from driftlens_app.settings import Settings, is_file_inside, is_inside, require_inside, require_links_inside

COMMAND = (sys.executable, "-P", "-m", "driftlens")
"""The command line program, without the runs' folder on the module path; tests replace it."""

PATIENCE_SECONDS = 300.0
"""Longest time until a page responds, in seconds."""

GRACE_SECONDS = 60.0
"""How long a job that was asked may take to reach the end of its batch or layer and clean up."""

_GUARD = "start.lock"
_START_SECONDS = 5.0
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}

State = Literal["starting", "running", "cancelling", "cancelled", "failed", "stopped", "done"]

_LIVE = ("starting", "running", "cancelling")
_EVENT = TypeAdapter(ProgressEvent)
_TAIL_BYTES, _EVENT_BYTES = 65_536, 1_000_000

Kind = Literal["demo", "analyze", "calibrate", "sweep", "explain", "merge"]
MAKING: tuple[Kind, ...] = ("demo", "analyze")
"""Kinds of jobs that make the folder that they write to."""

_SIDE = ".driftlens"
"""Folder next to the runs for logs of jobs that make a run, whose own folder must be empty at first."""

_LOG = re.compile(r"[a-z]+-[0-9]+\.log")


@dataclass(frozen=True)
class JobRequest:
    """A job to start: command-line arguments, the run it writes to, a description and form values."""

    kind: Kind
    name: str
    run: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the job's record and log."""
        return _new_run_job_folder(self.run) if self.kind in MAKING else self.run / "logs"


@dataclass(frozen=True)
class Job:
    """A started job as stored on disk: process, log, time of cancellation, and exit code (negative: a signal)."""

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
    def owner(self) -> LockOwner:
        """The job's process as a lock owner: pid, start time and host."""
        return LockOwner(self.pid, self.process_started, self.host, self.started)


_RECORDS = TypeAdapter(Job)


def write_job_record(job: Job) -> None:
    """Replace the stored record of the run's newest job of this kind atomically."""
    record = dataclasses.asdict(job)
    # Relative, so that a folder of runs may be moved.
    record |= {"run": job.run.name, "log": job.log.name, "settings": dict(job.settings)}
    write_json_atomic(job.log.parent / f"{job.kind}-job.json", record)


def dismiss_job(job: Job) -> None:
    """Record that the user has dismissed the message about a job's end."""
    newest = newest_job(job.run, job.kind)
    if newest is not None and newest.log == job.log:
        write_job_record(dataclasses.replace(newest, dismissed=True))


def newest_job(run: Path, kind: Kind | None = None) -> Job | None:
    """Return the newest job, optionally of one kind, that wrote to a run directory."""
    jobs = [*_newest_jobs(run / "logs", run), *_newest_jobs(_new_run_job_folder(run), run)]
    wanted = [job for job in jobs if kind in (None, job.kind)]
    return max(wanted, key=lambda job: job.started, default=None)


def new_run_jobs(root: Path) -> list[Job]:
    """List the jobs that create runs inside `root`, newest first."""
    side = root / _SIDE
    folders = sorted(side.iterdir()) if side.is_dir() and is_inside(side) else []
    jobs = [job for folder in folders for job in _newest_jobs(folder, root / folder.name)]
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def _new_run_job_folder(run: Path) -> Path:
    return run.parent / _SIDE / run.name


def _newest_jobs(folder: Path, run: Path) -> list[Job]:
    """List the newest job of each kind recorded in `folder`."""
    return [job for kind in get_args(Kind) if (job := _read_job_record(folder, kind, run)) is not None]


def _read_job_record(folder: Path, kind: Kind, run: Path) -> Job | None:
    """Read the newest job of a kind from its record in `folder`; None if the record is invalid."""
    file = folder / f"{kind}-job.json"
    if not is_file_inside(file):
        return None
    try:
        record = parse_json(file.read_text(encoding="utf-8"))
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
    """Return environment variables of a job: the server's without dashboard settings, with plain-text logs."""
    settings = Settings(Path()).environment()
    inherited = {
        name: value for name, value in os.environ.items() if name not in settings and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "DRIFTLENS_LOG_JSON": "0", "PYTHONUNBUFFERED": "1"}


def run_command(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `driftlens ARGUMENTS` with a timeout."""
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


def run_json_command(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `driftlens ARGUMENTS` and return the printed JSON, or raise its error."""
    try:
        done = run_command(arguments, folder)
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


def _parse_printed_error(output: str) -> RunFailure | None:
    """Parse `error: ...` and `hint: ...` from the output of a command; None if it printed no error."""
    _, sign, text = "\n".join(["", *output.splitlines()]).rpartition("\nerror: ")
    message, _, hint = text.partition("\nhint: ")
    return RunFailure("Error", message, hint) if sign else None


def start_job(request: JobRequest) -> Job:
    """Start a job, or return it if it already runs; raise RunLockedError if another job writes to the run."""
    # Otherwise `mkdir` below would recreate a removed root around this one run.
    if not request.run.parent.is_dir():
        raise RunError(f"the folder {request.run.parent} is gone", hint="Open the dashboard on another one.")
    for path in (request.run, request.folder, request.folder / _GUARD):
        require_inside(path)
    require_links_inside(request.run, Settings.from_environment().root)
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        # Held between check and start, so that a second click, tab or server cannot start the job twice.
        with LockFile(request.folder / _GUARD, _START_SECONDS):
            return _matching_job(request) or _start_process(request)
    except DriftLensError:
        raise
    except OSError as error:
        raise RunError(
            f"can't start a job with its log in {request.folder}: {error.strerror or error}",
            hint="Check the folder's permissions and free disk space.",
        ) from error


def _matching_job(request: JobRequest) -> Job | None:
    """Return the running job if it is the requested one; raise RunLockedError if another one is running."""
    run, job = request.run, newest_job(request.run)
    if job is not None and job.code is None and job.owner.is_alive:
        # Compared as JSON, since the record on disk has lists in place of tuples.
        settings = parse_json(json.dumps(dict(request.settings)))
        if (job.kind, job.name, dict(job.settings)) == (request.kind, request.name, settings):
            return job
        raise RunLockedError(
            f"{run.name} has a running job: {job.kind} {job.name}, started at {job.started[11:16]} UTC",
            hint="Wait for it or cancel it, then try again.",
        )
    owner = live_lock_owner(run)
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
            process_started=process_start_time(process.pid),
            host=platform.node(),
            started=started,
            settings=dict(request.settings),
        )
        write_job_record(job)
    except BaseException:
        # Without a record nobody could watch or cancel the process.
        _signal_process_group(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return job


def _child_exit_code(pid: int) -> int | None:
    """Return the exit code of a child process (negative: a signal); None while it runs or if it is no child."""
    child = _CHILDREN.get(pid)
    return None if child is None else child.poll()


def cancel_job(job: Job) -> None:
    """Interrupt a job as Ctrl-C does, so that it stops after its current batch."""
    if job.cancelled or not _is_alive_on_this_machine(job):
        return
    try:
        # Written first, so that a restarted server knows that the user cancelled the job.
        write_job_record(dataclasses.replace(job, cancelled=utc_now()))
    finally:
        _signal_process_group(job.pid, signal.SIGINT)


def _is_alive_on_this_machine(job: Job) -> bool:
    """Return True if the job's process is still running on this machine."""
    return job.code is None and job.host == platform.node() and job.owner.is_alive


def _seconds_since(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _signal_process_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        # A job leads its own process group.
        os.killpg(pid, number)


@dataclass(frozen=True)
class JobStatus:
    """The current state of a job with progress or failure; "stopped" if its process ended without a result."""

    job: Job
    state: State
    progress: ProgressEvent | None = None
    failure: RunFailure | None = None

    @property
    def is_live(self) -> bool:
        """True if the job is starting, running or cancelling."""
        return self.state in _LIVE


def poll_job(run: Path, kind: Kind | None = None) -> JobStatus | None:
    """Return the status of the newest job; kill a cancelled job after its grace period."""
    job = newest_job(run, kind)
    if job is None:
        return None
    code = _child_exit_code(job.pid) if job.code is None else None
    job = _with_chosen_name(job)
    if code is not None:
        # Recorded for a restarted server. A full disk must not hide the state; it is recorded at a later call.
        job = dataclasses.replace(job, code=code)
        with contextlib.suppress(RunError):
            write_job_record(job)
    status = _status_since_start(job)
    # Another process may have written it since.
    status = status if status is not None and status.pid == job.pid else None
    writer = live_lock_owner(job.run)
    # On another machine, only the lock of the run shows that the process is alive.
    if job.code is None and (job.owner.is_alive or (writer is not None and writer.pid == job.pid)):
        if job.cancelled and _seconds_since(job.cancelled) > GRACE_SECONDS and _is_alive_on_this_machine(job):
            _signal_process_group(job.pid, signal.SIGKILL)
        state: State = "cancelling" if job.cancelled else "running"
        progress = _read_progress(job, status)
        return JobStatus(job, state if progress is not None or job.cancelled else "starting", progress)
    return _ended_job_status(job, status)


def _with_chosen_name(job: Job) -> Job:
    """Return a calibration that was started without a name under the one that it has in the run."""
    # The record of a finished job has the name already.
    if job.kind != "calibrate" or job.settings.get("name", job.name) or job.code is not None:
        return job
    events = (event for _, event in _read_last_lines(job.run / EVENTS, _EVENT_BYTES) if event.get("event") == "phase")
    phases = [str(event.get("name")).split(":") for event in events if str(event.get("time", "")) >= job.started]
    # Phases of the choice come first. Later ones may be of other calibrations, made in a terminal.
    names = [*dict.fromkeys(phase[1] for phase in phases if len(phase) > 1 and phase[0] == job.kind)]
    return dataclasses.replace(job, name=names[:2][-1]) if names else job


def live_job(run: Path, kind: Kind | None = None) -> JobStatus | None:
    """Return the status of the newest job if it is live, else None."""
    view = poll_job(run, kind)
    return view if view is not None and view.is_live else None


def has_live_job(run: Path) -> bool:
    """Return True if a live job writes to the run."""
    return live_job(run) is not None


def is_run_finished_since(job: Job) -> bool:
    """Return True if the run was completed after the job started, for example from a terminal."""
    status = _status_since_start(job)
    return status is not None and status.state == "done"


def _status_since_start(job: Job) -> RunStatus | None:
    """Read the run's status file; None if it is older than the job, damaged, or outside the root."""
    try:
        status = read_status(job.run) if is_inside(job.run / STATUS) else None
    except RunError:
        return None
    return status if status is not None and str(status.heartbeat) > job.started else None


def _ended_job_status(job: Job, status: RunStatus | None) -> JobStatus:
    progress = _read_progress(job, status)
    state, error = (None, None) if status is None else (status.state, status.error)
    failure = error or _parse_printed_error(log_tail(job.log))
    was_killed = job.code is None or job.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    if job.code == 0 or (job.code is None and state == "done"):
        return JobStatus(job, "done", progress)
    # During imports, libraries may convert an interrupt to any exit code.
    was_stopped = job.cancelled and (was_killed or (state is None and failure is None))
    if state == "cancelled" or job.code == Cancelled.exit_code or was_stopped:
        return JobStatus(job, "cancelled", progress)
    # A printed error means that the job ended by itself, even if no server was running to read its exit code.
    if state == "failed" or (failure is not None and (job.code is None or not was_killed)):
        return JobStatus(job, "failed", progress, failure or RunFailure("Error", "no reason was reported"))
    if job.code is not None and job.code > 0:
        return JobStatus(job, "failed", progress, RunFailure("Error", f"exit code {job.code}"))
    return JobStatus(job, "stopped", progress)


def _read_progress(job: Job, status: RunStatus | None) -> ProgressEvent | None:
    """Read the job's progress from the run's status file, or from the log before the run exists."""
    if status is not None and status.phase:
        return ProgressEvent(status.phase, status.done, status.total, status.label, status.seconds)
    events = [event for _, event in _read_last_lines(job.log) if event.get("event") == "progress"]
    try:
        return _EVENT.validate_python({**events[-1], "metrics": {}}) if events else None
    except ValueError:
        return None


def log_tail(log: Path) -> str:
    """Return the last lines of a job's log without progress events; empty if there is none."""
    lines = ((line, event) for line, event in _read_last_lines(log) if event.get("event") != "progress")
    # With `--progress jsonl`, log messages are JSON too.
    return "\n".join(str(event.get("message", "")) if event.get("event") == "log" else line for line, event in lines)


def drift_so_far(job: Job) -> dict[int, float]:
    """Return the mean drift of each layer calibrated so far by a running job, keyed by layer index."""
    drifts: dict[int, float] = {}
    for _, event in _read_last_lines(job.run / EVENTS, _EVENT_BYTES):
        if str(event.get("time", "")) < job.started:
            continue
        numbers = event.get("metrics", event)
        layer, drift = numbers.get("layer"), numbers.get("drift_l2_mean")
        if isinstance(layer, int | float) and isinstance(drift, int | float):
            drifts[int(layer)] = float(drift)
    return dict(sorted(drifts.items()))


def _read_last_lines(file: Path, most: int = _TAIL_BYTES) -> list[tuple[str, dict[str, Any]]]:
    """Return the last lines of a file, each with its parsed JSON object; empty for plain text."""
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
        event = parse_json(line) if line.startswith("{") else None
    # The last line may be incomplete while the job writes it.
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {}
