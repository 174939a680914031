"""What a projection is: points on a plane, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from driftlens.projection.settings import Method, Settings


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
