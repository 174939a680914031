"""A saved run whose tasks are judged by different metrics, with single results of every test sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from driftlens.results.measures import metric_interval
from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.variants import METRICS
from tests.runs.full_run import Size, write_full_run

NAME, VARIANT = "featcal", "calibrated:featcal"
TASKS: Mapping[str, str] = {
    "match": "exact_match",
    "pick": "choice",
    "similar": "spearman",
    "words": "perplexity",
}
NOISE: Mapping[str, float] = {"base": 2.0, "merged": 1.0, VARIANT: 0.5, "expert": 0.1}
"""How far variants are from what is wanted; "merged" is clearly worse than the calibrated one."""


def results_of(metric: str, variant: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and references of n samples, the same samples for every variant."""
    drawn = np.random.default_rng(len(metric))
    wanted, noise = drawn.uniform(1, 5, n), drawn.normal(size=n)
    if metric == "spearman":
        return wanted + NOISE[variant] * noise, wanted
    if metric == "perplexity":
        tokens = np.ceil(wanted)
        return tokens * (1 + NOISE[variant] * drawn.uniform(0.5, 1.5, n)), tokens
    return (np.abs(noise) * NOISE[variant] < 0.7).astype(float), np.full(n, np.nan)


def write_scored_run(folder: Path, *, n: int = 60) -> DriftRun:
    size = Size(blocks=1, samples=12)
    variants = ("base", "merged", VARIANT)
    write_full_run(folder, tasks=tuple(TASKS), variants=variants, size=size, has_labels=False)
    with RunWriter.resume(folder) as writer:
        writer.update_manifest(
            calibrations={NAME: CalibrationInfo("featcal", {"rho": 1.0}, "", 1.0, dict.fromkeys(TASKS, 8))}
        )
        ids = [f"test/{at}" for at in range(n)]
        for task, metric in TASKS.items():
            writer.write_sample_ids(task, "test", ids)
            for variant in NOISE:
                values, references = results_of(metric, variant, n)
                key = {"task": task, "variant": variant, "metric": metric}
                rows = [
                    {**key, "sample_id": sample, "value": value, "reference": reference}
                    for sample, value, reference in zip(ids, values, references, strict=True)
                ]
                writer.append("scores", pd.DataFrame(rows))
                at = metric_interval(METRICS[metric], values, references)
                row = {**key, "value": at.value, "n": at.n, "ci_low": at.low, "ci_high": at.high, "seed": 0}
                writer.append("accuracy", pd.DataFrame([row]))
    return open_run(folder)
