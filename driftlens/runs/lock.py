"""One writer per run: a lock held by the operating system, and a note beside it that says who holds it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import psutil
from filelock import FileLock

from driftlens.base import stopping
from driftlens.base.errors import RunError, RunLockedError
from driftlens.base.files import PARTIAL, from_json, plain_file, sweep, write_json_atomic
from driftlens.runs.layout import ENTRIES, EVENTS, GUARD, LOCK

_FRESH_SECONDS = 60.0
_CLOCK_TOLERANCE = 2.0
"""Seconds by which two readings of one start time may differ: the system derives it from its boot time."""


def utc_now() -> str:
    """The time in UTC as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Owner:
    """Who writes to a run, and its last sign of life (UTC); its start tells a process from a later one of that id."""

    pid: int
    process_started: float | None
    host: str
    heartbeat: str

    @classmethod
    def this_process(cls) -> Owner:
        """The process that asks, alive now."""
        return cls(os.getpid(), process_started(os.getpid()), platform.node(), utc_now())

    @property
    def is_alive(self) -> bool:
        """Whether the process runs on this machine; on another one, whether its heartbeat is fresh."""
        if self.host != platform.node():
            return (
                datetime.now(UTC) - datetime.fromisoformat(self.heartbeat)
            ).total_seconds() < _FRESH_SECONDS
        started = process_started(self.pid)
        if started is None or self.process_started is None:
            return False
        return abs(started - self.process_started) < _CLOCK_TOLERANCE

    def __str__(self) -> str:
        where = "" if self.host == platform.node() else f" on {self.host}"
        return f"process {self.pid}{where}"


class RunLock:
    """The right to write to a run directory, held from `acquire` to `release`.

    The operating system gives the lock back when a process dies, whatever killed it, so that a dead owner
    blocks nobody. The note it leaves in `run.lock` is what `acquire` returns.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._guard = FileLock(folder / GUARD, timeout=0)
        self._held: os.stat_result | None = None

    def acquire(self) -> Owner | None:
        """Take the lock; returns the owner that died holding it, if one did, whose scratch folders are removed."""
        _require_no_way_out(self._folder)
        stopping.begin(self, self.release)
        try:
            self._guard.acquire()
        except TimeoutError:
            stopping.end(self)
            if not (self._folder / GUARD).exists():
                self.require_own()
            raise _locked(self._folder, owner_of(self._folder)) from None
        try:
            self._held = (self._folder / GUARD).stat()
            previous = owner_of(self._folder)
            # The guard was free. Only where it can't be relied on (removed by hand, a network folder) is the
            # owner that the note names alive nevertheless.
            if previous is not None and previous.pid != os.getpid() and previous.is_alive:
                raise _locked(self._folder, previous)
            sweep(self._folder.glob(PARTIAL), others=True)
            for entry in ENTRIES:  # what is not the run's own may be large, and is none of its business
                sweep((self._folder / entry).rglob(PARTIAL), others=True)
            self.beat()
        except KeyboardInterrupt:  # it may fall behind the note
            self.release()
            raise
        except BaseException:
            self._guard.release()
            stopping.end(self)
            raise
        return previous

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def beat(self) -> None:
        """Renew the heartbeat in the note."""
        self.require_own()
        write_json_atomic(self._folder / LOCK, dataclasses.asdict(Owner.this_process()))

    @property
    def is_own(self) -> bool:
        """Whether the folder is still the one that was locked.

        The guard's file is open while it is held, so that a file which takes its place can't have its identity.
        """
        try:
            found = (self._folder / GUARD).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._held is not None and os.path.samestat(found, self._held)

    def require_own(self) -> None:
        """Refuse to go on in a folder that was removed, moved or replaced since it was locked: it would come back."""
        if not self.is_own:
            raise RunError(
                f"{self._folder} was removed, moved or replaced while it was being written to",
                hint="Nothing more was written there. Start again with a run that is in its place.",
            )

    def release(self) -> None:
        """Give the lock back and remove the note; does nothing when the lock is not held."""
        if self._guard.is_locked:
            with contextlib.suppress(OSError):
                if self.is_own:
                    (self._folder / LOCK).unlink()
            self._guard.release()
        stopping.end(self)


def _require_no_way_out(folder: pathlib.Path) -> None:
    """Refuse a run with links out of it, behind which files would be made or changed; it may be a link itself."""
    home = os.path.realpath(folder)
    places = [folder / EVENTS, folder / GUARD]
    for entry in ENTRIES:
        if (folder / entry).is_dir():
            places.append(folder / entry)
            places += (pathlib.Path(at, name) for at, names, _ in os.walk(folder / entry) for name in names)
    for place in places:
        if place.is_symlink() and not pathlib.Path(os.path.realpath(place)).is_relative_to(home):
            raise RunError(
                f"{place} is a link that leads out of the run, which would be written to there",
                hint="Move what it leads to into its place, or remove the link.",
            )


def owner_of(folder: pathlib.Path) -> Owner | None:
    """Who holds the run's lock according to its note, dead or alive; None when nobody does."""
    try:
        note = from_json(plain_file(folder / LOCK).read_text(encoding="utf-8"))
        owner = Owner(**{field.name: note[field.name] for field in dataclasses.fields(Owner)})
        is_sound = type(owner.pid) is int and 0 < owner.pid < 2**31 and isinstance(owner.host, str)
        is_sound &= isinstance(owner.process_started, int | float | None)
        if not is_sound or datetime.fromisoformat(owner.heartbeat).tzinfo is None:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return owner


def living_owner_of(folder: pathlib.Path) -> Owner | None:
    """The live process that holds the run's lock; None when there is none."""
    owner = owner_of(folder)
    return owner if owner is not None and owner.is_alive else None


def require_unlocked(folder: pathlib.Path) -> None:
    """Refuse a run that a live process is writing to; unlike taking the lock, this leaves no trace."""
    owner = living_owner_of(folder)
    if owner is not None:
        raise _locked(folder, owner)


def _locked(folder: pathlib.Path, owner: Owner | None) -> RunLockedError:
    return RunLockedError(
        f"{folder} is being written to by {owner or 'another process'}",
        hint="Wait until it has finished, or stop it, and try again.",
        pid=None if owner is None else owner.pid,
    )


def process_started(pid: int) -> float | None:
    """When the process began, or None when there is no such process.

    In seconds since the machine did, where the system tells that (Linux), else since 1970: no clock that is set in the
    meantime may make a live process look like another one.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        with contextlib.suppress(OSError, IndexError, ValueError):
            # Field 22, counted behind the name, which may hold anything.
            fields = pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return float(process.create_time())
    except psutil.Error:
        return None
