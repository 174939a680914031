"""Features of a saved run on a plane: expert, merged and calibrated in one layout, with what the layout loses.

A layout is fitted once per task on all of them together, so that distances between panels mean the same, and stored in
the run: the coordinates are what is kept, not the seed that a library may one day treat otherwise. Distances on the
plane are indicative only; every quality number comes from the features themselves.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from driftlens.config.requests import ProjectionRequest
from driftlens.results.projection.layouts import (
    METHODS,
    PARAMETERS,
    Method,
    Settings,
    lay_out,
    load_points,
    quality,
    settings_of,
)
from driftlens.runs import layout
from driftlens.runs.manifest import version_of
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import LABEL, SAMPLE_ID, TASK, VARIANT, Column, Table
from driftlens.runs.tables import append_rows, conform, plain_rows, read_table
from driftlens.runs.writer import attach
from driftlens.utils.errors import RunError
from driftlens.utils.files import PathLike, from_json, plain_file, sha256_of, write_json_atomic
from driftlens.utils.progress import CancelToken, ProgressSink, Reporter

__all__ = ["METHODS", "Method", "Projection", "project", "stored_projection"]

_STEPS = ("reading features", "laying out", "comparing neighbours")
_LIBRARIES: Mapping[Method, Sequence[str]] = {
    "pca": ("numpy", "scikit-learn"),
    "umap": ("numpy", "scikit-learn", "umap-learn", "pynndescent", "numba"),
    "tsne": ("numpy", "scipy", "scikit-learn"),
}

_FOLDER = "projections"
_FORMAT = 1
_POINTS = Table(
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
_VERIFY = "Remove the file: the projection is then computed anew. `driftlens check` lists damaged files."
_AS_THEY_ARE = ("method", "parameters", "versions", "explained_variance", "notes")
_QUALITY = {
    **dict.fromkeys(("n", "n_shown", "neighbours"), "int64"),
    **dict.fromkeys(("mean_cosine", "mean_drift", "knn_overlap", "trustworthiness"), "float64"),
}


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
    frame: pd.DataFrame = field(repr=False)
    quality: pd.DataFrame = field(repr=False)
    explained_variance: tuple[float, float] | None
    parameters: Mapping[str, Any]
    versions: Mapping[str, str | None]
    notes: tuple[str, ...]
    digest: str


def project(
    run: DriftRun | PathLike,
    task: str,
    request: ProjectionRequest = ProjectionRequest(),
    *,
    store_it: bool = True,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> Projection:
    """One joint layout of the expert's and the variants' features; coordinates that the run has are read, not redone.

    Features are brought to norm 1; for UMAP and t-SNE they are then reduced to 50 dimensions by PCA. Equal features
    share their place. With fewer than 15 distinct points, or without umap-learn, PCA is drawn instead and a note
    says so. Errors are those of `driftlens.project`.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    settings = settings_of(opened, task, request)
    features, versions = _feature_digests(opened, settings), _versions(settings)
    digest = _content_key(settings, features, versions)
    reporter = Reporter(on_progress, cancel)

    def enter(number: int) -> None:
        doing = f": {_STEPS[number]}" if number < len(_STEPS) else ""
        reporter.step("layout", number, len(_STEPS), f"{settings.method} of {task}{doing}")

    projection = _stored(opened, digest)
    if projection is None:
        enter(0)
        points = load_points(opened, settings)
        rows = np.concatenate([points.directions[role] for role in settings.roles])
        enter(1)
        plane, how = lay_out(rows, settings.method, settings.seed)
        enter(2)
        places = dict(zip(settings.roles, np.split(plane, len(settings.roles)), strict=True))
        how["notes"] = (*points.notes, *how["notes"])
        columns = {
            "task": settings.task,
            "variant": np.repeat(settings.roles, len(points.sample_ids)),
            "sample_id": [*points.sample_ids] * len(settings.roles),
            "label": [*points.labels] * len(settings.roles),
            **{"x": plane[:, 0], "y": plane[:, 1]},
        }
        frame = conform(pd.DataFrame(columns), _POINTS)
        fits = quality(points, places)
        projection = Projection(
            settings=settings, frame=frame, quality=fits, versions=versions, digest=digest, **how
        )
        if store_it:
            _write(opened, projection, features)
    enter(len(_STEPS))
    return projection


def stored_projection(
    run: DriftRun | PathLike, task: str, request: ProjectionRequest = ProjectionRequest()
) -> Projection | None:
    """The layout that `project` stored, for viewers that must not compute; None where there is none.

    One made by other versions of the libraries is as good: its coordinates are what was stored. Arguments and errors as
    for `project`; nothing is computed, imported for computing, or written.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    settings = settings_of(opened, task, request)
    features = _feature_digests(opened, settings)
    digest = _content_key(settings, features, _versions(settings))
    return _stored(opened, digest) or _stored_like(opened, settings, features)


def looked_at(run: DriftRun, task: str, request: ProjectionRequest = ProjectionRequest()) -> Projection:
    """The layout that is stored, or else one that is computed and not stored: looking never changes a run."""
    return stored_projection(run, task, request) or project(run, task, request, store_it=False)


def _feature_digests(run: DriftRun, settings: Settings) -> dict[str, str]:
    """SHA-256 of the features of every role, which decide a layout."""
    digests = {}
    for role in settings.roles:
        run.features(settings.task, role, settings.layer)  # says what is missing
        relative = layout.feature_file(settings.task, role, settings.layer)
        listed = run.manifest.files.get(relative)
        digests[role] = listed.sha256 if listed else sha256_of(run.path / relative)
    return digests


def _versions(settings: Settings) -> dict[str, str | None]:
    """Of the packages that make a layout; None for one that is not installed."""
    return {name: version_of(name) for name in _LIBRARIES[settings.method]}


def _content_key(settings: Settings, features: Mapping[str, str], versions: Mapping[str, str | None]) -> str:
    """A name for the layout that these features, settings and libraries give, in hexadecimal."""
    parts = {"settings": settings.as_dict(), "parameters": PARAMETERS[settings.method]}
    parts |= {"features": features, "versions": versions}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _write(run: DriftRun, projection: Projection, features: Mapping[str, str]) -> None:
    base = f"{_FOLDER}/{projection.digest}"
    record = {
        "format": _FORMAT,
        "settings": projection.settings.as_dict(),
        "features": dict(features),
        **{name: getattr(projection, name) for name in _AS_THEY_ARE},
        "quality": plain_rows(projection.quality),
    }
    with attach(run.path, f"{base}.parquet") as path:
        append_rows(path, _POINTS, projection.frame)
    # Last: what describes the coordinates is there only when they are.
    with attach(run.path, f"{base}.json") as path:
        write_json_atomic(path, record)


def _stored(run: DriftRun, digest: str) -> Projection | None:
    path = run.path / _FOLDER / f"{digest}.json"
    return _read(path, _record(path)) if path.exists() else None


def _stored_like(run: DriftRun, settings: Settings, features: Mapping[str, str]) -> Projection | None:
    """The newest projection of these features with these settings, whichever library versions made it."""
    paths = sorted((run.path / _FOLDER).glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    wanted = {"settings": settings.as_dict(), "features": dict(features)}
    for path, record in [(path, _record(path)) for path in reversed(paths)]:
        if {name: record.get(name) for name in wanted} == wanted:
            return _read(path, record)
    return None


def _record(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = from_json(plain_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read: {error}", hint=_VERIFY) from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise RunError(f"{path} is no description of a projection that this DriftLens knows", hint=_VERIFY)
    return record


def _read(path: pathlib.Path, record: dict[str, Any]) -> Projection:
    try:
        asked = {key: value for key, value in record["settings"].items() if key != "fit_on"}
        settings = Settings(**{**asked, "variants": tuple(asked["variants"])})
        x_and_y = record["explained_variance"]
        values = {name: record[name] for name in _AS_THEY_ARE} | {
            "explained_variance": None if x_and_y is None else (float(x_and_y[0]), float(x_and_y[1])),
            "notes": tuple(record["notes"]),
            "quality": pd.DataFrame(record["quality"]).astype(_QUALITY),
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}", hint=_VERIFY) from error
    frame = read_table(path.with_suffix(".parquet"), _POINTS)
    return Projection(settings=settings, frame=frame, digest=path.stem, **values)
