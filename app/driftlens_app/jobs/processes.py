"""The processes of jobs: each is started once, whatever is clicked, and stopped by asking first and insisting later."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from driftlens.base.errors import DriftLensError, RunError, RunLockedError
from driftlens.runs.lock import living_owner_of, process_started, utc_now
from driftlens_app.jobs import command_line
from driftlens_app.jobs.record import Job, Request, job_of, note_cancelled, write_job
from driftlens_app.settings import Settings, require_inside, require_links_inside

GRACE_SECONDS = 60.0
"""How long a job that was asked may take to reach the end of its batch or layer and clean up."""

_GUARD = "start.lock"
_PATIENCE_SECONDS = 5.0
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def start(request: Request) -> Job:
    """The job that writes to the run now: the one asked for, or the one that was running already.

    Raises:
        RunLockedError: another process writes to the run, one that this app did not start.
        RunError: record or log can't be written, the folder of runs is gone, or a link in the run leaves it.
    """
    if not request.run.parent.is_dir():  # it would be made again, around this one run
        raise RunError(f"the folder {request.run.parent} is gone", hint="Open the dashboard on another one.")
    for path in (request.run, request.folder, request.folder / _GUARD):
        require_inside(path)
    require_links_inside(request.run, Settings.from_environment().root)
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        # Whoever else holds it, a second click, tab or server, is between asking and starting.
        with FileLock(request.folder / _GUARD, timeout=_PATIENCE_SECONDS):
            return _running(request.run) or _started(request)
    except DriftLensError:
        raise
    except Timeout:
        raise RunLockedError(
            f"another dashboard has been starting a job for {request.run.name} for long",
            hint="Try again; if it stays so, close the other dashboard.",
        ) from None
    except OSError as error:
        raise RunError(
            f"can't start a job that keeps its log in {request.folder}: {error.strerror or error}",
            hint="Check the folder's permissions and the space on its disk.",
        ) from error


def _running(run: Path) -> Job | None:
    job = job_of(run)
    if job is not None and job.code is None and job.owner.is_alive:
        return job
    owner = living_owner_of(run)
    if owner is not None:
        raise RunLockedError(
            f"{run.name} is being written to by {owner}, which was not started here",
            hint="Wait until it has finished, or stop it, and try again.",
        )
    return None


def _started(request: Request) -> Job:
    started = utc_now()
    stamp = re.sub(r"\D", "", started)
    log = request.folder / f"{request.kind}-{stamp}.log"
    with log.open("xb") as output:  # never through a link that somebody has laid there
        process = subprocess.Popen(
            [*command_line.COMMAND, *request.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=request.run.parent,
            env=command_line.environment(),
            # A group of its own: stopping the server leaves the job alone, and cancelling reaches all of it.
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
    except BaseException:  # nobody would know of the process: it must not go on
        _signal(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return job


def exit_code(pid: int) -> int | None:
    """How a child of this server ended: its exit code, or minus the signal; None while it runs, or for others.

    Asking also lets the system forget a child that has ended.
    """
    child = _CHILDREN.get(pid)
    return None if child is None else child.poll()


def cancel(job: Job) -> None:
    """Ask the job to stop at its next batch, as Ctrl-C does; asking again changes nothing.

    Raises:
        RunError: that the user asked can't be written down; the job was asked all the same.
    """
    if job.cancelled or not _is_here(job):
        return
    try:
        # Written first: a server that is restarted now still knows that the user did this.
        note_cancelled(job)
    finally:
        _signal(job.pid, signal.SIGINT)


def insist(job: Job) -> None:
    """End the job's processes at once, if it was asked to stop longer ago than the grace period."""
    if not job.cancelled or not _is_here(job):
        return
    asked = datetime.now(UTC) - datetime.fromisoformat(job.cancelled)
    if asked.total_seconds() > GRACE_SECONDS:
        _signal(job.pid, signal.SIGKILL)


def _is_here(job: Job) -> bool:
    """Whether the id still belongs to the job's process on this machine, and not to a later one's."""
    return job.code is None and job.host == platform.node() and job.owner.is_alive


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)  # a job leads its own group
