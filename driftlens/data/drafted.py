"""What a spec would say of data that lie on disk: of which kind they are, and in which columns texts stand."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from driftlens.base.errors import SpecError
from driftlens.base.files import entries, from_json, plain_file
from driftlens.data.images import SUFFIXES
from driftlens.data.library import column_names

ROWS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "table", ".tsv": "table", ".parquet": "table"}
"""By the ending of a file, the kind of data that it holds."""
SPLITS = (("train", "calibration"), ("test", "val", "validation"))
"""What people call the samples to calibrate on and those to measure on."""

_TEXTS = ("input", "text", "prompt", "question", "instruction", "sentence", "query", "content")
_ANSWERS = ("target", "label", "answer", "output", "response", "completion")


def data_entry(place: Path, *, reads: str) -> dict[str, str]:
    """What a spec says of the data at a place, for a model that `reads` text or image.

    One file, or one folder of images, serves all splits: drawing keeps their samples apart.

    Raises:
        SpecError: there is nothing, or nothing that is known.
    """
    if not place.exists():
        raise SpecError(f"--data: there is no file or folder {place}", hint="Check the path.")
    path = str(place.resolve())
    entry = split_entry(place, path)
    if entry is None and place.is_file() and place.suffix.lower() in ROWS:
        entry = {"kind": ROWS[place.suffix.lower()], "calibration": path, "test": path}
    if entry is None and place.is_dir() and _holds_images(place):
        entry = {"kind": "imagefolder", "calibration": path, "test": path}
    if entry is None:
        raise SpecError(
            f"--data: {place} is no data of a kind that is told by its name",
            hint=f"Give a file ({', '.join(ROWS)}), a folder of images (a sub-folder a class, or none), or a folder "
            "with train and test inside; for other kinds write a spec: `driftlens init`, then docs/data.md.",
        )
    is_rows = entry["kind"] in ("jsonl", "table", "hf")
    return {**entry, **_columns(place, entry)} if reads == "text" and is_rows else entry


def _columns(place: Path, entry: dict[str, str]) -> dict[str, str]:
    """The columns of texts and of answers, by what people call them."""
    file = Path(entry.get("test", ""))
    if entry["kind"] == "hf":
        file = place / entry["test"] / "dataset_info.json"
    names = columns_of(file)
    if not names:  # an empty or broken file, which its reader tells best
        return {"input": _TEXTS[0]}
    text = next((name for name in _TEXTS if name in names), None)
    if text is None:
        raise SpecError(
            f"--data: none of the columns of {place} has a name that texts usually have; there are {', '.join(names)}",
            hint=f"Call the one with the texts `input`; known are {', '.join(_TEXTS)}.",
        )
    answer = next((name for name in _ANSWERS if name in names), None)
    return {"input": text} | ({"target": answer} if answer else {})


def columns_of(file: Path) -> Sequence[str]:
    """Names of columns, or keys of the first row; none where the file can't be read, which is told when it is."""
    with suppress(OSError, ValueError, AttributeError, csv.Error):
        if file.name == "dataset_info.json":
            return [*from_json(plain_file(file).read_bytes())["features"]]
        return column_names(file)
    return []


def _holds_images(folder: Path) -> bool:
    """Whether there are images in a folder, or in one of its folders."""

    def some(places: Collection[Path]) -> bool:
        return any(place.suffix.lower() in SUFFIXES for place in places)

    inside = entries(folder)
    return some(inside) or any(some(entries(place)) for place in inside if place.is_dir())


def split_entry(place: Path, name: str) -> dict[str, str] | None:
    """What a spec says of a folder with splits, or of an archive of arrays, called `name`; None of anything else."""
    if place.suffix.lower() == ".npz":
        return {"kind": "npz", "file": name}
    splits = [_split(place, names) for names in SPLITS]
    if not place.is_dir() or None in splits:
        return None
    if (place / "dataset_dict.json").is_file():
        return {"kind": "hf", "path": name, "calibration": splits[0].name, "test": splits[1].name}
    kinds = {"imagefolder" if split.is_dir() else ROWS.get(split.suffix.lower(), "") for split in splits}
    kind = kinds.pop()
    if kinds or not kind:
        return None
    return {
        "kind": kind,
        **{key: f"{name}/{path.name}" for key, path in zip(("calibration", "test"), splits, strict=True)},
    }


def _split(folder: Path, names: Sequence[str]) -> Any:
    """The first entry of a folder that is called so, whatever its ending; None without."""
    there = {entry.stem.lower(): entry for entry in sorted(entries(folder), reverse=True)}
    return next((there[name] for name in names if name in there), None)
