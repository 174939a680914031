"""The processes of jobs: those that this server has started, and how one is stopped: asked first, then made to."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from datetime import UTC, datetime

import psutil

from driftlens_app.jobs.record import Job, note_cancelled

GRACE_SECONDS = 60.0
"""How long a job that was asked may take to reach the end of its batch or layer and clean up."""

_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def keep(process: subprocess.Popen[bytes]) -> float | None:
    """When the process began, in seconds since 1970; from now on `exit_code` knows how it ends.

    None where it is gone already.
    """
    _CHILDREN[process.pid] = process
    try:
        return psutil.Process(process.pid).create_time()
    except psutil.Error:
        return None


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
        _signal(job, signal.SIGINT)


def insist(job: Job) -> None:
    """End the job's processes at once, if it was asked to stop longer ago than the grace period."""
    if job.cancelled and _seconds_since(job.cancelled) > GRACE_SECONDS and _is_here(job):
        _signal(job, signal.SIGKILL)


def _is_here(job: Job) -> bool:
    """Whether the id still belongs to the job's process on this machine, and not to a later one's."""
    return job.code is None and job.host == platform.node() and job.owner.is_alive


def _signal(job: Job, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, number)  # a job leads its own group


def _seconds_since(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
