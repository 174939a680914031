"""Table rows of the run that `full_run.py` writes, computed from its features.

What needs a model (Jacobians, gains, objectives) is made up within its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.runs.manifest import LayerInfo

Array = NDArray[np.float64]
Columns = dict[str, object]
"""Some rows of a table by column, a value that is the same in all of them alone."""

REMAINDER = 0.02
"""Share of the final drift that is left to no layer: more than the self-check allows, so that every such run has a
self-check that fails, and reports of it a caveat to tell."""
SITES = ("attn.q_proj", "attn.out_proj", "ln_2", "mlp.c_fc")


@dataclass(frozen=True)
class Boundary:
    """What one variant makes of one task's samples at one boundary; arrays [n, d].

    Attributes:
        task: of the samples.
        variant: whose features they are.
        layer: the layer behind which the boundary lies.
        expert: the expert's features.
        drift: variant minus expert.
        mismatch: the layer's own part of the drift.
        incoming: drift at the boundary before; None behind the stem.
        base_drift: the base's planned drift.
    """

    task: str
    variant: str
    layer: LayerInfo
    expert: Array
    drift: Array
    mismatch: Array
    incoming: Array | None
    base_drift: Array

    @property
    def key(self) -> dict[str, object]:
        return {"task": self.task, "variant": self.variant, "layer": self.layer.index}

    @property
    def propagation(self) -> Array:
        return self.drift - self.mismatch

    @property
    def amplification(self) -> Array | None:
        return None if self.incoming is None else norm(self.propagation) / norm(self.incoming)

    @property
    def cosine(self) -> Array:
        other = self.expert + self.drift
        return (self.expert * other).sum(axis=1) / (norm(self.expert) * norm(other))


@dataclass(frozen=True)
class Samples:
    """The diagnosis samples of a task and what they are.

    Attributes:
        ids: of the samples.
        classes: names of the classes.
        own: each sample's class, as an index.
        has_labels: whether the tables may say so.
    """

    ids: Sequence[str]
    classes: Sequence[str]
    own: NDArray[np.int64]
    has_labels: bool

    @property
    def columns(self) -> dict[str, object]:
        labels = [self.classes[at] for at in self.own] if self.has_labels else None
        return {"sample_id": self.ids, "label": labels}


def layer_row(at: Boundary, share: float | None, rng: np.random.Generator | None) -> Columns:
    """The row of the layers table; `share` is the layer's share of the final drift among all layers'."""
    row = {**at.key, "role": at.layer.role, "path": at.layer.path, "n": len(at.drift), "reference": "expert"}
    row |= _sizes(at)
    if rng is not None:
        row |= {"closure_error": 1e-7 * at.layer.index} | _growth(at, rng)
    if share is not None:
        row["final_share"] = (1 - REMAINDER) * share
        row["prefix_share"] = share
        row["remainder_share"] = REMAINDER if at.layer.role == "head" else None
    return row


def sample_rows(at: Boundary, share: float | None, samples: Samples) -> Columns:
    return {
        **at.key,
        **samples.columns,
        "drift_l2": norm(at.drift),
        "cos": at.cosine,
        "mismatch_l2": norm(at.mismatch),
        "propagation_l2": norm(at.propagation),
        "amplification": at.amplification,
        "final_share": None if share is None else (1 - REMAINDER) * share,
    }


def adjoint_rows(at: Boundary, share: float, samples: Samples) -> list[Columns]:
    """The layer's part in the change of every target."""
    parts = []
    for target, change in (("final_drift", 1.0), ("loss", 0.4), ("margin", -0.7)):
        rows: Columns = {**at.key, "target": target, "sample_id": samples.ids, "change": change}
        rows["part"] = (1 - REMAINDER) * share * change
        rows["remainder"] = REMAINDER * change if at.layer.role == "head" else None
        parts.append(rows)
    return parts


def output_rows(
    task: str, variant: str, feature: Array, expert: Array, heads: Array, samples: Samples
) -> pd.DataFrame:
    """Scores are 10 times the cosine with each class's row of `heads`."""
    scores, wanted = (10 * unit(vectors) @ heads.T for vectors in (feature, expert))
    log_p, log_q = _log_softmax(scores), _log_softmax(wanted)
    pred, expert_pred = scores.argmax(axis=1), wanted.argmax(axis=1)
    rows: dict[str, object] = {
        "task": task,
        "variant": variant,
        **samples.columns,
        "expert_pred": [samples.classes[index] for index in expert_pred],
        "pred": [samples.classes[index] for index in pred],
        "flipped": pred != expert_pred,
        **_score_drift(scores, wanted, norm(feature - expert), 10 * np.linalg.norm(heads, 2) / norm(expert)),
        "confidence": np.exp(log_p.max(axis=1)),
        "confidence_expert": np.exp(log_q.max(axis=1)),
        "kl": (np.exp(log_p) * (log_p - log_q)).sum(axis=1),
        "softmax_integral_error": 1e-14,
    }
    if samples.has_labels:
        at = np.arange(len(samples.own))
        rows |= {"ce": -log_p[at, samples.own], "ce_expert": -log_q[at, samples.own]}
        rows["ce_integral_error"] = 1e-13
    return pd.DataFrame(rows)


def params_rows(task: str, variant: str, layers: Sequence[LayerInfo], rng: np.random.Generator) -> pd.DataFrame:
    paths = [("backbone", ""), *(("layer", layer.path) for layer in layers)]
    paths += [("module", f"{layer.path}.{site}") for layer in layers[1:-1] for site in SITES]
    cosines = rng.uniform(0.2, 0.6, len(paths)) - (0.1 if variant.startswith("calibrated") else 0)
    frame = pd.DataFrame(paths, columns=["scope", "path"])
    return frame.assign(variant=variant, task=task, cos=cosines, norm_ratio=0.8, sign_agreement=0.6)


def accuracy_rows(task: str, variants: Sequence[str], tests: int, hardness: float) -> pd.DataFrame:
    """Every variant loses so much to the expert, more where the task is harder."""
    loss = {"expert": 0.02, "base": 0.45, "merged": 0.25, "baseline:featcal-anchor": 0.22}
    rows = []
    for variant in ("expert", *variants):
        value = round(tests * (1 - loss.get(variant, 0.1) * hardness)) / tests
        row = {"task": task, "variant": variant, "metric": "accuracy", "value": value, "seed": 0}
        rows.append(row | {"n": tests, "ci_low": value - 0.02, "ci_high": min(1.0, value + 0.02)})
    return pd.DataFrame(rows)


def calibration_rows(name: str, layers: Sequence[LayerInfo]) -> pd.DataFrame:
    rows = [
        {
            "name": name,
            "layer": layer.index,
            "site": f"{layer.path}.{site}",
            "kind": "norm" if site.startswith("ln") else "weight",
            "lam": 0.05,
            "objective_before": 2.0 * layer.index,
            "objective_after": 0.5 * layer.index,
            "weight_change": 0.01 * layer.index,
            "condition_estimate": 150.0,
            "stationarity_error": 1e-13,
            "seconds": 0.01,
        }
        for layer in layers[1:-1]
        for site in SITES
    ]
    return pd.DataFrame(rows)


def joined(parts: Sequence[Columns | pd.DataFrame]) -> pd.DataFrame:
    """All rows in one frame: making a frame of each part would take most of a run's time."""
    if isinstance(parts[0], pd.DataFrame):
        return pd.concat(parts, ignore_index=True)
    rows: dict[str, list[object]] = {name: [] for part in parts for name in part}
    for part in parts:
        count = max((len(at) for at in part.values() if isinstance(at, list | np.ndarray)), default=1)
        for name, column in rows.items():
            value = part.get(name)
            column.extend(value if isinstance(value, list | np.ndarray) else [value] * count)
    return pd.DataFrame(rows)


def norm(vectors: Array) -> Array:
    return np.linalg.norm(vectors, axis=1)


def unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _sizes(at: Boundary) -> dict[str, object]:
    size, cosine = norm(at.drift), at.cosine
    levels = {"median": 0.5, "q10": 0.1, "q25": 0.25, "q75": 0.75, "q90": 0.9}
    quantiles = zip(levels, np.quantile(size, [*levels.values()]), strict=True)
    return {
        "drift_l2_mean": size.mean(),
        "drift_l2_std": size.std(),
        **{f"drift_l2_{short}": value for short, value in quantiles},
        "drift_rel": size.sum() / norm(at.expert).sum(),
        "drift_vs_base": size.sum() / norm(at.base_drift).sum(),
        "cos_mean": cosine.mean(),
        "cos_std": cosine.std(),
        "mismatch_l2_mean": norm(at.mismatch).mean(),
        "propagation_l2_mean": norm(at.propagation).mean(),
        "cross_term": 2 * (at.mismatch * at.propagation).sum() / (at.drift**2).sum(),
    }


def _growth(at: Boundary, rng: np.random.Generator) -> dict[str, object]:
    """What there is only where drift comes in."""
    if at.incoming is None or at.amplification is None:
        return {}
    before, amplification = norm(at.incoming), at.amplification
    gamma, eta = amplification - 1, norm(at.mismatch) / before
    row: dict[str, object] = {
        "amplification": norm(at.propagation).sum() / before.sum(),
        "gain_excess_mean": gamma.mean(),
        "mismatch_ratio_mean": eta.mean(),
        "growth_holds": float((gamma > eta).mean()),
        "jacobian_error": 1e-5 * rng.random(),
        "nodes": 4,
        "jacobian_samples": len(at.drift),
        "random_gain_mean": 0.8 + 0.1 * rng.random(),
        "spectral_norm_mean": 2.0 * amplification.max(),
        "spectral_residual_max": 1e-3,
    }
    if at.layer.role == "block":
        row["residual_l2_mean"] = norm(at.propagation - at.incoming).mean()
    return row


def _score_drift(scores: Array, wanted: Array, drift: Array, gain: Array) -> dict[str, object]:
    """How far scores moved, estimates of their gain in their order, and what the bound certifies."""
    change = scores - wanted
    secant, largest = norm(change) / drift, abs(change).max(axis=1)
    ordered = np.sort(wanted, axis=1)
    margin = ordered[:, -1] - ordered[:, -2]
    certified = np.maximum(2 * gain, 2 * secant)
    return {
        "score_drift_l2": norm(change),
        "score_drift_inf": largest,
        "score_gain_secant": secant,
        "score_gain": 1.1 * secant,
        "score_gain_spectral": 1.6 * secant,
        "score_gain_certified": certified,
        "score_bound": certified * drift,
        "score_map_mismatch": 0.0,
        "margin": margin,
        "certified": largest < margin / 2,
    }


def _log_softmax(scores: Array) -> Array:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
