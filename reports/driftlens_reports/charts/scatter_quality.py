"""How far a panel of the feature scatter can be trusted: numbers from the features, below the panel and in words."""

from __future__ import annotations

import math

import pandas as pd

from driftlens import variants
from driftlens_reports.charts.panels import Grid
from driftlens_reports.charts.words import joined
from driftlens_reports.wording import number

QUALITY = {
    "mean_cosine": "mean cosine",
    "mean_drift": "mean drift",
    "knn_overlap": "shared neighbours",
    "trustworthiness": "trustworthiness",
}
"""Quality columns of a projection, and what the plotted numbers call them."""

INDICATIVE = (
    "Distances on the plane are indicative only. The numbers below the panels come from the features: mean cosine to "
    "the expert, mean drift, share of nearest neighbours in common with the expert's, and trust, how few neighbours on "
    "the plane are none among the features (1 is best)."
)


def write_below(grid: Grid, at: int, x_title: str, quality: pd.DataFrame, variant: str) -> None:
    """Write the axis title and a variant's numbers below panel `at`; the expert has none but trustworthiness."""
    row = quality[quality["variant"] == variant].iloc[0]
    # A line is no wider than a panel in a telephone's window.
    lines = [f"trust {_short(row['trustworthiness'])}"]
    if variant != "expert":
        lines = [
            f"cosine {_short(row['mean_cosine'])}, drift {_short(row['mean_drift'])}",
            f"neighbours {_short(row['knn_overlap'])}",
            *lines,
        ]
    axis = next(iter(grid.figure.select_xaxes(**grid.place(at))))
    axis.title.text = "<br>".join([x_title, *lines])


def quality_in_words(quality: pd.DataFrame, names: list[str]) -> str:
    """The mean cosine of every variant shown, as a sentence."""
    rows = quality[quality["variant"].isin(names) & (quality["variant"] != "expert")]
    parts = [
        f"{variants.title(row['variant'])} {number(row['mean_cosine'])}" for row in rows.to_dict("records")
    ]
    return f"Mean cosine to the expert: {joined(parts)}."


def _short(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.3g}"
