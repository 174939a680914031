"""Projections in a run directory: coordinates as Parquet, the rest as JSON beside them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from driftlens.errors import RunError
from driftlens.files import write_json_atomic
from driftlens.projection.result import Projection
from driftlens.projection.settings import Settings
from driftlens.records.contents import attach
from driftlens.records.run import DriftRun
from driftlens.records.schema import LABEL, SAMPLE_ID, TASK, VARIANT, Column, Table
from driftlens.records.tables import append_rows, plain_rows, read_table

_FOLDER = "projections"
_FORMAT = 1
POINTS = Table(
    "projection",
    ("task", "variant", "sample_id"),
    (
        TASK,
        VARIANT,
        SAMPLE_ID,
        LABEL,
        Column("x", "float", "1", "First coordinate; distances are indicative only."),
        Column("y", "float", "1", "Second coordinate."),
    ),
)
_VERIFY = "Remove the file: the projection is then computed anew. `driftlens verify` lists damaged files."


def write(run: DriftRun, projection: Projection, features: Mapping[str, str]) -> None:
    """Add a projection to its run.

    Args:
        run: the run.
        projection: what to keep.
        features: digest of the features of every role.

    Raises:
        RunError: the run can't be written to.
        RunLockedError: another process is writing to it.
    """
    base = f"{_FOLDER}/{projection.digest}"
    record = {
        "format": _FORMAT,
        "settings": projection.settings.as_dict(),
        "features": dict(features),
        "method": projection.method,
        "parameters": dict(projection.parameters),
        "versions": dict(projection.versions),
        "explained_variance": projection.explained_variance,
        "notes": list(projection.notes),
        "quality": plain_rows(projection.quality),
    }
    with attach(run.path, f"{base}.parquet") as path:
        append_rows(path, POINTS, projection.frame)
    # Last: what describes the coordinates is there only when they are.
    with attach(run.path, f"{base}.json") as path:
        write_json_atomic(path, record)


def read(run: DriftRun, digest: str) -> Projection | None:
    """The projection with a content key, or None where the run has none.

    Raises:
        RunError: its files are damaged.
        SchemaTooNewError: a newer DriftLens wrote it.
    """
    path = run.path / _FOLDER / f"{digest}.json"
    return _read(path, _record(path)) if path.exists() else None


def read_like(run: DriftRun, settings: Settings, features: Mapping[str, str]) -> Projection | None:
    """The newest projection of these features with these settings, whichever library versions made it.

    Raises:
        RunError: a file is damaged.
        SchemaTooNewError: a newer DriftLens wrote it.
    """
    alike = [
        (path.stat().st_mtime_ns, path, record)
        for path, record in _records(run)
        if record.get("settings") == settings.as_dict() and record.get("features") == dict(features)
    ]
    if not alike:
        return None
    _, path, record = max(alike, key=lambda entry: (entry[0], entry[1].name))
    return _read(path, record)


def _records(run: DriftRun) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
    for path in sorted((run.path / _FOLDER).glob("*.json")):
        yield path, _record(path)


def _record(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read: {error}", hint=_VERIFY) from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise RunError(f"{path} is no description of a projection that this DriftLens knows", hint=_VERIFY)
    return record


def _read(path: pathlib.Path, record: dict[str, Any]) -> Projection:
    try:
        settings = Settings(**{**record["settings"], "variants": tuple(record["settings"]["variants"])})
        variance = record["explained_variance"]
        projection = Projection(
            settings=settings,
            method=record["method"],
            frame=pd.DataFrame(),
            quality=pd.DataFrame(record["quality"]).astype(_QUALITY),
            explained_variance=None if variance is None else (float(variance[0]), float(variance[1])),
            parameters=record["parameters"],
            versions=record["versions"],
            notes=tuple(record["notes"]),
            digest=path.stem,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}", hint=_VERIFY) from error
    return dataclasses.replace(projection, frame=read_table(path.with_suffix(".parquet"), POINTS))


_QUALITY = {
    **dict.fromkeys(("n", "n_shown", "neighbours"), "int64"),
    **dict.fromkeys(("mean_cosine", "mean_drift", "knn_overlap", "trustworthiness"), "float64"),
}
