"""How far a layout can be trusted, from the features themselves."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.projection.points import Points

Array = NDArray[np.float64]

NEIGHBOURS = 15
"""Nearest samples that are compared, where there are enough: fewer than half of the others."""


def quality(points: Points, coordinates: dict[str, Array]) -> pd.DataFrame:
    """One row per role; columns as in `Projection.quality`."""
    k = min(NEIGHBOURS, (len(points.sample_ids) - 1) // 2)
    expert = _nearest(points.directions["expert"], k)
    rows = [
        {
            "variant": role,
            "n": points.n,
            "n_shown": len(points.sample_ids),
            "mean_cosine": points.cosine[role],
            "mean_drift": points.drift[role],
            "neighbours": k,
            "knn_overlap": _overlap(expert, _nearest(directions, k)),
            "trustworthiness": _trustworthiness(directions, coordinates[role], k),
        }
        for role, directions in points.directions.items()
    ]
    return pd.DataFrame(rows)


def _nearest(directions: Array, k: int) -> NDArray[np.intp]:
    """Positions of each row's `k` nearest others, [n, k]."""
    if k < 1:
        return np.empty((len(directions), 0), dtype=np.intp)
    from sklearn.neighbors import NearestNeighbors

    found: NDArray[np.intp] = (
        NearestNeighbors(n_neighbors=k).fit(directions).kneighbors(return_distance=False)
    )
    return found


def _overlap(one: NDArray[np.intp], other: NDArray[np.intp]) -> float:
    if not one.size:
        return math.nan
    shared = [np.isin(a, b, assume_unique=True).mean() for a, b in zip(one, other, strict=True)]
    return float(np.mean(shared))


def _trustworthiness(directions: Array, coordinates: Array, k: int) -> float:
    if k < 1:
        return math.nan
    from sklearn.manifold import trustworthiness

    return float(trustworthiness(directions, coordinates, n_neighbors=k))
