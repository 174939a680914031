"""From stored features to places on a plane: finite, thinned, of norm 1, laid out; and how a layout fits them.

Layouts are made by scikit-learn and umap-learn, with what they would stumble over caught.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.config.requests import ProjectionRequest
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import DAMAGED
from driftlens.utils.errors import NumericsError, RunError, SpecError

Array = NDArray[np.float64]
Stored = NDArray[np.floating[Any]]
Method = Literal["pca", "umap", "tsne"]
METHODS: tuple[Method, ...] = get_args(Method)

_CHUNK = 4096
"""Samples in memory at once, in double precision."""
MOST_POINTS = 10_000
"""Neighbours are compared all with all: beyond this, that takes more memory than a viewer has."""
_FEWEST_POINTS = 15
"""Distinct rows below which neighbourhoods say nothing, so that PCA is drawn instead of UMAP or t-SNE."""
NEIGHBOURS = 15
"""Nearest samples that are compared, where there are enough: fewer than half of the others."""
_TITLES: Mapping[Method, str] = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
PARAMETERS: Mapping[Method, Mapping[str, Any]] = {
    "pca": {},
    "umap": {"pca_dims": 50, "n_neighbors": 15, "min_dist": 0.1, "metric": "euclidean", "init": "pca"},
    "tsne": {"pca_dims": 50, "perplexity": 30.0, "metric": "euclidean", "init": "pca"},
}
"""What the libraries are called with; rows are brought to norm 1 first, so that euclidean distance follows cosine."""


@dataclass(frozen=True)
class Settings:
    """What was asked of one projection, as `settings_of` has resolved it against its run: the layer by its index."""

    task: str
    layer: int
    method: Method
    seed: int
    variants: tuple[str, ...]
    max_points: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The expert, and the variants drawn beside it."""
        return ("expert", *self.variants)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON knows them."""
        return {**asdict(self), "variants": list(self.variants), "fit_on": "all"}  # as earlier runs have it


def settings_of(run: DriftRun, task: str, request: ProjectionRequest) -> Settings:
    """The settings, checked."""
    method, most = request.method, request.max_points
    drawn = (
        [name for name in run.variants if name != "base"] if request.variants is None else request.variants
    )
    chosen = [variant for variant in dict.fromkeys(drawn) if variant != "expert"]
    if not 1 + len(chosen) <= most <= MOST_POINTS:
        raise SpecError(f"max_points should be from {1 + len(chosen)} to {MOST_POINTS}, got {most}")
    return Settings(task, run.layer_index(request.layer), method, request.seed, tuple(chosen), most)


@dataclass(frozen=True)
class Points:
    """Matched rows of the expert and of every variant: `directions` by role, [n_shown, d], of norm 1.

    `cosine` and `drift` are mean cosine to the expert and mean distance from it over all `n` samples, by role.
    """

    sample_ids: Sequence[str]
    labels: Sequence[str | None]
    directions: Mapping[str, Array]
    cosine: Mapping[str, float]
    drift: Mapping[str, float]
    n: int
    notes: tuple[str, ...]


def load_points(run: DriftRun, settings: Settings) -> Points:
    """The rows that `settings` ask for, thinned evenly over classes where there are too many."""
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
    labels = _labels(run, settings, ids)
    measured = {
        role: _measure(array, arrays["expert"], role, settings, ids) for role, array in arrays.items()
    }
    samples = pd.DataFrame({"sample_id": [*ids], "label": labels})
    shown = thinned(samples, settings.max_points // len(arrays), ["label"]).index.to_numpy()
    directions = {role: _directions(array[shown]) for role, array in arrays.items()}
    return Points(
        sample_ids=[ids[row] for row in shown],
        labels=[labels[row] for row in shown],
        directions=directions,
        cosine={role: cosine for role, (cosine, _) in measured.items()},
        drift={role: drift for role, (_, drift) in measured.items()},
        n=len(ids),
        notes=tuple(_notes(directions, len(shown), len(ids))),
    )


def thinned(rows: pd.DataFrame, limit: int, by: Sequence[str]) -> pd.DataFrame:
    """At most `limit` rows, in order, of each stratum as its size asks for; which ones depends on their ids alone."""
    if len(rows) <= limit:
        return rows
    ids = rows["sample_id"].to_numpy(dtype=object)
    drawn = pd.DataFrame({"order": pd.util.hash_array(ids, categorize=False)}, index=rows.index)
    strata = drawn.groupby([rows[column].astype(str) for column in by])["order"]
    # Row r of a stratum of s comes up at r / s: the first of each stratum first, then all in step.
    turn = (strata.rank(method="first") - 1) / strata.transform("size")
    kept = np.sort(np.argsort(turn.to_numpy(), kind="stable")[:limit])
    return rows.iloc[kept]


def _labels(run: DriftRun, settings: Settings, ids: Sequence[str]) -> list[str | None]:
    for rows in (run.outputs(settings.task), run.samples(settings.task, layer=settings.layer)):
        rows = rows[rows["label"].notna()]
        if len(rows):
            by_sample = dict(zip(rows["sample_id"], rows["label"], strict=True))
            return [by_sample.get(sample) for sample in ids]
    return [None] * len(ids)


def _measure(
    array: Stored, expert: Stored, role: str, settings: Settings, ids: Sequence[str]
) -> tuple[float, float]:
    """Mean cosine to the expert and mean distance from it; NaN where no cosine exists, a norm being 0."""
    cosines, drifts = [], []
    for start in range(0, len(array), _CHUNK):
        own, wanted = (rows[start : start + _CHUNK].astype(np.float64) for rows in (array, expert))
        finite = np.isfinite(own).all(axis=1)
        if not finite.all():
            raise NumericsError(
                f"features of task {settings.task!r}, {role}, layer {settings.layer} hold NaN or infinity, first for "
                f"sample {ids[start + int(finite.argmin())]!r}",
                hint="Look for NaN in the weights: `driftlens validate` on the spec reads them.",
            )
        norms = np.linalg.norm(own, axis=1) * np.linalg.norm(wanted, axis=1)
        products = (own * wanted).sum(axis=1)
        cosines.append(products[norms > 0] / norms[norms > 0])
        drifts.append(np.linalg.norm(own - wanted, axis=1))
    cosine = np.concatenate(cosines)
    return (float(cosine.mean()) if len(cosine) else float("nan")), float(np.concatenate(drifts).mean())


def _directions(array: Stored) -> Array:
    rows = array.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


def _notes(directions: Mapping[str, Array], n_shown: int, n: int) -> Iterator[str]:
    if n_shown < n:
        yield f"{n_shown:,} of {n:,} samples are shown, evenly over classes"
    for role, rows in directions.items():
        num_zero = int((~rows.any(axis=1)).sum())
        if num_zero:
            yield f"{num_zero} features of {role} are zero and have no direction; they are drawn where zero is"


def lay_out(rows: Array, method: Method, seed: int) -> tuple[Array, dict[str, Any]]:
    """Return two coordinates for every finite row, [r, 2], and how they got there: other fields of a `Projection`."""
    # Libraries put equal rows at different places (or fail on them), so each distinct row is laid out once.
    distinct, places = np.unique(rows, axis=0, return_inverse=True)
    reason = "" if method == "pca" else _why_not(method, len(distinct))
    if method == "pca" or reason:
        plane, how = _by_pca(rows, distinct, seed, (reason,) if reason else ())
    else:
        plane, how = _by_neighbours(distinct, method, seed)
    return plane[places], how


def _why_not(method: Method, num_distinct: int) -> str:
    """Why a method is replaced by PCA; empty where it is not."""
    if num_distinct < _FEWEST_POINTS:
        return f"{num_distinct} distinct points are too few for {_TITLES[method]}; this is PCA"
    if method == "umap":
        with _silenced():
            try:
                import umap  # noqa: F401
            except ImportError:
                return "umap-learn is not installed, so this is PCA; `pip install umap-learn` adds UMAP"
    return ""


def _by_pca(
    fitted: Array, distinct: Array, seed: int, notes: tuple[str, ...]
) -> tuple[Array, dict[str, Any]]:
    coordinates, variance = _components(fitted, distinct, 2, seed)
    plane = np.zeros((len(distinct), 2))
    plane[:, : coordinates.shape[1]] = coordinates
    if variance is None:
        notes = (*notes, "all points the layout is fitted on coincide")
    x_and_y = None if variance is None else tuple([*variance.tolist(), 0.0][:2])
    return plane, {"method": "pca", "parameters": {}, "explained_variance": x_and_y, "notes": notes}


def _components(fitted: Array, rows: Array, most: int, seed: int) -> tuple[Array, Array | None]:
    """Rows in the leading principal components of `fitted`, and the share of variance of each."""
    from sklearn.decomposition import PCA

    centred = fitted - fitted.mean(axis=0)
    if not np.abs(centred).max() > 1e-12:  # rows have norm 1: what is left is rounding
        return np.zeros((len(rows), 0)), None
    count = min(most, *fitted.shape)
    model = PCA(count, random_state=seed).fit(fitted)
    return model.transform(rows), model.explained_variance_ratio_


def _by_neighbours(distinct: Array, method: Method, seed: int) -> tuple[Array, dict[str, Any]]:
    parameters = dict(PARAMETERS[method])
    reduced, _ = _components(distinct, distinct, parameters.pop("pca_dims"), seed)
    num_fitted, num_dims = reduced.shape
    if num_dims < 2:  # both libraries start from two columns
        reduced = np.hstack([reduced, np.zeros_like(reduced)])
    with _silenced() as warned:
        if method == "umap":
            from umap import UMAP

            parameters["n_neighbors"] = min(parameters["n_neighbors"], num_fitted - 1)
            # One thread: with more, a seed does not give the same layout twice.
            model = UMAP(n_components=2, random_state=seed, transform_seed=seed, n_jobs=1, **parameters)
        else:
            from sklearn.manifold import TSNE

            parameters["perplexity"] = min(parameters["perplexity"], (num_fitted - 1) / 3)
            model = TSNE(n_components=2, random_state=seed, n_jobs=1, **parameters)
        plane = model.fit_transform(reduced).astype(np.float64)
    notes = tuple(f"{_TITLES[method]} warned: {text}" for text in dict.fromkeys(warned()))
    parameters = {"pca_dims": num_dims, **parameters}
    return plane, {"method": method, "parameters": parameters, "explained_variance": None, "notes": notes}


@contextmanager
def _silenced() -> Iterator[Any]:
    """Catches what libraries warn users of; yields a function that lists it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(entry.message) for entry in caught if issubclass(entry.category, UserWarning)]


def quality(points: Points, coordinates: Mapping[str, Array]) -> pd.DataFrame:
    """One row per role; columns as in `Projection.quality`."""
    k = min(NEIGHBOURS, (len(points.sample_ids) - 1) // 2)
    fits = {role: _kept_neighbours(points, role, coordinates[role], k) for role in points.directions}
    rows = [
        {
            "variant": role,
            "n": points.n,
            "n_shown": len(points.sample_ids),
            "mean_cosine": points.cosine[role],
            "mean_drift": points.drift[role],
            "neighbours": k,
            "knn_overlap": overlap,
            "trustworthiness": trusted,
        }
        for role, (overlap, trusted) in fits.items()
    ]
    return pd.DataFrame(rows)


def _kept_neighbours(points: Points, role: str, coordinates: Array, k: int) -> tuple[float, float]:
    """Overlap of the `k` nearest with those of the expert, and trustworthiness of the plane; NaN without neighbours."""
    if k < 1:
        return math.nan, math.nan
    from sklearn.manifold import trustworthiness
    from sklearn.neighbors import NearestNeighbors

    wanted, own = (
        NearestNeighbors(n_neighbors=k).fit(points.directions[each]).kneighbors(return_distance=False)
        for each in ("expert", role)
    )
    shared = [np.isin(a, b, assume_unique=True).mean() for a, b in zip(wanted, own, strict=True)]
    trusted = trustworthiness(points.directions[role], coordinates, n_neighbors=k)
    return float(np.mean(shared)), float(trusted)
