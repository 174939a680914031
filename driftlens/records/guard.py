"""The lock that the operating system holds for a process, and gives back when that process dies."""

from __future__ import annotations

import os
import pathlib
from typing import Protocol


class Guard(Protocol):
    """A lock on a file, held by one process at a time."""

    @property
    def is_locked(self) -> bool:
        """Whether this object holds it."""
        ...

    def acquire(self) -> object:
        """Take the lock at once.

        Raises:
            TimeoutError: somebody else holds it.
        """
        ...

    def release(self) -> None:
        """Give it back."""
        ...


def guard(path: pathlib.Path) -> Guard:
    """A guard on the file `path`, which is made if need be."""
    try:
        from filelock import FileLock
    except ImportError:  # an engine without the command line's libraries
        return _Flock(path)
    return FileLock(path, timeout=0)


class _Flock:
    """What filelock does on Unix, and no more."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_locked(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        import fcntl

        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise TimeoutError(f"{self._path} is locked") from None
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
