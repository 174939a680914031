"""Text tasks: one JSON object per line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.base.files import from_json, plain_file
from driftlens.data.sources import PATHS_HINT, Split, SplitView, data_sources, refused
from driftlens.data.text_rows import text_view

if TYPE_CHECKING:
    from driftlens.spec.data import JsonlData


@data_sources.register("jsonl")
def open_jsonl(entry: JsonlData, split: Split, access: Access) -> SplitView:
    """The rows of a split's file; ids are line numbers, counted from 1. Blank lines are skipped."""
    file = Path(getattr(entry, split))
    rows = {
        str(number): _row(line, f"{file}, line {number}")
        for number, line in enumerate(_lines(file), start=1)
        if line.strip()
    }
    if not rows:
        raise DataError(
            f"{file}: no rows", hint='Write one JSON object per line, such as {"input": ..., "target": ...}.'
        )
    ids, values = list(rows), list(rows.values())
    keys = dict.fromkeys(key for row in values for key in row)
    origin = str(file.resolve())
    return text_view(entry, split, ids, keys, values.__getitem__, where=str(file), origin=origin, unit="line")


def _lines(file: Path) -> list[str]:
    not_text = refused(f"{file}: not UTF-8 text", "Save the file as UTF-8.", UnicodeDecodeError)
    with refused(f"{file}: can't be read", PATHS_HINT, OSError), not_text:
        # Only \n ends a line: other separators may stand unescaped inside a JSON string.
        return plain_file(file).read_text(encoding="utf-8-sig").split("\n")


def _row(line: str, where: str) -> dict[str, Any]:
    with refused(f"{where}: not JSON", "Write one JSON object per line.", ValueError):
        row = from_json(line)
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a {type(row).__name__}, expected an object",
            hint='Write {"input": ..., "target": ...}.',
        )
    return row
