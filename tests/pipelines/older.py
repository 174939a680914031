"""What readers are told of a run: every value of its tables, and what commands say in JSON, but for prose.

Only names from outside are used, so that an earlier version can note the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import driftlens as dl
from driftlens.cli import main

Said = dict[str, Any]
TABLES = (
    *("layers", "samples", "outputs", "adjoint", "params", "accuracy", "scores"),
    *("calibration", "sweeps", "resources"),
)
COMMANDS = ("show", "check", "compare")


def told(run: str) -> Said:
    """All that is told of a run, by where it stands; `run` is relative, so that no folder is part of it."""
    opened = dl.open_run(run)
    said: Said = {f"table {name}": columns(getattr(opened, name)()) for name in TABLES}
    for name in opened.manifest.calibrations:
        said[f"before and after {name}"] = columns(opened.before_after(name))
    for task in opened.tasks:
        said[f"samples of {task}"] = list(opened.sample_ids(task))
        if Path(run, "projections").is_dir():
            said[f"layout of {task}"] = columns(dl.project(opened, task, method="pca").frame)
    for command in COMMANDS:
        code, out = printed(command, run, "--json")
        said[f"code of {command}"] = code
        said |= {f"{command} {place}": value for place, value in leaves(json.loads(out or "null"))}
    return said


def listed(folder: str = ".") -> Said:
    """What is told of a folder of runs."""
    _, out = printed("ls", folder, "--json")
    return {place: value for entry in json.loads(out) for place, value in leaves(entry, entry["path"])}


def printed(*arguments: str) -> tuple[int, str]:
    """Exit code of a command and what it prints."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main(list(arguments))
    except SystemExit as left:
        return int(left.code or 0), out.getvalue()
    return 0, out.getvalue()


def columns(frame: pd.DataFrame) -> Said:
    """Number of rows, and a digest of the exact values of every column."""
    values = {str(name): [plain(value) for value in frame[name].tolist()] for name in frame}
    return {"rows": len(frame)} | {
        name: hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:12] for name, cells in values.items()
    }


def plain(value: Any) -> Any:
    """A cell as JSON has it; missing is None, whatever stands for it."""
    return None if pd.api.types.is_scalar(value) and pd.isna(value) else value


def leaves(document: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers, yes and no, and names of a document, by place; sentences are nobody's contract."""
    if isinstance(document, dict | list):
        entries = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in entries:
            yield from leaves(value, f"{place}/{key}" if place else str(key))
    elif not isinstance(document, str) or not any(map(str.isspace, document)):
        yield place, document
