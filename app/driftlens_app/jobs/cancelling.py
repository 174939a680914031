"""Stopping a job: ask first, insist after a while."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from datetime import UTC, datetime

from driftlens_app.jobs.record import Job, note_cancelled

GRACE_SECONDS = 60.0
"""How long a job that was asked may take to reach the end of its batch or layer and clean up."""


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
