"""Text tasks: one JSON object per line, with an input and a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from driftlens.access import Access
from driftlens.data.sources import PATHS_HINT, Split, SplitView, data_sources, refused
from driftlens.errors import DataError

if TYPE_CHECKING:
    from driftlens.spec.data import JsonlData


@data_sources.register("jsonl")
def open_jsonl(entry: JsonlData, split: Split, access: Access) -> SplitView:
    """The rows of a split's file; ids are line numbers, counted from 1. Blank lines are skipped.

    Raises:
        DataError: the file can't be read, a line is no JSON object, or lacks one of the two texts.
    """
    file = Path(getattr(entry, split))
    rows = [
        (str(number), _row(line, entry, f"{file}, line {number}"))
        for number, line in enumerate(_lines(file), start=1)
        if line.strip()
    ]
    if not rows:
        raise DataError(
            f"{file}: no rows", hint='Write one JSON object per line, such as {"input": ..., "target": ...}.'
        )
    return SplitView(
        origin=str(file.resolve()),
        ids=tuple(number for number, _ in rows),
        class_names=None,
        label=lambda position: rows[position][1][1] if entry.classes else None,
        read=lambda position: rows[position][1],
        holds="text",
    )


def _lines(file: Path) -> list[str]:
    not_text = refused(f"{file}: not UTF-8 text", "Save the file as UTF-8.", UnicodeDecodeError)
    with refused(f"{file}: can't be read", PATHS_HINT, OSError), not_text:
        # Only \n ends a line: other separators may stand unescaped inside a JSON string.
        return file.read_text(encoding="utf-8-sig").split("\n")


def _row(line: str, entry: JsonlData, where: str) -> tuple[str, str]:
    with refused(f"{where}: not JSON", "Write one JSON object per line.", json.JSONDecodeError):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a {type(row).__name__}, expected an object",
            hint='Write {"input": ..., "target": ...}.',
        )
    return _text(row, entry.input, "input", where), _text(row, entry.target, "target", where)


def _text(row: dict[str, object], key: str, role: str, where: str) -> str:
    value = row.get(key)
    if isinstance(value, str):
        return value
    found = (
        f"{key!r} is {value!r}, expected text"
        if key in row
        else f"no key {key!r}; there are {', '.join(row)}"
    )
    raise DataError(f"{where}: {found}", hint=f"Name the key that holds it as `{role}: KEY`.")
