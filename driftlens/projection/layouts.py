"""From rows in many dimensions to a plane, by scikit-learn and umap-learn, with what they would stumble over caught."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftlens.projection.store import PARAMETERS, Method

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FEWEST_POINTS = 15
"""Distinct rows below which neighbourhoods say nothing, so that PCA is drawn instead of UMAP or t-SNE."""


@dataclass(frozen=True)
class Layout:
    """Rows on a plane, [r, 2], and how they got there; attributes as in `Projection`."""

    coordinates: Array
    method: Method
    parameters: Mapping[str, Any]
    explained_variance: tuple[float, float] | None
    notes: tuple[str, ...]


def lay_out(rows: Array, is_fitted: Mask, method: Method, seed: int) -> Layout:
    """Two coordinates for every row; equal rows share their place, whoever they belong to.

    Args:
        rows: [r, d], finite.
        is_fitted: [r], the rows that the layout is fitted on; the others are placed in it.
        method: "pca", "umap" or "tsne"; t-SNE can't place rows it was not fitted on.
        seed: of the method's random numbers.
    """
    # Libraries put equal rows at different places (or fail on them), so each distinct row is laid out once.
    distinct, places = np.unique(rows, axis=0, return_inverse=True)
    fits = np.zeros(len(distinct), dtype=bool)
    fits[places[is_fitted]] = True
    reason = "" if method == "pca" else _why_not(method, int(fits.sum()))
    if method == "pca" or reason:
        found = _by_pca(rows[is_fitted], distinct, seed, (reason,) if reason else ())
    else:
        found = _by_neighbours(distinct, fits, method, seed)
    return Layout(
        found.coordinates[places], found.method, found.parameters, found.explained_variance, found.notes
    )


def _why_not(method: Method, num_distinct: int) -> str:
    """Why a method is replaced by PCA; empty where it is not."""
    if num_distinct < FEWEST_POINTS:
        return f"{num_distinct} distinct points are too few for {_TITLES[method]}; this is PCA"
    if method == "umap":
        with _silenced():
            try:
                import umap  # noqa: F401
            except ImportError:
                return "umap-learn is not installed, so this is PCA; `pip install umap-learn` adds UMAP"
    return ""


_TITLES: Mapping[Method, str] = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}


def _by_pca(fitted: Array, distinct: Array, seed: int, notes: tuple[str, ...]) -> Layout:
    coordinates, variance = _components(fitted, distinct, 2, seed)
    plane = np.zeros((len(distinct), 2))
    plane[:, : coordinates.shape[1]] = coordinates
    if variance is None:
        return Layout(plane, "pca", {}, None, (*notes, "all points the layout is fitted on coincide"))
    x, y = [*variance.tolist(), 0.0][:2]
    return Layout(plane, "pca", {}, (x, y), notes)


def _components(fitted: Array, rows: Array, most: int, seed: int) -> tuple[Array, Array | None]:
    """Rows in the leading principal components of `fitted`, and the share of variance of each."""
    from sklearn.decomposition import PCA

    centred = fitted - fitted.mean(axis=0)
    if not np.abs(centred).max() > 1e-12:  # rows have norm 1: what is left is rounding
        return np.zeros((len(rows), 0)), None
    count = min(most, *fitted.shape)
    model = PCA(count, random_state=seed).fit(fitted)
    return model.transform(rows), model.explained_variance_ratio_


def _by_neighbours(distinct: Array, fits: Mask, method: Method, seed: int) -> Layout:
    parameters = dict(PARAMETERS[method])
    reduced, _ = _components(distinct[fits], distinct, parameters.pop("pca_dims"), seed)
    num_dims, num_fitted = reduced.shape[1], int(fits.sum())
    if num_dims < 2:  # both libraries start from two columns
        reduced = np.hstack([reduced, np.zeros_like(reduced)])
    plane = np.empty((len(reduced), 2))
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
        plane[fits] = model.fit_transform(reduced[fits])
        if not fits.all():
            plane[~fits] = model.transform(reduced[~fits])
    notes = tuple(f"{_TITLES[method]} warned: {text}" for text in dict.fromkeys(warned()))
    return Layout(plane, method, {"pca_dims": num_dims, **parameters}, None, notes)


@contextmanager
def _silenced() -> Iterator[Any]:
    """Catches what libraries warn users of; yields a function that lists it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(entry.message) for entry in caught if issubclass(entry.category, UserWarning)]
