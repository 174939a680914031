"""Where a run stands and who writes to it, for whoever watches it: `status.json`, `events.jsonl`, `run.lock`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import psutil
import pydantic_core
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from driftlens.runs.layout import ENTRIES, EVENTS, GUARD, LOCK, STATUS
from driftlens.utils.errors import Cancelled, RunError, RunLockedError, from_library
from driftlens.utils.files import (
    PARTIAL,
    Guard,
    forget_undo,
    free_bytes,
    from_json,
    plain_file,
    sweep,
    undo_if_stopped,
    write_json_atomic,
)
from driftlens.utils.progress import ProgressEvent

_FRESH_SECONDS = 60.0
_STATUS_SECONDS = 0.5
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
    blocks nobody. The note it leaves in `run.lock` is what `acquire` returns; on a disk without locks it alone counts.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._guard = Guard(folder / GUARD)
        self._held: os.stat_result | None = None

    def acquire(self) -> Owner | None:
        """Take the lock; returns the owner that died holding it, if one did, whose scratch folders are removed."""
        _require_no_way_out(self._folder)
        undo_if_stopped(self, self.release)
        try:
            self._guard.acquire()
        except TimeoutError:
            forget_undo(self)
            if not (self._folder / GUARD).exists():
                self.require_own()
            raise _locked(self._folder, owner_of(self._folder)) from None
        except OSError as error:
            forget_undo(self)
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise RunError(
                f"can't write to {self._folder}: {error.strerror}",
                hint="Give another place with --out, or work on a copy of the run in a folder that you may write to.",
            ) from error
        try:
            self._held = (self._folder / GUARD).stat()
            previous = owner_of(self._folder)
            # The guard was free. Only where it can't be relied on (removed by hand, a disk without locks, a network
            # folder) is the owner that the note names alive nevertheless.
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
            forget_undo(self)
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
        owner = dataclasses.asdict(Owner.this_process())
        write_json_atomic(self._folder / LOCK, owner, is_lasting=False)  # the lock itself is the guard's

    @property
    def is_own(self) -> bool:
        """Whether the folder is still the one that was locked.

        The guard's file is open while it is held, so that a file which takes its place can't have its identity.
        """
        try:
            guard = (self._folder / GUARD).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._held is not None and os.path.samestat(guard, self._held)

    def require_own(self) -> None:
        """Refuse to go on in a folder that was removed, moved or replaced since it was locked: it would come back."""
        if not self.is_own:
            raise RunError(
                f"{self._folder} was removed, moved or replaced while it was being written to",
                hint="Nothing more was written there. Start again with a run that is in its place.",
            )

    def release(self) -> None:
        """Give the lock back and remove the note; does nothing when the lock is not held."""
        if self._guard.is_held:
            with contextlib.suppress(OSError):
                if self.is_own:
                    (self._folder / LOCK).unlink()
            self._guard.release()
        forget_undo(self)


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
    hint = "Wait until it has finished, or stop it, and try again."
    if (
        owner is not None and owner.host != platform.node()
    ):  # whose process can't be asked for, and clock may differ
        hint = (
            f"Wait until it has finished, or stop it there. Its last sign of life is of {owner.heartbeat}, by that "
            f"machine's clock; if nothing of it runs there any more, remove {folder / LOCK}."
        )
    return RunLockedError(
        f"{folder} is being written to by {owner or 'another process'}",
        hint=hint,
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


def _with_zone(moment: str) -> str:
    if moment and datetime.fromisoformat(moment).tzinfo is None:
        raise ValueError("a time without a time zone")
    return moment


T = TypeVar("T")
Moment = Annotated[str, AfterValidator(_with_zone)]
Whole = Annotated[int, Field(lt=2**63)]
State = Literal["queued", "running", "cancelling", "cancelled", "failed", "done"]


@dataclass(frozen=True)
class Failure:
    """Why a run ended early: the error's type, what happened, and what to do next."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    type: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that `error` tells of."""
        told = from_library(error)
        message, hint = (told.message, told.hint) if told is not None else (str(error), "")
        return cls(type(error).__name__, message, hint)


@dataclass(frozen=True)
class Status:
    """What a run is doing, or how it ended: units of the phase done, of how many (None: unknown), for how many seconds.

    `metrics` are worth showing while waiting, None where not finite. `heartbeat` is when this was written, UTC, by the
    process `pid`; see `process_started`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}

    state: State
    phase: str = ""
    done: Whole = 0
    total: Whole | None = None
    label: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    heartbeat: Moment = ""
    pid: Whole = 0
    process_started: float | None = None
    error: Failure | None = None


def write_status(folder: pathlib.Path, status: Status) -> None:
    """Replace the run's status.json, whole or not at all."""
    # JSON knows neither NaN nor infinity.
    from driftlens.runs.tables import plain  # pandas, which who merges doesn't need

    metrics = {name: plain(value) for name, value in status.metrics.items()}
    # Of a run under way there are hundreds, and no disk is waited for: without power nothing runs any more.
    is_lasting = status.state != "running"
    write_json_atomic(folder / STATUS, as_plain(replace(status, metrics=metrics)), is_lasting=is_lasting)


class StatusBoard:
    """Says where a run stands in its status.json, and renews the heartbeat of its lock."""

    def __init__(self, folder: pathlib.Path, lock: RunLock) -> None:
        self.status = Status("running")
        self.clock: Callable[[], float] = time.monotonic
        self._folder, self._lock = folder, lock
        self._posted = float("-inf")

    def post(self, state: State, **fields: Any) -> None:
        """Say where the run stands; see `Status` for the other fields."""
        owner = Owner.this_process()
        about = {"heartbeat": owner.heartbeat, "pid": owner.pid, "process_started": owner.process_started}
        self.status = Status(state, **fields, **about)  # type: ignore[arg-type]
        self._lock.beat()
        self._lock.require_own()  # the folder may have gone while the heartbeat was written
        write_status(self._folder, self.status)
        self._posted = self.clock()

    def progress(self, event: ProgressEvent) -> None:
        """Show an event, at most twice a second within a phase; this is a progress sink."""
        self._lock.require_own()
        is_news = event.phase != self.status.phase or event.done == event.total
        if is_news or self.clock() - self._posted >= _STATUS_SECONDS:
            self.post(self.status.state, **vars(event))


def read_status(folder: pathlib.Path) -> Status | None:
    """The run's status, or None when there is no status.json."""
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
    """How a run ends that `error` ended."""
    return "cancelled" if isinstance(error, (Cancelled, KeyboardInterrupt)) else "failed"


def append_event(folder: pathlib.Path, event: str, **details: object) -> None:
    """Add one line to the run's events.jsonl."""
    path = folder / EVENTS
    line = json.dumps({"time": utc_now(), "event": event, **details}, ensure_ascii=False).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            # A writer that was killed may have left half a line; it should spoil no other.
            is_torn = size > 0 and file.read(1) != b"\n"
            file.write(b"\n" + line if is_torn else line)
    except OSError as error:
        hint = f"{free_bytes(folder) / 1e6:,.1f} MB are free there."
        raise RunError(f"can't write {path}: {error.strerror}", hint=hint) from error


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""Made when they are first needed: to make one takes longer than to read a manifest."""


def _adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def as_declared(kind: type[T], text: bytes) -> T:
    """The dataclass that JSON spells; keys that it doesn't have are passed over. True is no number, and 1 no text.

    Else a ValueError says what is missing or of another kind, what came and what was expected; NaN is no JSON.
    """
    # Else fields of any form take numbers that can't be written again.
    pydantic_core.from_json(text, allow_inf_nan=False)
    try:
        declared: T = _adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = "expected an object" if first["type"] == "dataclass_type" else first["msg"]
        came = f"{said[:1].lower()}{said[1:]}, got {first['input']!r:.80}"
        raise ValueError(": ".join([*filter(None, [".".join(map(str, first["loc"]))]), came])) from None
    return declared


def as_plain(record: object) -> dict[str, Any]:
    """A dataclass as JSON has it."""
    return dict(_adapter_of(type(record)).dump_python(record, mode="json"))
