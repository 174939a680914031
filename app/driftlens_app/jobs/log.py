"""What a job printed: its text, its last progress, and the error it ended with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from driftlens.records.status import Failure
from driftlens_app.inside import is_file_inside

_TAIL_BYTES = 65_536


def log_text(log: Path) -> str:
    """The end of the log without its progress lines, for reading; empty where there is none yet."""
    return "\n".join(line for line in _lines(log) if _progress(line) is None)


def last_progress(log: Path) -> dict[str, Any] | None:
    """The newest progress event in the log, or None."""
    found = [event for line in _lines(log) if (event := _progress(line)) is not None]
    return found[-1] if found else None


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


def _lines(log: Path) -> Iterator[str]:
    """Whole lines from the end of the file, at most as much as a page can show."""
    if not is_file_inside(log):
        return
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return
    lines = text.splitlines()
    yield from lines[1:] if size > _TAIL_BYTES else lines


def _progress(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"event": "progress"'):
        return None
    try:
        event = json.loads(line)
    except ValueError:  # half a line: the job is writing it
        return None
    return event if isinstance(event, dict) else None
