"""The suite's folder: where each file lies, and whether the folder is whole."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from driftlens.files import sha256_of

CONFIG, BASE, RECORD = "open_clip_config.json", "base.safetensors", "suite.json"
FORMAT = 1
"""Version of the layout and of the record."""


def expert_file(task: str) -> str:
    """Where the expert's image tower lies in the folder."""
    return f"experts/{task}.safetensors"


def data_file(task: str) -> str:
    """Where the pictures of a task lie in the folder."""
    return f"data/{task}.npz"


def file_digests(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file in the folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """What `suite.json` says.

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: it holds no JSON object.
    """
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{folder / RECORD} holds no JSON object")
    return record


def what_is_wrong(folder: pathlib.Path, digest: str) -> str | None:
    """Why the folder is not the whole suite called `digest`, in words; None when it is.

    Every file is read: it takes well under a second, and a suite with a damaged file would give wrong numbers.
    """
    try:
        record = read_record(folder)
        if record["format"] != FORMAT or record["digest"] != digest:
            return f"{RECORD} is of another suite"
        for name, stated in record["files"].items():
            path = folder / name
            if path.stat().st_size != stated["bytes"] or sha256_of(path) != stated["sha256"]:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{pathlib.Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it can't be read: {error}"
    return None
