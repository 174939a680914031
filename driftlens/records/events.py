"""What happened to a run, one JSON object per line, in the order in which it happened."""

from __future__ import annotations

import json
import pathlib

from driftlens.errors import RunError
from driftlens.files import free_bytes
from driftlens.records.layout import EVENTS
from driftlens.records.lock import utc_now


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
