"""A small saved run whose numbers belong together, for tests of records, reports and the app.

The rows are computed from the stored features: drift is variant minus expert, and local mismatch plus
propagation is drift. Nothing here needs torch or a model.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.runs.manifest import LayerInfo, ModelInfo
from driftlens.runs.writer import RunWriter

Array = NDArray[np.float64]

LAYERS = (
    LayerInfo(1, "stem", "visual.conv1"),
    LayerInfo(2, "block", "visual.transformer.resblocks.0"),
    LayerInfo(3, "block", "visual.transformer.resblocks.1"),
    LayerInfo(4, "head", "visual.ln_post"),
)
CLASSES = ("one", "two", "three")
SHARES = (0.1, 0.25, 0.5, 0.1)
NUM_SAMPLES, WIDTH = 6, 5


def write_run(
    path: pathlib.Path,
    *,
    name: str = "factory run",
    tasks: Sequence[str] = ("cars", "mnist"),
    variants: Sequence[str] = ("base", "merged"),
    synthetic: bool = False,
    has_labels: bool = True,
) -> pathlib.Path:
    """Write a finished run; without labels there are no scores, accuracies, closure errors or shares."""
    with RunWriter.create(path, spec_yaml=f"name: {name!r}\n", spec_digest="0" * 64, name=name) as writer:
        writer.describe(
            tasks=tasks,
            variants=variants,
            layers=LAYERS,
            synthetic=synthetic,
            device="cpu",
            dtype="float32",
            seeds={"data": 0},
            models={variant: ModelInfo("1" * 64, 1234) for variant in variants},
            classes=dict.fromkeys(tasks, CLASSES),
        )
        with writer.phase("analyze"):
            for position, task in enumerate(tasks):
                _write_task(writer, task, variants, np.random.default_rng(position), has_labels)
    return path


def sample_ids(split: str) -> list[str]:
    """Ids of a split's samples, the same for every task."""
    return [f"{split}/{position}" for position in range(NUM_SAMPLES)]


def _write_task(
    writer: RunWriter, task: str, variants: Sequence[str], rng: np.random.Generator, has_labels: bool
) -> None:
    for split in ("calibration", "diagnosis", "test"):
        writer.write_sample_ids(task, split, sample_ids(split))
    rows: dict[str, list[pd.DataFrame]] = {"layers": [], "samples": [], "outputs": []}
    for layer in LAYERS:
        expert = rng.normal(size=(NUM_SAMPLES, WIDTH))
        writer.write_features(task, "expert", layer.index, expert)
        for scale, variant in enumerate(variants, start=1):
            drift = rng.normal(size=expert.shape) * 0.2 * layer.index / scale
            mismatch = drift if layer.role == "stem" else 0.4 * drift + 0.05 * rng.normal(size=drift.shape)
            key = {"task": task, "variant": variant, "layer": layer.index}
            rows["samples"].append(_sample_rows(key, expert, drift, mismatch, has_labels))
            rows["layers"].append(_layer_row(key, layer, expert, drift, mismatch, has_labels))
            writer.write_features(task, variant, layer.index, expert + drift)
    rows["params"] = [_params_rows(task, variants, rng)]
    if has_labels:
        rows["accuracy"] = [_accuracy_rows(task, ("expert", *variants))]
        rows["outputs"] = [_output_rows(task, variant, rng) for variant in variants]
    for table, frames in rows.items():
        if frames:
            writer.append(table, pd.concat(frames, ignore_index=True))


def _layer_row(
    key: dict[str, object], layer: LayerInfo, expert: Array, drift: Array, mismatch: Array, has_labels: bool
) -> pd.DataFrame:
    size, cosine = _norm(drift), _cosine(expert, expert + drift)
    quantiles = {"median": 0.5, "q10": 0.1, "q25": 0.25, "q75": 0.75, "q90": 0.9}
    row = {
        **key,
        "role": layer.role,
        "path": layer.path,
        "n": len(drift),
        "reference": "expert",
        "drift_l2_mean": size.mean(),
        "drift_l2_std": size.std(),
        **{f"drift_l2_{short}": np.quantile(size, level) for short, level in quantiles.items()},
        "drift_rel": size.sum() / _norm(expert).sum(),
        "cos_mean": cosine.mean(),
        "cos_std": cosine.std(),
        "mismatch_l2_mean": _norm(mismatch).mean(),
        "propagation_l2_mean": _norm(drift - mismatch).mean(),
        "cross_term": 2 * (mismatch * (drift - mismatch)).sum() / (drift**2).sum(),
    }
    if has_labels:
        row |= {"closure_error": 1e-7 * layer.index, "final_share": SHARES[layer.index - 1]}
        row["remainder_share"] = 1 - sum(SHARES) if layer.role == "head" else None
    return pd.DataFrame([row])


def _sample_rows(
    key: dict[str, object], expert: Array, drift: Array, mismatch: Array, has_labels: bool
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            **key,
            "sample_id": sample_ids("diagnosis"),
            "label": _labels() if has_labels else None,
            "drift_l2": _norm(drift),
            "cos": _cosine(expert, expert + drift),
            "mismatch_l2": _norm(mismatch),
            "propagation_l2": _norm(drift - mismatch),
        }
    )


def _output_rows(task: str, variant: str, rng: np.random.Generator) -> pd.DataFrame:
    predicted = [str(name) for name in rng.choice(CLASSES, NUM_SAMPLES)]
    return pd.DataFrame(
        {
            "task": task,
            "variant": variant,
            "sample_id": sample_ids("diagnosis"),
            "label": _labels(),
            "expert_pred": _labels(),
            "pred": predicted,
            "flipped": [one != other for one, other in zip(predicted, _labels(), strict=True)],
            "margin": rng.uniform(0.1, 2.0, NUM_SAMPLES),
        }
    )


def _params_rows(task: str, variants: Sequence[str], rng: np.random.Generator) -> pd.DataFrame:
    rows = [
        {
            "variant": variant,
            "task": task,
            "path": "backbone",
            "scope": "backbone",
            "cos": rng.uniform(0.1, 0.9),
        }
        for variant in variants
        if variant != "base"
    ]
    return pd.DataFrame(rows)


def _accuracy_rows(task: str, variants: Sequence[str]) -> pd.DataFrame:
    values = {"expert": 0.96, "base": 0.41, "merged": 0.7325}
    rows = [
        {"task": task, "variant": variant, "metric": "accuracy", "value": values.get(variant, 0.8), "n": 400}
        for variant in variants
    ]
    return pd.DataFrame(rows).assign(
        ci_low=lambda f: f.value - 0.03, ci_high=lambda f: f.value + 0.03, seed=0
    )


def _labels() -> list[str]:
    return [CLASSES[position % len(CLASSES)] for position in range(NUM_SAMPLES)]


def _norm(vectors: Array) -> Array:
    return np.linalg.norm(vectors, axis=1)


def _cosine(one: Array, other: Array) -> Array:
    return (one * other).sum(axis=1) / (_norm(one) * _norm(other))
