"""Runs with features to lay out, and how tests read a layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from driftlens.findings.projection import Projection
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from tests.records.full_run import layer_list

Array = NDArray[np.float64]


def run_of(path: Path, features: dict[str, Array], task: str = "cars") -> DriftRun:
    """A run that has just these features, at its head, by role."""
    with RunWriter.create(path, spec_yaml="", spec_digest="0" * 64, name="bare") as writer:
        variants = [role for role in features if role != "expert"]
        writer.describe(tasks=[task], variants=variants, layers=layer_list(0))
        writer.write_sample_ids(task, "diagnosis", [f"test/{at}" for at in range(len(features["expert"]))])
        for role, array in features.items():
            writer.write_features(task, role, 2, array)
    return open_run(path)


def cloud(n: int, d: int = 6, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, d))


def places(found: Projection, variant: str) -> Array:
    return found.frame[found.frame["variant"] == variant][["x", "y"]].to_numpy()


def directions(run: DriftRun, variant: str, layer: int | str = "final") -> Array:
    rows = run.features("cars", variant, layer).astype(float)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
