"""Where a run stands, for whoever watches it from outside: `status.json`, and `events.jsonl`, what happened so far."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from driftlens.base.errors import Cancelled, DriftLensError, RunError
from driftlens.base.files import free_bytes, plain_file, write_json_atomic
from driftlens.runs.layout import EVENTS, STATUS
from driftlens.runs.lock import utc_now
from driftlens.runs.manifest import as_declared, as_plain
from driftlens.runs.tables import plain


def _with_zone(moment: str) -> str:
    if moment and datetime.fromisoformat(moment).tzinfo is None:
        raise ValueError("a time without a time zone")
    return moment


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
        if isinstance(error, DriftLensError):
            return cls(type(error).__name__, error.message, error.hint)
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True)
class Status:
    """What a run is doing, or how it ended: units of the phase done, of how many (None: unknown), for how many seconds.

    `metrics` are worth showing while waiting, None where not finite. `heartbeat` is when this was written, UTC, by the
    process `pid`; see `driftlens.runs.lock.process_started`.
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
    metrics = {name: plain(value) for name, value in status.metrics.items()}
    write_json_atomic(folder / STATUS, as_plain(replace(status, metrics=metrics)))


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
