"""What a folder says that must not depend on how often its commands were stopped: files, numbers, states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from safetensors import safe_open

STATED = (
    "tasks",
    "variants",
    "unfinished",
    "models",
    "rewriting",
    "sample_id_digests",
    "spec_digest",
    "warnings",
)
"""What of a manifest stays the same."""
MEASURED = ("seconds", "peak_rss_bytes", "energy_wh")
"""Columns that tell how long something took, or how much it needed."""


def essence(folder: Path) -> dict[str, Any]:
    """Every file below a folder by its relative path, without times; folders as None. Empty where there is none."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else _of_file(path)
        for path in sorted(folder.rglob("*"))
        if path.name != "run.lock.guard"  # may stay, and says nothing
    }


def _of_file(path: Path) -> Any:
    if path.name in BY_NAME:
        return BY_NAME[path.name](path)
    return BY_SUFFIX.get(path.suffix, Path.read_bytes)(path)


def _manifest(path: Path) -> Any:
    found = json.loads(path.read_text())
    phases = {name: phase["state"] for name, phase in found["phases"].items()}
    calibrations = {name: {**at, "seconds": None} for name, at in found["calibrations"].items()}
    return {name: found.get(name) for name in STATED} | {
        "phases": dict(sorted(phases.items())),
        "calibrations": {name: _timeless(at) for name, at in calibrations.items()},
        "files": sorted(found["files"]),
    }


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(at) for name, at in value.items() if name not in (*MEASURED, "created", "memory")}
    return value


def _table(path: Path) -> str:
    frame = pd.read_parquet(path).drop(columns=[*MEASURED], errors="ignore")
    keys = [name for name in frame if frame[name].dtype == object or str(frame[name].dtype) in ("str", "category")]
    return frame.sort_values([*map(str, keys)], kind="stable").to_json(
        orient="split", index=False, double_precision=15
    )


def _tensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def _card(path: Path) -> list[str]:
    told_once = ("| Time |", "- took over from ")
    return [line for line in path.read_text().splitlines() if not line.startswith(told_once)]


def _config(path: Path) -> Any:
    return _timeless(yaml.safe_load(path.read_text()))


def _state(path: Path) -> str:
    return str(json.loads(path.read_text())["state"])


BY_NAME: dict[str, Callable[[Path], Any]] = {
    "manifest.json": _manifest,
    "status.json": _state,
    "events.jsonl": lambda path: None,
    "resources.parquet": lambda path: None,
    "README.md": _card,
    "config.yaml": _config,
}
BY_SUFFIX: dict[str, Callable[[Path], Any]] = {".parquet": _table, ".safetensors": _tensors}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What two folders say otherwise, a line each."""
    missing = [f"missing: {name}" for name in wanted if name not in found]
    stray = [f"stray: {name}" for name in found if name not in wanted]
    changed = [name for name in wanted if name in found and found[name] != wanted[name]]
    return [*missing, *stray, *(f"changed: {name}{_where(found[name], wanted[name])}" for name in changed)]


def _where(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        one, other = ({f"line {number}": line for number, line in enumerate(at)} for at in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return "".join(
            f"\n    {name}: {str(one.get(name))[:300]} / {str(other.get(name))[:300]}"
            for name in {**one, **other}
            if one.get(name) != other.get(name)
        )
    return ""
