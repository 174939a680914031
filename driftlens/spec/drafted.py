"""What a spec would say of data that lie on disk, by the names of files and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driftlens.base.files import entries

ROWS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "table", ".tsv": "table", ".parquet": "table"}
"""By the ending of a file, the kind of data that it holds."""
SPLITS = (("train", "calibration"), ("test", "val", "validation"))
"""What people call the samples to calibrate on and those to measure on."""


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
