"""Spec entries inferred from the names of files, folders and columns."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from driftlens.data.rows import column_names
from driftlens.data.sources import SUFFIXES
from driftlens.utils.errors import SpecError
from driftlens.utils.files import list_folder

# Kinds of data by file extension.
_ROWS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "table", ".tsv": "table", ".parquet": "table"}
# Common names of the splits for calibration and measurement.
_SPLITS = (("train", "calibration"), ("test", "val", "validation"))

_TEXTS = ("input", "text", "prompt", "question", "instruction", "sentence", "query", "content")
_ANSWERS = ("target", "label", "answer", "output", "response", "completion")


def infer_data_entry(place: Path, *, reads: str) -> dict[str, str]:
    """Infer the spec entry for data at a path, for a model whose modality `reads` is text or image.

    One file, or one folder of images, serves all splits; sampling keeps them disjoint.
    """
    if not place.exists():
        raise SpecError(f"--data: no file or folder {place}", hint="Check the path.")
    path = str(place.resolve())
    entry = _infer_split_entry(place, path)
    if entry is None and place.is_file() and place.suffix.lower() in _ROWS:
        entry = {"kind": _ROWS[place.suffix.lower()], "calibration": path, "test": path}
    files = (file for pattern in ("*", "*/*") for file in place.glob(pattern))
    if entry is None and place.is_dir() and any(file.suffix.lower() in SUFFIXES for file in files):
        entry = {"kind": "imagefolder", "calibration": path, "test": path}
    if entry is None:
        raise SpecError(
            f"--data: unrecognized data format of {place}",
            hint=f"Give a file ({', '.join(_ROWS)}), an image folder, or a folder with train and test. For other "
            "kinds write a spec: `driftlens init`, docs/data.md.",
        )
    is_rows = entry["kind"] in ("jsonl", "table")
    return {**entry, **_infer_text_columns(place, entry)} if reads == "text" and is_rows else entry


def _infer_text_columns(place: Path, entry: dict[str, str]) -> dict[str, str]:
    """Find the columns of questions and answers by common column names."""
    names: list[str] = []
    # The reader of the file reports that it is empty or broken.
    with suppress(OSError, ValueError, AttributeError, LookupError, csv.Error):
        names = column_names(Path(entry["test"]))
    if not names:
        return {"input": _TEXTS[0]}
    text = next((name for name in _TEXTS if name in names), None)
    if text is None:
        raise SpecError(
            f"--data: no text column found in {place}; its columns are {', '.join(names)}",
            hint=f"Rename the text column to one of {', '.join(_TEXTS)}.",
        )
    answer = next((name for name in _ANSWERS if name in names), None)
    return {"input": text} | ({"target": answer} if answer else {})


def _infer_split_entry(place: Path, name: str) -> dict[str, str] | None:
    """Infer the entry of a folder with train and test splits, or of an `.npz` file, at a path; None for others."""
    if place.suffix.lower() == ".npz":
        return {"kind": "npz", "file": name}
    splits = [_find_split(place, names) for names in _SPLITS]
    if not place.is_dir() or None in splits:
        return None
    kinds = {"imagefolder" if split.is_dir() else _ROWS.get(split.suffix.lower(), "") for split in splits}
    kind = kinds.pop()
    if kinds or not kind:
        return None
    return {
        "kind": kind,
        **{key: f"{name}/{path.name}" for key, path in zip(("calibration", "test"), splits, strict=True)},
    }


def _find_split(folder: Path, names: Sequence[str]) -> Any:
    """Return the first file or folder in a folder with one of these names, ignoring extensions; None without."""
    there = {entry.stem.lower(): entry for entry in sorted(list_folder(folder), reverse=True)}
    return next((there[name] for name in names if name in there), None)
