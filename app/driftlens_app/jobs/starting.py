"""Starting a job, once: a second click, tab or server finds the one that runs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from driftlens.errors import DriftLensError, RunError, RunLockedError
from driftlens.records.lock import living_owner_of, utc_now
from driftlens_app.inside import require_inside, require_links_inside
from driftlens_app.jobs import command_line
from driftlens_app.jobs.processes import keep
from driftlens_app.jobs.record import Job, Request, job_of, write_job
from driftlens_app.settings import Settings

_GUARD = "start.lock"
_PATIENCE_SECONDS = 5.0


def start(request: Request) -> Job:
    """The job that writes to the run now: the one asked for, or the one that was running already.

    Raises:
        RunLockedError: another process writes to the run, one that this app did not start.
        RunError: record or log can't be written, the folder of runs is gone, or a link in the run leaves it.
    """
    _require_places(request)
    with _writable(request), _turn(request):
        return _running(request.run) or _started(request)


def _require_places(request: Request) -> None:
    if not request.run.parent.is_dir():  # it would be made again, around this one run
        raise RunError(f"the folder {request.run.parent} is gone", hint="Open the dashboard on another one.")
    for path in (request.run, request.folder, request.folder / _GUARD):
        require_inside(path)
    require_links_inside(request.run, Settings.from_environment().root)


@contextlib.contextmanager
def _writable(request: Request) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, DriftLensError):
            raise
        raise RunError(
            f"can't start a job that keeps its log in {request.folder}: {error.strerror or error}",
            hint="Check the folder's permissions and the space on its disk.",
        ) from error


@contextlib.contextmanager
def _turn(request: Request) -> Iterator[None]:
    """The right to start a job for this run; whoever else has it is between asking and starting."""
    request.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(request.folder / _GUARD, timeout=0)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            lock.acquire()
            break
        except TimeoutError:
            if time.monotonic() > deadline:
                raise RunLockedError(
                    f"another dashboard has been starting a job for {request.run.name} for long",
                    hint="Try again; if it stays so, close the other dashboard.",
                ) from None
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


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
    try:
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
    except BaseException:  # nobody would know of the process: it must not go on
        _end(process)
        raise
    return job


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
