"""A saved run with everything in it, of any size: for tests of charts, reports, exhibits and the app.

Features come first; every number that follows from features is computed from them, so that tables agree with one
another: drift is variant minus expert, m + p = e, shares and remainder sum to 1, flips follow from scores. What needs
a model (Jacobians, gains) is made up within its range. Nothing here needs torch.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.records.manifest import LayerInfo, ModelInfo
from driftlens.records.schema import TABLES
from driftlens.records.writer import RunWriter

Array = NDArray[np.float64]

VARIANTS = ("base", "merged", "baseline:featcal-anchor", "calibrated:featcal")
STRENGTH = {"base": 1.3, "merged": 1.0, "baseline:featcal-anchor": 0.9, "calibrated:featcal": 0.45}
"""How much of the planned drift each variant has; others have 0.7."""
SITES = ("attn.q_proj", "attn.out_proj", "ln_2", "mlp.c_fc")


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    blocks: int = 4
    samples: int = 24
    width: int = 8
    classes: int = 3
    tests: int = 400


def layer_list(blocks: int) -> tuple[LayerInfo, ...]:
    """Stem, blocks and head under open_clip's names."""
    inner = [LayerInfo(at + 2, "block", f"visual.transformer.resblocks.{at}") for at in range(blocks)]
    return (LayerInfo(1, "stem", "visual.conv1"), *inner, LayerInfo(blocks + 2, "head", "visual.ln_post"))


def write_full_run(
    path: pathlib.Path,
    *,
    name: str = "full run",
    tasks: Sequence[str] = ("cars", "mnist", "dtd"),
    variants: Sequence[str] = VARIANTS,
    class_names: Sequence[str] | None = None,
    size: Size | None = None,
    has_labels: bool = True,
    synthetic: bool = False,
    seed: int = 0,
) -> pathlib.Path:
    """Write a finished run; without labels there are no labels, accuracies and losses."""
    made = _Made(tasks, variants, size or Size(), class_names, has_labels, seed)
    with RunWriter.create(path, spec_yaml=f"name: {name!r}\n", spec_digest="0" * 64, name=name) as writer:
        writer.describe(
            tasks=tasks,
            variants=variants,
            layers=made.layers,
            synthetic=synthetic,
            device="cpu",
            dtype="float32",
            seeds={"data": seed},
            architecture={"adapter": "open_clip_vit", "loader": "open-clip", "source": "ViT-tiny"},
            preprocessing="PIL",
            models={variant: ModelInfo(f"{at:064x}", 1234) for at, variant in enumerate(variants, start=1)},
            classes=dict.fromkeys(tasks, made.classes),
        )
        with writer.phase("analyze"):
            for task in tasks:
                made.write(writer, task)
            for table, rows in made.rows.items():
                if rows:
                    writer.append(table, pd.concat(rows, ignore_index=True))
    return path


class _Made:
    """Everything of one run, by task."""

    def __init__(
        self,
        tasks: Sequence[str],
        variants: Sequence[str],
        size: Size,
        class_names: Sequence[str] | None,
        has_labels: bool,
        seed: int,
    ) -> None:
        self.layers = layer_list(size.blocks)
        self.classes = list(class_names or [f"class {at}" for at in range(size.classes)])
        self.rows: dict[str, list[pd.DataFrame]] = {table: [] for table in TABLES if table != "resources"}
        self._variants, self._size, self._has_labels = list(variants), size, has_labels
        self._rng = np.random.default_rng(seed)
        self._ids = [f"test/{at}" for at in range(size.samples)]
        self._labels = [self.classes[at % len(self.classes)] for at in range(size.samples)]
        self._calibrations = [v.partition(":")[2] for v in variants if v.startswith("calibrated:")]
        for calibration in self._calibrations:
            self.rows["calibration"].append(self._calibration_rows(calibration))

    def write(self, writer: RunWriter, task: str) -> None:
        """Features and rows of one task."""
        rng, size = self._rng, self._size
        for split, count in (
            ("calibration", size.samples),
            ("diagnosis", size.samples),
            ("test", size.tests),
        ):
            start = "train" if split == "calibration" else "test"
            writer.write_sample_ids(task, split, [f"{start}/{at}" for at in range(count)])
        centres = rng.normal(size=(len(self.classes), size.width))
        own = np.array([at % len(self.classes) for at in range(size.samples)])
        hardness = rng.uniform(0.5, 1.5)
        final: dict[str, Array] = {}
        drifts: dict[str, Array] = {}
        for layer in self.layers:
            expert = 2 * centres[own] + rng.normal(size=(size.samples, size.width))
            plan = rng.normal(size=expert.shape) * 0.25 * layer.index * hardness
            writer.write_features(task, "expert", layer.index, expert)
            final["expert"] = expert
            for variant in self._variants:
                noise = 0.05 * layer.index * rng.normal(size=plan.shape)
                drift = STRENGTH.get(variant, 0.7) * plan + noise
                incoming = drifts.get(variant)
                share = 0.4 + 0.2 * rng.random()
                mismatch = drift if layer.role == "stem" else share * drift + 0.1 * noise
                writer.write_features(task, variant, layer.index, expert + drift)
                self._add_layer(
                    task, variant, layer, expert, drift, mismatch, incoming, STRENGTH.get("base", 1) * plan
                )
                drifts[variant], final[variant] = drift, expert + drift
        heads = centres / np.linalg.norm(centres, axis=1, keepdims=True)
        for variant in self._variants:
            self._add_outputs(task, variant, final[variant], final["expert"], heads, own)
            self._add_params(task, variant)
        if self._has_labels:
            self._add_accuracy(task, hardness)

    def _add_layer(
        self,
        task: str,
        variant: str,
        layer: LayerInfo,
        expert: Array,
        drift: Array,
        mismatch: Array,
        incoming: Array | None,
        to_base: Array,
    ) -> None:
        rng, key = self._rng, {"task": task, "variant": variant, "layer": layer.index}
        size, own, passed = _norm(drift), _norm(mismatch), _norm(drift - mismatch)
        cosine = _cosine(expert, expert + drift)
        shares = np.array([0.1, *np.linspace(0.05, 0.4, self._size.blocks), 0.1])
        shares = 0.98 * shares / shares.sum()
        levels = {"median": 0.5, "q10": 0.1, "q25": 0.25, "q75": 0.75, "q90": 0.9}
        row: dict[str, object] = {
            **key,
            "role": layer.role,
            "path": layer.path,
            "n": len(drift),
            "reference": "expert",
            "drift_l2_mean": size.mean(),
            "drift_l2_std": size.std(),
            **{f"drift_l2_{short}": np.quantile(size, level) for short, level in levels.items()},
            "drift_rel": size.sum() / _norm(expert).sum(),
            "drift_vs_base": size.sum() / _norm(to_base).sum(),
            "cos_mean": cosine.mean(),
            "cos_std": cosine.std(),
            "mismatch_l2_mean": own.mean(),
            "propagation_l2_mean": passed.mean(),
            "cross_term": 2 * (mismatch * (drift - mismatch)).sum() / (drift**2).sum(),
            "closure_error": 1e-7 * layer.index,
            "cka": 1 - 0.05 * layer.index * STRENGTH.get(variant, 0.7),
        }
        amplification = None
        if incoming is not None:
            before = _norm(incoming)
            amplification = passed / before
            gamma, eta = amplification - 1, own / before
            row |= {
                "amplification": passed.sum() / before.sum(),
                "gain_excess_mean": gamma.mean(),
                "mismatch_ratio_mean": eta.mean(),
                "growth_holds": float((gamma > eta).mean()),
                "jacobian_error": 1e-5 * rng.random(),
                "nodes": 4,
                "jacobian_samples": len(drift),
                "random_gain_mean": 0.8 + 0.1 * rng.random(),
                "spectral_norm_mean": 2.0 * amplification.max(),
                "spectral_residual_max": 1e-3,
            }
            if layer.role == "block":
                row["residual_l2_mean"] = _norm(drift - mismatch - incoming).mean()
        if variant != "base":
            row["final_share"] = shares[layer.index - 1]
            row["prefix_share"] = shares[layer.index - 1] / 0.98
            row["remainder_share"] = 0.02 if layer.role == "head" else None
        self.rows["layers"].append(pd.DataFrame([row]))
        self.rows["samples"].append(
            pd.DataFrame(
                {
                    **key,
                    "sample_id": self._ids,
                    "label": self._labels if self._has_labels else None,
                    "drift_l2": size,
                    "cos": cosine,
                    "mismatch_l2": own,
                    "propagation_l2": passed,
                    "amplification": amplification,
                    "final_share": row.get("final_share"),
                }
            )
        )
        if variant != "base":
            self._add_adjoint(key, shares[layer.index - 1], layer.role == "head")

    def _add_adjoint(self, key: dict[str, object], share: float, is_head: bool) -> None:
        for target, change in (("final_drift", 1.0), ("loss", 0.4), ("margin", -0.7)):
            rows = {**key, "target": target, "sample_id": self._ids, "part": share * change, "change": change}
            rows["remainder"] = 0.02 * change if is_head else None
            self.rows["adjoint"].append(pd.DataFrame(rows))

    def _add_outputs(
        self, task: str, variant: str, feature: Array, expert: Array, heads: Array, own: NDArray[np.int64]
    ) -> None:
        scores, wanted = (10 * _unit(vectors) @ heads.T for vectors in (feature, expert))
        change = scores - wanted
        ordered = np.sort(wanted, axis=1)
        margin = ordered[:, -1] - ordered[:, -2]
        drift = _norm(feature - expert)
        gain = 10 * np.linalg.norm(heads, 2) / _norm(expert)
        log_p, log_q = _log_softmax(scores), _log_softmax(wanted)
        at = np.arange(len(own))
        pred, expert_pred = scores.argmax(axis=1), wanted.argmax(axis=1)
        rows: dict[str, object] = {
            "task": task,
            "variant": variant,
            "sample_id": self._ids,
            "label": self._labels if self._has_labels else None,
            "expert_pred": [self.classes[index] for index in expert_pred],
            "pred": [self.classes[index] for index in pred],
            "flipped": pred != expert_pred,
            "score_drift_l2": _norm(change),
            "score_drift_inf": abs(change).max(axis=1),
            "score_gain_secant": _norm(change) / drift,
            "score_gain": 1.1 * _norm(change) / drift,
            "score_gain_spectral": 1.6 * _norm(change) / drift,
            "score_gain_certified": np.maximum(2 * gain, 2 * _norm(change) / drift),
            "score_bound": np.maximum(2 * gain, 2 * _norm(change) / drift) * drift,
            "score_map_mismatch": 0.0,
            "margin": margin,
            "certified": abs(change).max(axis=1) < margin / 2,
            "confidence": np.exp(log_p.max(axis=1)),
            "confidence_expert": np.exp(log_q.max(axis=1)),
            "kl": (np.exp(log_p) * (log_p - log_q)).sum(axis=1),
            "softmax_integral_error": 1e-14,
        }
        if self._has_labels:
            rows |= {"ce": -log_p[at, own], "ce_expert": -log_q[at, own], "ce_integral_error": 1e-13}
        self.rows["outputs"].append(pd.DataFrame(rows))

    def _add_params(self, task: str, variant: str) -> None:
        if variant == "base":
            return
        paths = [("backbone", ""), *(("layer", layer.path) for layer in self.layers)]
        paths += [("module", f"{layer.path}.{site}") for layer in self.layers[1:-1] for site in SITES]
        cosines = self._rng.uniform(0.2, 0.6, len(paths)) - (0.1 if variant.startswith("calibrated") else 0)
        frame = pd.DataFrame(paths, columns=["scope", "path"])
        self.rows["params"].append(
            frame.assign(variant=variant, task=task, cos=cosines, norm_ratio=0.8, sign_agreement=0.6)
        )

    def _add_accuracy(self, task: str, hardness: float) -> None:
        loss = {"expert": 0.02, "base": 0.45, "merged": 0.25, "baseline:featcal-anchor": 0.22}
        for variant in ("expert", *self._variants):
            value = round(self._size.tests * (1 - loss.get(variant, 0.1) * hardness)) / self._size.tests
            row = {"task": task, "variant": variant, "metric": "accuracy", "value": value, "seed": 0}
            row |= {"n": self._size.tests, "ci_low": value - 0.02, "ci_high": min(1.0, value + 0.02)}
            self.rows["accuracy"].append(pd.DataFrame([row]))

    def _calibration_rows(self, name: str) -> pd.DataFrame:
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
                "seconds": 0.01,
            }
            for layer in self.layers[1:-1]
            for site in SITES
        ]
        return pd.DataFrame(rows)


def _norm(vectors: Array) -> Array:
    return np.linalg.norm(vectors, axis=1)


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _cosine(one: Array, other: Array) -> Array:
    return (one * other).sum(axis=1) / (_norm(one) * _norm(other))


def _log_softmax(scores: Array) -> Array:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
