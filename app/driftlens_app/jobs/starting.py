"""Starting a job, once: a second click, tab or server finds the one that runs."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from pathlib import Path

from driftlens.errors import RunLockedError
from driftlens.records.guard import guard
from driftlens.records.lock import owner_of, utc_now
from driftlens_app.jobs import command_line
from driftlens_app.jobs.processes import keep
from driftlens_app.jobs.record import Job, Request, job_of, write_job

_GUARD = "start.lock"
_PATIENCE_SECONDS = 5.0


def start(request: Request) -> Job:
    """The job that writes to the run now: the one asked for, or the one that was running already.

    Raises:
        RunLockedError: another process writes to the run, one that this app did not start.
        RunError: the log can't be written.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    lock = guard(request.folder / _GUARD)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            lock.acquire()
            break
        except TimeoutError:  # somebody else is between asking and starting, which takes a moment
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        return _running(request.run) or _started(request)
    finally:
        lock.release()


def _running(run: Path) -> Job | None:
    job = job_of(run)
    if job is not None and job.code is None and job.owner.is_alive:
        return job
    owner = owner_of(run)
    if owner is not None and owner.is_alive:
        raise RunLockedError(
            f"{run.name} is being written to by {owner}, which was not started here",
            hint="Wait until it has finished, or stop it, and try again.",
        )
    return None


def _started(request: Request) -> Job:
    started = utc_now()
    stamp = re.sub(r"\D", "", started)
    log = request.folder / f"{request.kind}-{stamp}.log"
    with log.open("wb") as output:
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
    job = Job(
        kind=request.kind,
        name=request.name,
        run=request.run,
        log=log,
        pid=process.pid,
        process_started=keep(process),
        host=platform.node(),
        started=started,
        settings=dict(request.settings),
    )
    write_job(job)
    return job
