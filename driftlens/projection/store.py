"""What a projection is, and how a run keeps it: coordinates as Parquet, the rest as JSON beside them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from driftlens.errors import RunError
from driftlens.files import write_json_atomic
from driftlens.projection.settings import Method, Settings
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


@dataclass(frozen=True)
class Projection:
    """One layout of a task's features at one layer.

    Attributes:
        settings: what was asked for.
        method: what was used; PCA where there are too few points for another, with a note that says so.
        frame: one row per point: task, variant ("expert" for the task's own), sample_id, label, x, y. A sample has one
            row per variant, in the same order.
        quality: one row per variant, taken from the features themselves: `mean_cosine` and `mean_drift` to the expert
            over all `n` samples; over the `n_shown` drawn ones `knn_overlap`, the mean share of a sample's
            `neighbours` nearest among the expert's features that are nearest among the variant's too, and
            `trustworthiness`, how few neighbours on the plane are none in feature space (1 is best). NaN with fewer
            than three samples.
        explained_variance: shares of variance along x and y, for PCA; None for the others, or without any variance.
        parameters: what the library was called with.
        versions: of the packages behind it.
        notes: what a reader must know: points left out, a method replaced, what a library warned of.
        digest: the content key; `projections/<digest>.parquet` in the run, once stored.
    """

    settings: Settings
    method: Method
    frame: pd.DataFrame
    quality: pd.DataFrame
    explained_variance: tuple[float, float] | None
    parameters: Mapping[str, Any]
    versions: Mapping[str, str | None]
    notes: tuple[str, ...]
    digest: str


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
        **{name: getattr(projection, name) for name in _AS_THEY_ARE},
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
    paths = sorted((run.path / _FOLDER).glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    wanted = {"settings": settings.as_dict(), "features": dict(features)}
    for path, record in [(path, _record(path)) for path in reversed(paths)]:
        if {name: record.get(name) for name in wanted} == wanted:
            return _read(path, record)
    return None


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
        x_and_y = record["explained_variance"]
        values = {name: record[name] for name in _AS_THEY_ARE} | {
            "explained_variance": None if x_and_y is None else (float(x_and_y[0]), float(x_and_y[1])),
            "notes": tuple(record["notes"]),
            "quality": pd.DataFrame(record["quality"]).astype(_QUALITY),
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}", hint=_VERIFY) from error
    frame = read_table(path.with_suffix(".parquet"), POINTS)
    return Projection(settings=settings, frame=frame, digest=path.stem, **values)


_AS_THEY_ARE = ("method", "parameters", "versions", "explained_variance", "notes")
_QUALITY = {
    **dict.fromkeys(("n", "n_shown", "neighbours"), "int64"),
    **dict.fromkeys(("mean_cosine", "mean_drift", "knn_overlap", "trustworthiness"), "float64"),
}
