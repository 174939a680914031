"""The processes that this server has started; of others, only what the system says."""

from __future__ import annotations

import subprocess

import psutil

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
