"""What a job told: its text, its last progress, the error it ended with, and the drift of each layer it calibrated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from driftlens.progress import ProgressEvent
from driftlens.records.layout import EVENTS
from driftlens.records.status import Failure
from driftlens_app.jobs.record import Job
from driftlens_app.settings import is_file_inside

_EVENT = TypeAdapter(ProgressEvent)
_TAIL_BYTES, _EVENT_BYTES = 65_536, 1_000_000


def log_text(log: Path) -> str:
    """The end of the log without its progress lines, for reading; empty where there is none yet."""
    return "\n".join(_said(line) for line in _lines(log) if _progress(line) is None)


def last_progress(log: Path) -> ProgressEvent | None:
    """The newest progress event in the log, or None."""
    found = [event for line in _lines(log) if (event := _progress(line)) is not None]
    try:
        return _EVENT.validate_python({**found[-1], "metrics": {}}) if found else None
    except ValueError:
        return None


def logged_failure(log: Path) -> Failure | None:
    """The error that the command line ended with, or None."""
    return told_failure(log_text(log))


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


def running_drift(job: Job) -> dict[int, float]:
    """Mean drift at the boundary behind each layer that the job has calibrated, by layer index."""
    found: dict[int, float] = {}
    for event in map(_object, _end(job.run / EVENTS, _EVENT_BYTES)[0]):
        if event is None or str(event.get("time", "")) < job.started:
            continue  # half a line, left for the next look, or an earlier job's
        numbers = event.get("metrics", event)
        layer, drift = numbers.get("layer"), numbers.get("drift_l2_mean")
        if isinstance(layer, int | float) and isinstance(drift, int | float):
            found[int(layer)] = float(drift)
    return dict(sorted(found.items()))


def _lines(log: Path) -> Iterator[str]:
    """Whole lines from the end of the file, at most as much as a page can show."""
    if is_file_inside(log):
        lines, is_whole = _end(log, _TAIL_BYTES)
        yield from lines if is_whole else lines[1:]


def _said(line: str) -> str:
    """What a line says to a person; beside progress as JSON, remarks are JSON too."""
    remark = _object(line) if line.startswith('{"event": "log"') else None
    return line if remark is None else str(remark.get("message", ""))


def _progress(line: str) -> dict[str, Any] | None:
    return _object(line) if line.startswith('{"event": "progress"') else None


def _object(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # half a line: the job is writing it
        return None
    return event if isinstance(event, dict) else None


def _end(file: Path, most: int) -> tuple[list[str], bool]:
    """The lines in the last bytes of a file, and whether that is all of it; none where it can't be read."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - most))
            return opened.read().decode("utf-8", errors="replace").splitlines(), size <= most
    except OSError:
        return [], True
