"""A user's tags and note on a run, stored next to the manifest. Entry points: `read_notes`, `write_notes`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from driftlens.runs.manifest import NOTES
from driftlens.utils.errors import RunError
from driftlens.utils.files import read_json_object, write_json_atomic

# Characters of a tag and of a note; a folder may come from someone else.
LONGEST_TAG, LONGEST_NOTE = 40, 10_000
_MAX_BYTES = 100_000


@dataclass(frozen=True)
class RunNotes:
    """The tags of a run, in their order, and a note in plain text."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(run: pathlib.Path) -> RunNotes:
    """Return the tags and the note of a run; none if it has none, or if the file is damaged."""
    file = run / NOTES
    if not file.is_file() or file.stat().st_size > _MAX_BYTES:
        return RunNotes()
    stored = read_json_object(run, NOTES)
    tags = stored.get("tags")
    return _shortened(tags if isinstance(tags, list) else (), stored.get("note", ""))


def write_notes(run: pathlib.Path, tags: Iterable[str], note: str) -> None:
    """Store the tags and the note of a run; results and manifest stay as they are.

    Args:
        run: the run directory.
        tags: words to find the run by; empty ones and repetitions are left out.
        note: plain text.

    Raises:
        RunError: there is no such run, or its folder can't be written.
    """
    if not run.is_dir():
        raise RunError(f"there is no run in {run}", hint="Choose another one.")
    write_json_atomic(run / NOTES, asdict(_shortened(tags, note)))


def _shortened(tags: Iterable[object], note: object) -> RunNotes:
    cleaned = (" ".join(str(tag).split())[:LONGEST_TAG] for tag in tags)
    return RunNotes(tuple(dict.fromkeys(filter(None, cleaned))), str(note).strip()[:LONGEST_NOTE])
