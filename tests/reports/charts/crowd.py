"""A run of very many samples, with the tables and features that charts of samples need and nothing else."""

from __future__ import annotations

import pathlib

import numpy as np
import pandas as pd

from driftlens.runs.manifest import ModelInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from tests.records.full_run import layer_list

VARIANTS = ("merged", "baseline:featcal-anchor", "calibrated:featcal")


def write_crowd(path: pathlib.Path, count: int) -> DriftRun:
    """One task with `count` samples of 50 classes at the last layer."""
    rng = np.random.default_rng(0)
    ids = [f"test/{at}" for at in range(count)]
    labels = [f"class {at}" for at in rng.integers(0, 50, count)]
    expert = rng.normal(size=(count, 3)).astype(np.float32)
    layers = layer_list(1)
    with RunWriter.create(path, spec_yaml="name: crowd\n", spec_digest="0" * 64, name="crowd") as writer:
        models = {variant: ModelInfo(f"{at:064x}", 1) for at, variant in enumerate(VARIANTS, start=1)}
        writer.describe(tasks=["crowd"], variants=list(VARIANTS), layers=layers, models=models)
        writer.write_sample_ids("crowd", "diagnosis", ids)
        writer.write_features("crowd", "expert", 3, expert)
        for at, variant in enumerate(VARIANTS):
            drift = rng.normal(size=expert.shape).astype(np.float32) / (1 + at)
            writer.write_features("crowd", variant, 3, expert + drift)
            key = {"task": "crowd", "variant": variant, "sample_id": ids, "label": labels}
            size = np.linalg.norm(drift, axis=1).astype(float)
            cosine = rng.uniform(0.2, 1, count)
            writer.append("samples", pd.DataFrame({**key, "layer": 3, "drift_l2": size, "cos": cosine}))
            outputs = {"score_drift_l2": 2 * size, "score_gain": 3.0, "score_gain_certified": 4.0}
            writer.append("outputs", pd.DataFrame({**key, **outputs}))
    return open_run(path)
