"""What a projection is asked to be, what it is, and how a run keeps it: as Parquet and JSON, under a content key."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import pandas as pd

from driftlens.base.errors import RunError, SpecError, did_you_mean
from driftlens.base.files import from_json, plain_file, sha256_of, write_json_atomic
from driftlens.base.variants import title
from driftlens.runs import layout
from driftlens.runs.manifest import version_of
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import LABEL, SAMPLE_ID, TASK, VARIANT, Column, Table
from driftlens.runs.tables import append_rows, plain_rows, read_table
from driftlens.runs.writer import attach
from driftlens.spec.requests import ProjectionRequest

Method = Literal["pca", "umap", "tsne"]
FitOn = Literal["all", "expert"]
METHODS: tuple[Method, ...] = get_args(Method)

MOST_POINTS = 10_000
"""Neighbours are compared all with all: beyond this, that takes more memory than a viewer has."""

PARAMETERS: Mapping[Method, Mapping[str, Any]] = {
    "pca": {},
    "umap": {"pca_dims": 50, "n_neighbors": 15, "min_dist": 0.1, "metric": "euclidean", "init": "pca"},
    "tsne": {"pca_dims": 50, "perplexity": 30.0, "metric": "euclidean", "init": "pca"},
}
"""What the libraries are called with; rows are brought to norm 1 first, so that euclidean distance follows cosine."""

_LIBRARIES: Mapping[Method, Sequence[str]] = {
    "pca": ("numpy", "scikit-learn"),
    "umap": ("numpy", "scikit-learn", "umap-learn", "pynndescent", "numba"),
    "tsne": ("numpy", "scipy", "scikit-learn"),
}

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
class Settings:
    """What was asked of one projection, as `settings_of` has resolved it against its run: the layer by its index."""

    task: str
    layer: int
    method: Method
    seed: int
    variants: tuple[str, ...]
    fit_on: FitOn
    max_points: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The expert, and the variants drawn beside it."""
        return ("expert", *self.variants)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON knows them."""
        return {**asdict(self), "variants": list(self.variants)}


def settings_of(run: DriftRun, task: str, request: ProjectionRequest) -> Settings:
    """The settings, checked."""
    method, fit_on, seed, most = request.method, request.fit_on, request.seed, request.max_points
    for what, given, allowed in (("method", method, METHODS), ("fit_on", fit_on, get_args(FitOn))):
        if given not in allowed:
            there = ", ".join(allowed)
            raise SpecError(f"no {what} {given!r}; there are {there}", hint=did_you_mean(given, allowed))
    if method == "tsne" and fit_on == "expert":
        raise SpecError(
            "t-SNE can't place rows that it was not fitted on", hint="Choose pca or umap, or fit on all."
        )
    if not 0 <= seed < 2**32:
        raise SpecError(f"seed should be from 0 to {2**32 - 1:,}, got {str(seed)[:40]}")
    chosen = (
        [variant for variant in run.variants if variant != "base"]
        if request.variants is None
        else list(request.variants)
    )
    chosen = [variant for variant in dict.fromkeys(chosen) if variant != "expert"]
    if not 1 + len(chosen) <= most <= MOST_POINTS:
        raise SpecError(f"max_points should be from {1 + len(chosen)} to {MOST_POINTS}, got {most}")
    return Settings(task, run.layer_index(request.layer), method, seed, tuple(chosen), fit_on, most)


def feature_digests(run: DriftRun, settings: Settings) -> dict[str, str]:
    """SHA-256 of the features of every role, which decide a layout."""
    found = {}
    for role in settings.roles:
        run.features(settings.task, role, settings.layer)  # says what is missing
        relative = layout.feature_file(settings.task, role, settings.layer)
        listed = run.manifest.files.get(relative)
        found[role] = listed.sha256 if listed else sha256_of(run.path / relative)
    return found


def library_versions(method: Method) -> dict[str, str | None]:
    """Versions of the packages that make a layout; None for one that is not installed."""
    return {name: version_of(name) for name in _LIBRARIES[method]}


def content_key(settings: Settings, features: Mapping[str, str], versions: Mapping[str, str | None]) -> str:
    """A name for the layout that these features, settings and libraries give, in hexadecimal."""
    parts = {
        "settings": settings.as_dict(),
        "parameters": PARAMETERS[settings.method],
        "features": features,
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


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

    def _repr_png_(self) -> bytes:
        """A panel per variant, points coloured by class, for notebooks."""
        from matplotlib.figure import Figure

        groups = self.frame.assign(colour=pd.factorize(self.frame["label"])[0]).groupby("variant", sort=False)
        figure = Figure(figsize=(5.5, 5.5 / len(groups) + 0.3), layout="constrained")
        panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (variant, rows) in zip(panels, groups, strict=True):
            axes.scatter(rows["x"], rows["y"], s=4, c=rows["colour"], cmap="tab10")
            axes.set_title(title(str(variant)), parse_math=False, fontsize=8)
            axes.set(xticks=[], yticks=[])
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=200)
        return written.getvalue()


def write(run: DriftRun, projection: Projection, features: Mapping[str, str]) -> None:
    """Add a projection to its run.

    Args:
        run: the run.
        projection: what to keep.
        features: digest of the features of every role.
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
    """The projection with a content key, or None where the run has none."""
    path = run.path / _FOLDER / f"{digest}.json"
    return _read(path, _record(path)) if path.exists() else None


def read_like(run: DriftRun, settings: Settings, features: Mapping[str, str]) -> Projection | None:
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
