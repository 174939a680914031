"""Where a run stands, for whoever watches it from outside: `status.json`, and `events.jsonl`, what happened so far."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from driftlens.base.errors import Cancelled, DriftLensError, RunError
from driftlens.base.files import free_bytes, from_json, plain_file, write_json_atomic
from driftlens.runs.layout import EVENTS, STATUS
from driftlens.runs.lock import utc_now
from driftlens.runs.tables import plain

State = Literal["queued", "running", "cancelling", "cancelled", "failed", "done"]


@dataclass(frozen=True)
class Failure:
    """Why a run ended early: the error's type, what happened, and what to do next."""

    type: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that `error` tells of."""
        if isinstance(error, DriftLensError):
            return cls(type(error).__name__, error.message, error.hint)
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        state: what it is doing, or how it ended.
        phase: what is being done.
        done: units of the phase finished.
        total: units in all, None when unknown.
        label: what is at hand.
        seconds: time since the phase began.
        metrics: numbers worth showing while waiting; None where one is not finite.
        heartbeat: when this was written, UTC.
        pid: process that wrote it.
        process_started: when that process began, as `driftlens.runs.lock.process_started` tells it.
        error: why it failed.
    """

    state: State
    phase: str = ""
    done: int = 0
    total: int | None = None
    label: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    heartbeat: str = ""
    pid: int = 0
    process_started: float | None = None
    error: Failure | None = None


_NUMBER = (int, float, type(None))
_SHAPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("state", "phase", "label", "heartbeat"), (str,)),
    **dict.fromkeys(("done", "pid"), (int,)),
    "total": (int, type(None)),
    "seconds": (int, float),
    "metrics": (dict,),
    "process_started": _NUMBER,
    "error": (dict, type(None)),
}
"""What may stand in status.json, by name."""


def write_status(folder: pathlib.Path, status: Status) -> None:
    """Replace the run's status.json, whole or not at all.

    Raises:
        RunError: the folder can't be written to, or the disk is full.
    """
    record = dataclasses.asdict(status)
    # JSON knows neither NaN nor infinity.
    record["metrics"] = {name: plain(value) for name, value in status.metrics.items()}
    write_json_atomic(folder / STATUS, record)


def read_status(folder: pathlib.Path) -> Status | None:
    """The run's status, or None when there is no status.json.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / STATUS
    try:
        return _parsed(from_json(plain_file(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise RunError(
            f"{path} can't be read: {error}", hint="Remove it; the results do not depend on it."
        ) from error


def _parsed(record: Any) -> Status:
    if not isinstance(record, dict):
        raise TypeError(f"expected an object, found {type(record).__name__}")
    values = {name: record[name] for name in _SHAPES if name in record}
    for name, value in values.items():
        _require_shape(name, value, _SHAPES[name])
    if values["state"] not in get_args(State):
        raise ValueError(f"no state is called {values['state']!r}")
    for name, value in values.get("metrics", {}).items():
        _require_shape(name, value, _NUMBER)
    if values.get("heartbeat") and datetime.fromisoformat(values["heartbeat"]).tzinfo is None:
        raise ValueError(f"heartbeat is {values['heartbeat']!r}, without a time zone")
    if values.get("error") is not None:
        values["error"] = Failure(**values["error"])
        for name, value in vars(values["error"]).items():
            _require_shape(name, value, (str,))
    return Status(**values)


def _require_shape(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds:  # exactly: True is no number
        raise TypeError(f"{name} is {value!r}")
    if isinstance(value, (int, float)) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}")


def final_state(error: BaseException) -> Literal["cancelled", "failed"]:
    """How a run ends that `error` ended."""
    return "cancelled" if isinstance(error, (Cancelled, KeyboardInterrupt)) else "failed"


def append_event(folder: pathlib.Path, event: str, **details: object) -> None:
    """Add one line to the run's events.jsonl.

    Raises:
        RunError: the file can't be written to.
    """
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
