"""Run state on disk: progress (`status.json`), history (`events.jsonl`) and the writer's lock (`run.lock`)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, ClassVar, Literal, Self

import psutil
from pydantic import AfterValidator, ConfigDict, Field

from driftlens.runs.manifest import ENTRIES, EVENTS, GUARD, LOCK, STATUS, as_declared, as_plain, utc_now
from driftlens.utils.errors import Cancelled, RunError, RunLockedError, from_library
from driftlens.utils.files import (
    PARTIAL,
    Guard,
    forget_undo,
    free_bytes,
    plain_file,
    sweep,
    undo_if_stopped,
    write_json_atomic,
)

_FRESH_SECONDS = 60.0
# Largest difference in seconds between two readings of a start time, which the system derives from its boot
# time.
_CLOCK_TOLERANCE = 2.0


def _with_zone(moment: str) -> str:
    if moment and datetime.fromisoformat(moment).tzinfo is None:
        raise ValueError("a time without a time zone")
    return moment


_Moment = Annotated[str, AfterValidator(_with_zone)]
_Whole = Annotated[int, Field(lt=2**63)]


@dataclass(frozen=True)
class Owner:
    """The process that writes to a run, with its last sign of life (UTC)."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    process_started: float | None
    host: str
    heartbeat: Annotated[_Moment, Field(min_length=1)]

    @classmethod
    def this_process(cls) -> Owner:
        """Return the current process, alive now."""
        return cls(os.getpid(), process_started(os.getpid()), platform.node(), utc_now())

    @property
    def is_alive(self) -> bool:
        """True if the process runs on this machine, or has a fresh heartbeat on another one."""
        if self.host != platform.node():
            # A process on another machine can't be looked up; only its heartbeat shows that it runs.
            silence = datetime.now(UTC) - datetime.fromisoformat(self.heartbeat)
            return silence.total_seconds() < _FRESH_SECONDS
        # The id alone does not identify a process: the system reuses ids.
        started = process_started(self.pid)
        if started is None or self.process_started is None:
            return False
        return abs(started - self.process_started) < _CLOCK_TOLERANCE

    def __str__(self) -> str:
        where = "" if self.host == platform.node() else f" on {self.host}"
        return f"process {self.pid}{where}"


class RunLock:
    """The right to write to a run directory. The operating system releases it when the process dies.

    On a disk without locks the note in `run.lock` decides.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._guard = Guard(folder / GUARD)
        self._held: os.stat_result | None = None
        self._has_note = False

    def acquire(self) -> Owner | None:
        """Take the lock; return the owner that died holding it, if any, and remove its scratch folders."""
        _refuse_links_out(self._folder)
        undo_if_stopped(self, self.release)
        try:
            self._guard.acquire()
            self._held = (self._folder / GUARD).stat()
            previous = owner_of(self._folder)
            # The guard is reliable except after removal by hand, on a disk without locks, or in a network folder.
            # There the note decides.
            if previous is not None and previous.pid != os.getpid() and previous.is_alive:
                raise _locked(self._folder, previous)
            sweep(self._folder.glob(PARTIAL), others=True)
            # Files of other programs may be large; they are not searched.
            for entry in ENTRIES:
                sweep((self._folder / entry).rglob(PARTIAL), others=True)
            self.beat()
        except TimeoutError:
            forget_undo(self)
            if not (self._folder / GUARD).exists():
                self.require_own()
            raise _locked(self._folder, owner_of(self._folder)) from None
        except BaseException as error:
            is_guarded = self._guard.is_held
            self.release()
            denied = (errno.EACCES, errno.EPERM, errno.EROFS)
            if not is_guarded and isinstance(error, OSError) and error.errno in denied:
                raise RunError(
                    f"can't write to {self._folder}: {error.strerror}",
                    hint="Choose another folder with --out, or copy the run to a writable one.",
                ) from error
            raise
        return previous

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def beat(self) -> Owner:
        """Write the note, with a new heartbeat, and return it."""
        self.require_own()
        self._has_note = True
        owner = Owner.this_process()
        # Only the guard must survive a power cut.
        write_json_atomic(self._folder / LOCK, dataclasses.asdict(owner), is_lasting=False)
        return owner

    @property
    def is_own(self) -> bool:
        """True if the folder is still the one that was locked."""
        try:
            guard = (self._folder / GUARD).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        # The guard's file is open while the lock is held, so no new file can have its identity.
        return self._held is not None and os.path.samestat(guard, self._held)

    def require_own(self) -> None:
        """Raise a RunError if the folder was removed, moved or replaced since it was locked."""
        if not self.is_own:
            raise RunError(
                f"{self._folder} was removed, moved or replaced while it was being written to",
                hint="Writing has stopped. Restore the folder, or start again.",
            )

    def release(self) -> None:
        """Release the lock and remove the note; do nothing if the lock is not held."""
        if self._guard.is_held:
            with contextlib.suppress(OSError):
                if self._has_note and self.is_own:
                    (self._folder / LOCK).unlink()
            self._guard.release()
        forget_undo(self)


def _refuse_links_out(folder: pathlib.Path) -> None:
    """Refuse a run with links that lead out of it; the run itself may be a link."""
    home = os.path.realpath(folder)
    places = [folder / EVENTS, folder / GUARD]
    for entry in filter(pathlib.Path.is_dir, (folder / name for name in ENTRIES)):
        places += [entry, *entry.rglob("*")]
    for place in places:
        if place.is_symlink() and not pathlib.Path(os.path.realpath(place)).is_relative_to(home):
            raise RunError(
                f"{place} is a link that leads out of the run",
                hint="Replace the link with its target, or remove it.",
            )


def owner_of(folder: pathlib.Path) -> Owner | None:
    """Return the owner in the lock's note, dead or alive; None without a valid note."""
    try:
        return as_declared(Owner, plain_file(folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return None


def living_owner_of(folder: pathlib.Path) -> Owner | None:
    """Return the live process that holds the run's lock; None if there is none."""
    owner = owner_of(folder)
    return owner if owner is not None and owner.is_alive else None


def require_unlocked(folder: pathlib.Path) -> None:
    """Raise a RunLockedError if a live process writes to the run."""
    owner = living_owner_of(folder)
    if owner is not None:
        raise _locked(folder, owner)


def _locked(folder: pathlib.Path, owner: Owner | None) -> RunLockedError:
    hint = "Try again when it has finished, or stop it."
    # The state of a process on another machine is unknown, and its clock may differ.
    if owner is not None and owner.host != platform.node():
        hint = (
            f"Wait for it, or stop it there. Last heartbeat, by its clock: {owner.heartbeat}. If the process has "
            f"ended, remove {folder / LOCK}."
        )
    return RunLockedError(
        f"{folder} is being written to by {owner or 'another process'}",
        hint=hint,
        pid=None if owner is None else owner.pid,
    )


def process_started(pid: int) -> float | None:
    """Return the start time of a process in seconds; None if there is no such process."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        with contextlib.suppress(OSError, IndexError, ValueError):
            # From the boot of the machine, because setting the clock must not make it look like another process.
            # Field 22, counted from the end of the name, which may contain spaces and brackets.
            fields = pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return float(process.create_time())
    except psutil.Error:
        return None


State = Literal["queued", "running", "cancelling", "cancelled", "failed", "done"]


@dataclass(frozen=True)
class Failure:
    """The reason why a run ended early: the error's type, its message, and a hint."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    type: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that describes `error`."""
        described = from_library(error)
        message, hint = (described.message, described.hint) if described is not None else (str(error), "")
        return cls(type(error).__name__, message, hint)


@dataclass(frozen=True)
class Status:
    """The state of a run: units of the phase `done` of `total` (None: unknown) after `seconds`.

    It was written at `heartbeat` (UTC) by the process `pid`. Of `metrics`, those that are not finite are None.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}

    state: State
    phase: str = ""
    done: _Whole = 0
    total: _Whole | None = None
    label: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    heartbeat: _Moment = ""
    pid: _Whole = 0
    process_started: float | None = None
    error: Failure | None = None


def write_status(folder: pathlib.Path, status: Status) -> None:
    """Replace the run's status.json atomically."""
    finite = {name: value for name, value in status.metrics.items() if value is not None and isfinite(value)}
    metrics = {name: float(finite[name]) if name in finite else None for name in status.metrics}
    # A running job writes hundreds of them; after a power cut it doesn't run any more, so none needs a disk flush.
    is_lasting = status.state != "running"
    write_json_atomic(folder / STATUS, as_plain(replace(status, metrics=metrics)), is_lasting=is_lasting)


def read_status(folder: pathlib.Path) -> Status | None:
    """Return the run's status; None without a status.json."""
    path = folder / STATUS
    try:
        return as_declared(Status, plain_file(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} can't be read: {error}", hint="Remove it; the results do not depend on it."
        ) from error


def final_state(error: BaseException) -> Literal["cancelled", "failed"]:
    """Return the state of a run that `error` ended."""
    return "cancelled" if isinstance(error, (Cancelled, KeyboardInterrupt)) else "failed"


def append_event(folder: pathlib.Path, event: str, **details: object) -> None:
    """Append one line to the run's events.jsonl."""
    path = folder / EVENTS
    line = json.dumps({"time": utc_now(), "event": event, **details}, ensure_ascii=False).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            # A killed writer may have left half a line.
            is_torn = size > 0 and file.read(1) != b"\n"
            file.write(b"\n" + line if is_torn else line)
    except OSError as error:
        hint = f"{free_bytes(folder) / 1e6:,.1f} MB are free there."
        raise RunError(f"can't write {path}: {error.strerror}", hint=hint) from error
