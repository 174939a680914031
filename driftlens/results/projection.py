"""Two-dimensional layouts of stored features (`project`): one per task for all variants, with quality measures.

Distances in two dimensions are indicative only; quality measures come from the features.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.config.requests import ProjectionRequest
from driftlens.runs.manifest import feature_file, package_version
from driftlens.runs.run import DriftRun, cache_on_run, open_run
from driftlens.runs.schema import LABEL, SAMPLE_ID, TASK, VARIANT, ColumnSchema, TableSchema
from driftlens.runs.tables import DAMAGED, append_rows, conform_to_schema, json_rows, read_table
from driftlens.runs.writer import attach_file
from driftlens.utils.errors import NumericsError, RunError, SpecError
from driftlens.utils.files import PathLike, file_sha256, parse_json, regular_file, write_json_atomic

Array = NDArray[np.float64]
Method = Literal["pca", "umap", "tsne"]
METHODS: tuple[Method, ...] = get_args(Method)

# Limit for comparing all pairs of neighbours in the memory of a viewer.
MOST_POINTS = 10_000
# With fewer distinct rows, PCA replaces UMAP and t-SNE.
_FEWEST_POINTS = 15
# Number of nearest samples that are compared, at most half of the others.
NEIGHBOURS = 15
_TITLES: Mapping[Method, str] = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
# Parameters of the libraries; rows have norm 1, so that Euclidean distance follows cosine.
PARAMETERS: Mapping[Method, Mapping[str, Any]] = {
    "pca": {},
    "umap": {"pca_dims": 50, "n_neighbors": 15, "min_dist": 0.1, "metric": "euclidean", "init": "pca"},
    "tsne": {"pca_dims": 50, "perplexity": 30.0, "metric": "euclidean", "init": "pca"},
}


@dataclass(frozen=True)
class ProjectionSettings:
    """The resolved settings of a 2-D projection of features; the layer is an index."""

    task: str
    layer: int
    method: Method
    seed: int
    variants: tuple[str, ...]
    max_points: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The models whose features are projected: the expert and the requested variants."""
        return ("expert", *self.variants)


def _resolve_settings(run: DriftRun, task: str, request: ProjectionRequest) -> ProjectionSettings:
    method, most = request.method, request.max_points
    drawn = [name for name in run.variants if name != "base"] if request.variants is None else request.variants
    chosen = [variant for variant in dict.fromkeys(drawn) if variant != "expert"]
    # Every model needs at least one point.
    if not 1 + len(chosen) <= most <= MOST_POINTS:
        raise SpecError(f"max_points should be from {1 + len(chosen)} to {MOST_POINTS}, got {most}")
    return ProjectionSettings(task, run.layer_index(request.layer), method, request.seed, tuple(chosen), most)


@dataclass(frozen=True)
class _MatchedFeatures:
    """Features of the same samples in every model, scaled to norm 1, [n_shown, d]; means are over all `n` samples."""

    sample_ids: Sequence[str]
    labels: Sequence[str | None]
    directions: Mapping[str, Array]
    cosine: Mapping[str, float]
    drift: Mapping[str, float]
    n: int
    notes: tuple[str, ...]


def load_features(run: DriftRun, settings: ProjectionSettings) -> _MatchedFeatures:
    """Load the features to project, subsampled evenly over classes if there are too many."""
    ids = run.sample_ids(settings.task)
    arrays = {role: run.features(settings.task, role, settings.layer) for role in settings.roles}
    shape = arrays["expert"].shape
    for role, array in arrays.items():
        if array.shape != shape or array.ndim != 2 or len(array) != len(ids) or not array.size:
            raise RunError(
                f"features of task {settings.task!r}, {role}, layer {settings.layer} are {list(array.shape)}, the "
                f"expert's {list(shape)}, for {len(ids)} samples",
                hint=DAMAGED,
            )
    label_of = labels_by_sample(run, settings.task).to_dict()
    labels = [label_of.get(sample) for sample in ids]
    # The same samples for all models, as points are matched.
    samples = pd.DataFrame({"sample_id": [*ids], "label": labels})
    shown = stratified_subset(samples, settings.max_points // len(arrays), ["label"]).index.to_numpy()
    directions, cosines, drifts = {}, {}, {}
    notes = [f"{len(shown):,} of {len(ids):,} samples are shown, evenly over classes"] * (len(shown) < len(ids))
    # In double precision, as stored features may be float16 and overflow in sums.
    target = arrays["expert"].astype(np.float64)
    for role, array in arrays.items():
        rows = array.astype(np.float64)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            raise NumericsError(
                f"features of task {settings.task!r}, {role}, layer {settings.layer} hold NaN or infinity, first for "
                f"sample {ids[int(finite.argmin())]!r}",
                hint="Check the weights for NaN: `driftlens validate` on the spec.",
            )
        lengths = np.linalg.norm(rows, axis=1)
        norms = lengths * np.linalg.norm(target, axis=1)
        cosine = (rows * target).sum(axis=1)[norms > 0] / norms[norms > 0]
        cosines[role] = float(cosine.mean()) if len(cosine) else math.nan
        drifts[role] = float(np.linalg.norm(rows - target, axis=1).mean())
        directions[role] = rows[shown] / np.where(lengths > 0, lengths, 1.0)[shown, None]
        if num_zero := int((lengths[shown] == 0).sum()):
            notes.append(f"{num_zero} features of {role} are zero and plotted at the origin")
    kept = [ids[row] for row in shown], [labels[row] for row in shown]
    return _MatchedFeatures(*kept, directions, cosines, drifts, len(ids), tuple(notes))


def stratified_subset(rows: pd.DataFrame, limit: int, by: Sequence[str]) -> pd.DataFrame:
    """Return at most `limit` rows, stratified, in order; the choice depends on sample ids only.

    Args:
        rows: rows with a column sample_id.
        limit: largest number of rows.
        by: columns that define the strata.
    """
    if len(rows) <= limit:
        return rows
    ids = rows["sample_id"].to_numpy(dtype=object)
    # A hash instead of a random draw: the same samples on every machine and for every variant.
    drawn = pd.DataFrame({"order": pd.util.hash_array(ids, categorize=False)}, index=rows.index)
    strata = drawn.groupby([rows[column].astype(str) for column in by])["order"]
    # Row r of a stratum of s comes up at r / s: the first of each stratum first, then all in step.
    turn = (strata.rank(method="first") - 1) / strata.transform("size")
    kept = np.sort(np.argsort(turn.to_numpy(), kind="stable")[:limit])
    return rows.iloc[kept]


@cache_on_run
def labels_by_sample(run: DriftRun, task: str) -> pd.Series[Any]:
    """Return the labels of a task's diagnosis samples, by sample id; unlabelled samples are left out."""
    rows = pd.concat([frame[["sample_id", "label"]] for frame in (run.outputs(task), run.samples(task))])
    return rows.dropna().drop_duplicates("sample_id").set_index("sample_id")["label"]


def compute_layout(rows: Array, method: Method, seed: int) -> tuple[Array, dict[str, Any]]:
    """Compute 2-D coordinates [r, 2] by PCA, UMAP or t-SNE, and a description of the layout.

    Args:
        rows: finite features `[r, d]`, of norm 1.
        method: pca, umap or tsne; PCA replaces both others for fewer than 15 distinct rows, and UMAP if it is missing.
        seed: random seed.
    """
    from sklearn.decomposition import PCA

    # Libraries place equal rows apart or fail on them, so each distinct row is laid out once.
    distinct, places = np.unique(rows, axis=0, return_inverse=True)
    notes, variance = [], None
    if method != "pca" and len(distinct) < _FEWEST_POINTS:
        notes.append(f"{len(distinct)} distinct points are too few for {_TITLES[method]}; this is PCA")
        method = "pca"
    if method == "umap" and find_spec("umap") is None:
        notes.append("umap-learn is not installed, so this is PCA; `pip install umap-learn` adds UMAP")
        method = "pca"
    parameters = dict(PARAMETERS[method])
    fitted = rows if method == "pca" else distinct
    reduced = np.zeros((len(distinct), 0))
    # sklearn divides by the total variance, which is 0 where all rows are equal.
    if np.abs(fitted - fitted.mean(axis=0)).max() > 1e-12:  # rows have norm 1, so the rest is rounding
        # PCA has at most as many components as rows or columns.
        model = PCA(min(parameters.get("pca_dims", 2), *fitted.shape), random_state=seed).fit(fitted)
        reduced, variance = model.transform(distinct), (*model.explained_variance_ratio_.tolist(), 0.0)[:2]
    else:
        notes.append("all points coincide")
    if method != "pca":
        parameters["pca_dims"] = reduced.shape[1]
    # Both axes are drawn, and both libraries start from two columns.
    plane = np.pad(reduced, ((0, 0), (0, max(0, 2 - reduced.shape[1]))))
    if method != "pca":
        variance = None
        with warnings.catch_warnings(action="ignore"):
            plane = _umap_or_tsne_layout(plane, method, seed, parameters)
    how = {"method": method, "parameters": parameters, "explained_variance": variance, "notes": tuple(notes)}
    return plane[places], how


def _umap_or_tsne_layout(rows: Array, method: Method, seed: int, parameters: dict[str, Any]) -> Array:
    """Compute a UMAP or t-SNE layout, with parameters adjusted if there are few rows."""
    settings = {name: value for name, value in parameters.items() if name != "pca_dims"}
    if method == "umap":
        from umap import UMAP

        settings["n_neighbors"] = min(settings["n_neighbors"], len(rows) - 1)
        # One thread: with more, a seed does not give the same layout twice.
        model = UMAP(n_components=2, random_state=seed, transform_seed=seed, n_jobs=1, **settings)
    else:
        from sklearn.manifold import TSNE

        # t-SNE raises where the perplexity is not below the number of points.
        settings["perplexity"] = min(settings["perplexity"], (len(rows) - 1) / 3)
        model = TSNE(n_components=2, random_state=seed, n_jobs=1, **settings)
    parameters |= settings
    # float64, as the file stores it: UMAP returns float32.
    plane: Array = model.fit_transform(rows).astype(np.float64)
    return plane


def _layout_quality(points: _MatchedFeatures, coordinates: Mapping[str, Array]) -> pd.DataFrame:
    """Return one row of layout quality measures per model; columns as in `Projection.quality`."""
    from sklearn.manifold import trustworthiness
    from sklearn.neighbors import NearestNeighbors

    # Trustworthiness is only defined for fewer than half of the points.
    k = min(NEIGHBOURS, (len(points.sample_ids) - 1) // 2)
    rows = []
    for role, directions in points.directions.items():
        row = {
            **{"variant": role, "n": points.n, "n_shown": len(points.sample_ids), "neighbours": k},
            **{"mean_cosine": points.cosine[role], "mean_drift": points.drift[role]},
        }
        if k:
            # Euclidean distance of unit vectors ranks neighbours as cosine does.
            target, own = (
                NearestNeighbors(n_neighbors=k).fit(rows).kneighbors(return_distance=False)
                for rows in (points.directions["expert"], directions)
            )
            shared = [np.isin(a, b, assume_unique=True).mean() for a, b in zip(target, own, strict=True)]
            row["knn_overlap"] = np.mean(shared)
            row["trustworthiness"] = trustworthiness(directions, coordinates[role], n_neighbors=k)
        rows.append(row)
    return pd.DataFrame(rows, columns=["variant", *_QUALITY]).astype(_QUALITY)


_FOLDER = "projections"
_FORMAT = 1
_POINTS = TableSchema(
    "projection",
    ("task", "variant", "sample_id"),
    (
        TASK,
        VARIANT,
        SAMPLE_ID,
        LABEL,
        ColumnSchema("x", "float", "1", "First coordinate; distances are indicative only."),
        ColumnSchema("y", "float", "1", "Second coordinate."),
    ),
)
_AS_THEY_ARE = ("method", "parameters", "explained_variance", "notes")
_QUALITY = {
    **dict.fromkeys(("n", "n_shown"), "int64"),
    **dict.fromkeys(("mean_cosine", "mean_drift"), "float64"),
    "neighbours": "int64",
    **dict.fromkeys(("knn_overlap", "trustworthiness"), "float64"),
}


@dataclass(frozen=True)
class Projection:
    """A 2-D layout (PCA, UMAP or t-SNE) of a task's features at one layer.

    Attributes:
        method: the method that was used; PCA with too few points for another, as a note explains.
        frame: one row per point: task, variant ("expert" for the task's own), sample_id, label, x, y. A sample has
            one row per variant, in the same order.
        quality: one row per variant, computed from the features: `mean_cosine` and `mean_drift` to the expert over
            all `n` samples. Over the `n_shown` samples: `knn_overlap`, the mean share of a sample's nearest
            `neighbours` that are the same for expert and variant, and `trustworthiness` of the layout (1 is best).
            NaN with fewer than three samples.
        explained_variance: shares of variance along x and y, for PCA with any variance; else None.
        notes: points left out, a replaced method.
        digest: the content key; `projections/<digest>.parquet` in the run, once stored.
    """

    settings: ProjectionSettings
    method: Method
    frame: pd.DataFrame = field(repr=False)
    quality: pd.DataFrame = field(repr=False)
    explained_variance: tuple[float, float] | None
    parameters: Mapping[str, Any]
    notes: tuple[str, ...]
    digest: str


def project(
    run: DriftRun | PathLike,
    task: str,
    request: ProjectionRequest = ProjectionRequest(),
    *,
    store_it: bool = True,
    report: Callable[[str, int, int, str], None] = lambda *_: None,
) -> Projection:
    """Project the features of expert and variants jointly to 2-D; a stored layout is reused.

    Features are scaled to norm 1; for UMAP and t-SNE, PCA reduces them to 50 dimensions. Equal features share their
    place. With fewer than 15 distinct points, or without umap-learn, the method is PCA, and a note says so.

    Args:
        run: the run, or its folder.
        task: the task.
        request: layer, method, variants and number of points.
        store_it: store the layout in the run.
        report: called with the phase, the finished units and all units (1), and a label; it may raise.

    Raises:
        DataError: features are not stored.
        NumericsError: features are not finite.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    settings = _resolve_settings(opened, task, request)
    record = {"settings": asdict(settings), "features": _feature_digests(opened, settings)}
    key = json.dumps({**record, "parameters": PARAMETERS[settings.method]}, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    label = f"{settings.method} of {task}"
    report("layout", 0, 1, label)
    projection = _find_stored_layout(opened.path / _FOLDER, settings, record)
    if projection is None:
        points = load_features(opened, settings)
        rows = np.concatenate([points.directions[role] for role in settings.roles])
        plane, how = compute_layout(rows, settings.method, settings.seed)
        report("layout", 0, 1, f"{label}: comparing neighbours")
        places = dict(zip(settings.roles, np.split(plane, len(settings.roles)), strict=True))
        how["notes"] = (*points.notes, *how["notes"])
        columns = {
            "task": settings.task,
            "variant": np.repeat(settings.roles, len(points.sample_ids)),
            "sample_id": [*points.sample_ids] * len(settings.roles),
            "label": [*points.labels] * len(settings.roles),
            **{"x": plane[:, 0], "y": plane[:, 1]},
        }
        frame, quality = conform_to_schema(pd.DataFrame(columns), _POINTS), _layout_quality(points, places)
        projection = Projection(settings, frame=frame, quality=quality, digest=digest, **how)
        if store_it:
            _write_projection(opened, projection, record)
    report("layout", 1, 1, label)
    return projection


def _feature_digests(run: DriftRun, settings: ProjectionSettings) -> dict[str, str]:
    """Return the SHA-256 digest of the stored features of every model."""
    digests = {}
    for role in settings.roles:
        run.features(settings.task, role, settings.layer)  # raises if they are not stored
        relative = feature_file(settings.task, role, settings.layer)
        # The manifest lists most digests, so features need not be hashed again.
        listed = run.manifest.files.get(relative)
        digests[role] = listed.sha256 if listed else file_sha256(run.path / relative)
    return digests


def _find_stored_layout(
    folder: pathlib.Path, settings: ProjectionSettings, wanted: Mapping[str, Any]
) -> Projection | None:
    """Return the file of a stored layout with these settings and features, if there is one."""
    wanted = parse_json(json.dumps(wanted))
    for path in sorted(folder.glob("*.json")):
        try:
            record = parse_json(regular_file(path).read_text(encoding="utf-8"))
            # `fit_on` was a setting of earlier versions.
            stored = {key: value for key, value in record["settings"].items() if key != "fit_on"}
            if {"settings": stored, "features": record["features"]} != wanted:
                continue
            values = _parse_description(record)
        except (OSError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            hint = "Delete the file to recompute the projection. `driftlens check` lists damaged files."
            raise RunError(f"{path} can't be read: {error}", hint=hint) from error
        frame = read_table(path.with_suffix(".parquet"), _POINTS)
        return Projection(settings=settings, frame=frame, digest=path.stem, **values)
    return None


def _write_projection(run: DriftRun, projection: Projection, record: Mapping[str, Any]) -> None:
    base = f"{_FOLDER}/{projection.digest}"
    versions = {name: package_version(name) for name in ("scikit-learn", "umap-learn")}
    record = {
        **{"format": _FORMAT, **record, "versions": versions},
        **{name: getattr(projection, name) for name in _AS_THEY_ARE},
        "quality": json_rows(projection.quality),
    }
    with attach_file(run.path, f"{base}.parquet") as path:
        append_rows(path, _POINTS, projection.frame)
    # Last: what describes the coordinates is there only when they are.
    with attach_file(run.path, f"{base}.json") as path:
        write_json_atomic(path, record)


def _parse_description(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Projection` from the JSON description of a stored layout."""
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']} instead of {_FORMAT}")
    values = {name: record[name] for name in _AS_THEY_ARE} | {"notes": tuple(record["notes"])}
    if (variance := record["explained_variance"]) is not None:
        values["explained_variance"] = (float(variance[0]), float(variance[1]))
    return values | {"quality": pd.DataFrame(record["quality"]).astype(_QUALITY)}
