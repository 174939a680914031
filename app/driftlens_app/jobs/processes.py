"""The command line as processes: asked for an answer, or started as a job, once whatever is clicked, and stopped.

A job that is to stop is asked first; later it is insisted on.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from driftlens.base.errors import DriftLensError, RunError, RunLockedError, SpecError
from driftlens.runs.status import Failure, living_owner_of, process_started, utc_now
from driftlens_app.jobs.record import Job, Request, job_of, note_cancelled, write_job
from driftlens_app.settings import Settings, require_inside, require_links_inside

COMMAND = (sys.executable, "-P", "-m", "driftlens")
"""The program, which looks for no module in the folder of the runs; tests put a stand-in here."""

PATIENCE_SECONDS = 300.0
"""How long a visitor may have to wait for an answer."""

_KINDS = {kind.exit_code: kind for kind in (SpecError, RunLockedError)}
"""What an exit code says about the error; the other codes are shared by several kinds."""

_TURNS = threading.BoundedSemaphore(2)

GRACE_SECONDS = 60.0
"""How long a job that was asked may take to reach the end of its batch or layer and clean up."""

_GUARD = "start.lock"
_START_SECONDS = 5.0
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def environment() -> dict[str, str]:
    """The environment of a job: this server's, without its own settings, and without colours in the log."""
    own = Settings(Path()).environment()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def answer(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The ended command `driftlens ARGUMENTS`, run in `folder`, with what it said; one that takes too long is ended.

    Two run at a time, however many visitors ask; the others wait, and their patience begins with their turn.
    """
    with _TURNS:
        return subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment(),
            timeout=PATIENCE_SECONDS,
            check=False,
        )


def ask(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """The document that `driftlens ARGUMENTS` prints, or else the error that it told, raised here."""
    try:
        done = answer(arguments, folder)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"`driftlens {arguments[0]}` did not answer within {PATIENCE_SECONDS:.0f} seconds",
            hint="Ask in a terminal, where it may take its time.",
        ) from None
    try:
        document = json.loads(done.stdout)
    except ValueError:
        failure = told_failure(done.stderr)
        if failure is None:
            said = f"ended with exit code {done.returncode} and said nothing"
            raise RunError(f"`driftlens {arguments[0]}` {said}") from None
        kind = _KINDS.get(done.returncode, DriftLensError)
        raise kind(failure.message, hint=failure.hint) from None
    assert isinstance(document, dict)
    return document


def told_failure(said: str) -> Failure | None:
    """The error that the command line told, from its parts `error: ...` and `hint: ...`, or None."""
    lines = said.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return None
    message, hint = [], []
    for line in lines[starts[-1] :]:
        (hint if hint or line.startswith("hint: ") else message).append(line)
    return Failure(
        "Error", "\n".join(message).removeprefix("error: "), "\n".join(hint).removeprefix("hint: ")
    )


def start(request: Request) -> Job:
    """The job that writes to the run now: the one asked for, or the one that was running already.

    Refused while a process writes to the run that was not started here, and where a link leaves the root.
    """
    if not request.run.parent.is_dir():  # it would be made again, around this one run
        raise RunError(f"the folder {request.run.parent} is gone", hint="Open the dashboard on another one.")
    for path in (request.run, request.folder, request.folder / _GUARD):
        require_inside(path)
    require_links_inside(request.run, Settings.from_environment().root)
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        # Whoever else holds it, a second click, tab or server, is between asking and starting.
        with FileLock(request.folder / _GUARD, timeout=_START_SECONDS):
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
            [*COMMAND, *request.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=request.run.parent,
            env=environment(),
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
    """How a child of this server ended: its exit code, or minus the signal; None while it runs, or for others."""
    child = _CHILDREN.get(pid)
    return None if child is None else child.poll()


def cancel(job: Job) -> None:
    """Ask the job to stop at its next batch, as Ctrl-C does, even if that can't be written down, which is raised."""
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
