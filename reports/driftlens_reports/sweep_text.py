"""A sweep in plain text: one line per point, averaged over tasks, with its spread over seeds."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.columns import aligned
from driftlens_reports.wording import number, percent

_FACTORS = ("lam", "rho", "alpha", "n")


def sweep_text(run: DriftRun, name: str) -> str:
    """The points of one sweep in the order of what is varied, and below them what the numbers are.

    Raises:
        RunError: the table can't be read.
    """
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    points = _points(rows).sort_values(name.split("+"), kind="stable")
    has_accuracy = bool(points["accuracy"].notna().any())
    header = [
        *_FACTORS,
        "L2 drift",
        "relative",
        "cosine",
        *(["accuracy", "std"] if has_accuracy else []),
        "s",
    ]
    lines = [header]
    for _, point in points.iterrows():
        settings = [f"{point[factor]:g}" for factor in _FACTORS]
        features = [number(point[column]) for column in ("drift_l2_mean", "drift_rel", "cos_mean")]
        scores = [percent(point["accuracy"]), percent(point["std"])] if has_accuracy else []
        lines.append([*settings, *features, *scores, number(point["seconds"])])
    tasks, seeds = rows["task"].nunique(), rows["seed"].nunique()
    spread = "; std: between seeds" if has_accuracy and seeds > 1 else ""
    return "\n".join(
        [*aligned(lines, num_names=0), "", f"{name}: means of {tasks} tasks, {seeds} seeds{spread}"]
    )


def _points(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over tasks, then over seeds; `std` is that of the accuracy over seeds, of a sample."""
    rows = rows.astype({"n": float})
    measured = ["drift_l2_mean", "drift_rel", "cos_mean", "accuracy", "seconds"]
    by_seed = rows.groupby(["point", "seed", *_FACTORS], as_index=False)[measured].mean()
    groups = by_seed.groupby(["point", *_FACTORS])
    return groups[measured].mean().assign(std=groups["accuracy"].std()).reset_index()
