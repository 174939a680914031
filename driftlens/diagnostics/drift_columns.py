"""Columns of the tables: drift per sample and layer, output drift, and alignment of task vectors.

Norms and cosines use pooled vectors; amplification and growth use the full state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import jvp, vjp

from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import GROUPS, parameter_roles
from driftlens.engine.walk import drift_columns
from driftlens.linalg.state import (
    cross_entropy_change,
    forward_mode_attention,
    gauss_legendre,
    linear_cka,
    softmax_change,
)
from driftlens.models.chain import Layer, LayerChain, WeightSlot
from driftlens.models.heads import (
    Head,
    LinearHead,
    LmHead,
    ScoreJacobian,
    ScoreMap,
    class_indices,
    is_vocabulary_head,
)
from driftlens.runs.schema import LAYERS, OUTPUTS, PARAMS, SAMPLES
from driftlens.utils.intervals import bootstrap_counts
from driftlens.utils.registry import DiagnosticInput, diagnostic
from driftlens.utils.variants import expert_name

QUANTILES = (10, 25, 75, 90)
GAIN_NODES = 4
GAIN_ITERATIONS = 30
# Scores of one model in memory at a time: 64 MiB in float64. A vocabulary's scores of all samples would be gigabytes.
_SCORES = 1 << 23
# Entries of a task vector that are widened to float64 at a time, 2 MiB: larger pieces leave the cache and take five
# times as long.
_PIECE = 2**18


_AS_SEEN = ("drift_l2", "cos", "mismatch_l2", "propagation_l2")
_OF_LAYERS = (
    *(name for name in LAYERS.names if name.startswith(("drift_", "amplification"))),
    *("cos_mean", "cos_std", "mismatch_l2_mean", "propagation_l2_mean", "cross_term", "residual_l2_mean"),
    *("gain_excess_mean", "mismatch_ratio_mean", "growth_holds"),
    *("rerouted", "rerouted_l2_mean", "rerouted_share"),
)


@diagnostic(
    "sample_drift",
    table="samples",
    columns=SAMPLES.select_columns(*_AS_SEEN, "amplification"),
    needs="view",
    option="",
    per_view=drift_columns,
)
def _sample_drift_columns(seen: DiagnosticInput) -> dict[str, NDArray[np.float64]]:
    """Return the drift columns of the sample table; ratios over zero are NaN."""
    columns = seen.columns
    amplification = _ratio_or_nan(columns["state_propagation"], columns["state_in"])
    return {name: columns[name] for name in _AS_SEEN} | {"amplification": amplification}


@diagnostic("drift", columns=LAYERS.select_columns(*_OF_LAYERS), needs="view", option="", per_view=drift_columns)
def _layer_drift_columns(seen: DiagnosticInput) -> dict[str, float]:
    """Compute the columns of the layer table that follow from drift alone.

    Means, standard deviations (divided by n) and quantiles are over samples; ratios are ratios of sums over samples.
    Undefined values are NaN: ratios over zero, and growth without incoming drift or in a layer that is not residual.
    """
    columns, base = seen.columns, seen.base
    drift = columns["drift_l2"]
    gain_excess = _ratio_or_nan(columns["state_propagation"], columns["state_in"]) - 1
    mismatch_ratio = _ratio_or_nan(columns["state_mismatch"], columns["state_in"])
    defined = ~np.isnan(gain_excess)
    ends = bootstrap_ratio_ci(columns["state_propagation"][None], columns["state_in"])[:, 0]
    values = {
        "drift_l2_mean": drift.mean(),
        "drift_l2_std": drift.std(),
        "drift_l2_median": np.median(drift),
        **{f"drift_l2_q{q}": np.quantile(drift, q / 100) for q in QUANTILES},
        "drift_rel": _ratio_of_sums(drift, columns["expert_l2"]),
        "drift_vs_base": np.nan if base is None else _ratio_of_sums(drift, base["drift_l2"]),
        "cos_mean": _mean_without_nan(columns["cos"]),
        "cos_std": _std_without_nan(columns["cos"]),
        "mismatch_l2_mean": columns["mismatch_l2"].mean(),
        "propagation_l2_mean": columns["propagation_l2"].mean(),
        "cross_term": _ratio_of_sums(columns["mixed"] * columns["unit"] ** 2, drift**2),
        "amplification": _ratio_of_sums(columns["state_propagation"], columns["state_in"]),
        **dict(zip(("amplification_low", "amplification_high"), ends, strict=True)),
    }
    if "residual_l2" in columns:
        holds = (gain_excess > 0) & (mismatch_ratio < gain_excess)
        values |= {
            "residual_l2_mean": columns["residual_l2"].mean(),
            "gain_excess_mean": _mean_without_nan(gain_excess),
            "mismatch_ratio_mean": _mean_without_nan(mismatch_ratio),
            "growth_holds": holds[defined].mean() if defined.any() else np.nan,
        }
    if "rerouted" in columns:
        values |= {
            "rerouted": columns["rerouted"].mean(),
            "rerouted_l2_mean": columns["rerouted_l2"].mean(),
            "rerouted_share": _ratio_of_sums(columns["rerouted_along"] * columns["unit"] ** 2, drift**2),
        }
    return {name: float(value) for name, value in values.items()}


def bootstrap_ratio_ci(parts: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute 95 % intervals of sum(parts) / sum(whole) by the percentile bootstrap.

    Numerator and denominator are resampled together, `RESAMPLES` times with replacement and with fixed random
    numbers. Resamples whose denominator is 0 are left out.

    Args:
        parts: numerators, [rows, n].
        whole: denominators, [n], at least 0.

    Returns:
        Lower and upper ends, [2, rows]; NaN for a single sample.
    """
    rows, n = parts.shape
    if n < 2 or not whole.sum() > 0:
        return np.full((2, rows), np.nan)
    # Resamples as counts of each sample turn all sums into one matrix product.
    counts = bootstrap_counts(n)
    sums = counts @ whole
    ratios = (counts @ parts.T)[sums > 0] / sums[sums > 0, None]
    return np.quantile(ratios, (0.025, 0.975), axis=0)


def _ratio_or_nan(over: NDArray[np.float64], under: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(over, under, out=np.full_like(over, np.nan), where=under > 0)


def _ratio_of_sums(over: NDArray[np.float64], under: NDArray[np.float64]) -> float:
    total = under.sum()
    return float(over.sum() / total) if total > 0 else np.nan


def _mean_without_nan(values: NDArray[np.float64]) -> float:
    # Not `nanmean`, which warns if all values are NaN.
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else np.nan


def _std_without_nan(values: NDArray[np.float64]) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.std()) if len(defined) else np.nan


@diagnostic("cka", columns=LAYERS.select_columns("cka"))
def cka(seen: DiagnosticInput) -> dict[str, float]:
    """Compute debiased linear CKA between the variant's and the expert's features, in float64."""
    return {"cka": float(linear_cka(*(torch.from_numpy(rows).double() for rows in (seen.variant, seen.expert))))}


def output_drift_columns(
    head: ScoreMap,
    expert: Tensor,
    variant: Tensor,
    labels: Tensor | None,
    *,
    expert_head: ScoreMap | None = None,
) -> dict[str, Tensor]:
    """Compare a variant's scores with the expert's, sample by sample (FeatCal, arXiv:2605.13030).

    Delta z = score map(variant) - score map(expert) (Eq. 6) is at most B |e_L| plus the score-map mismatch (Eq. 7),
    which is the distance of the two score maps on the expert's features (0 if they are shared, as in CLIP). A
    decision is certified if |Delta z|_inf < margin / 2, where the margin is the expert's best score minus its second
    best (Eq. 44): then both models decide alike. Ties and single classes have no certificate.

    Args:
        head: the variant's score map for the task.
        expert: final features of the expert, [n, d].
        variant: final features of the variant, [n, d].
        labels: row of the true class, [n], or None.
        expert_head: the expert's score map, with the same classes; None if it is `head`.

    Returns:
        Columns [n], see `driftlens.runs.schema.OUTPUTS`; predictions as rows of the head, `ce` only with labels.
    """
    expert, variant = expert.double(), variant.double()
    scores, expert_scores = head.scores(variant), (expert_head or head).scores(expert)
    drift = scores - expert_scores
    log_p, expert_log_p = scores.log_softmax(dim=1), expert_scores.log_softmax(dim=1)
    # Of a vocabulary, scores are most of the work: each is made once.
    start_scores = expert_scores if expert_head is None or expert_head is head else head.scores(expert)
    mismatch = torch.linalg.vector_norm(start_scores - expert_scores, dim=1)
    gains = score_gains(head, expert, variant, scores - start_scores)
    columns = {
        "expert_pred": expert_scores.argmax(dim=1),
        "pred": scores.argmax(dim=1),
        "score_drift_l2": torch.linalg.vector_norm(drift, dim=1),
        "score_drift_inf": drift.abs().amax(dim=1),
        "score_gain_secant": gains.secant,
        "score_gain": gains.directional,
        "score_gain_spectral": gains.spectral,
        "score_gain_certified": gains.certified,
        "score_bound": gains.certified * torch.linalg.vector_norm(variant - expert, dim=1) + mismatch,
        "score_map_mismatch": mismatch,
        "margin": _decision_margin(expert_scores),
        **_decision_columns(expert_scores, scores),
        # Rounding may leave the logarithm of a certain class a hair above 0; no probability exceeds 1.
        "confidence": log_p.amax(dim=1).exp().clamp_max(1.0),
        "confidence_expert": expert_log_p.amax(dim=1).exp().clamp_max(1.0),
        "softmax_integral_error": (softmax_change(expert_scores, drift) - (log_p.exp() - expert_log_p.exp()))
        .abs()
        .amax(dim=1),
    }
    if labels is not None:
        rows = labels.to(scores.device)
        columns["ce"] = -log_p.gather(1, rows[:, None])[:, 0]
        columns["ce_expert"] = -expert_log_p.gather(1, rows[:, None])[:, 0]
        change = columns["ce"] - columns["ce_expert"]
        columns["ce_integral_error"] = (cross_entropy_change(expert_scores, drift, rows) - change).abs()
    return columns


def _decision_columns(expert_scores: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """Return `flipped`, `certified` and `kl`, [n] each, from the scores [n, c] of both models."""
    log_p, expert_log_p = scores.log_softmax(dim=1), expert_scores.log_softmax(dim=1)
    return {
        "flipped": scores.argmax(dim=1) != expert_scores.argmax(dim=1),
        "certified": (scores - expert_scores).abs().amax(dim=1) < _decision_margin(expert_scores) / 2,
        # Rounding may leave the divergence of equal distributions a hair below 0.
        "kl": (expert_log_p.exp() * (expert_log_p - log_p)).sum(dim=1).clamp_min(0),
    }


@diagnostic("output", table="outputs", columns=OUTPUTS.columns[len(OUTPUTS.key) + 1 :], option="")
def _output_columns_by_chunk(seen: DiagnosticInput) -> dict[str, Any]:
    """Return the output drift columns, in chunks of samples; `token_` columns for language models."""
    head: ScoreMap = seen.head
    # A language model's decisions are compared over all tokens too, not only those of the classes.
    of_tokens = [
        replace(lm_head, classes=(), tokens=None)
        for lm_head in (seen.expert_head, head)
        if isinstance(lm_head, LmHead)
    ]
    rows = max(1, _SCORES // max([len(head.classes), 1, *(lm_head.vocabulary_size for lm_head in of_tokens)]))
    labels = class_indices(head, seen.labels) if seen.labels is not None else None
    parts: list[dict[str, Tensor]] = []
    for begin in range(0, len(seen.variant), rows):
        chunk = slice(begin, begin + rows)
        expert, variant = (
            torch.from_numpy(seen.expert[chunk]).double(),
            torch.from_numpy(seen.variant[chunk]).double(),
        )
        columns = decided = output_drift_columns(
            head, expert, variant, None if labels is None else labels[chunk], expert_head=seen.expert_head
        )
        if len(of_tokens) == 2:
            # A head over the vocabulary has compared all tokens already.
            if not is_vocabulary_head(head):
                decided = _decision_columns(
                    *(lm_head.scores(x) for lm_head, x in zip(of_tokens, (expert, variant), strict=True))
                )
            columns = columns | {f"token_{name}": decided[name] for name in ("flipped", "certified", "kl")}
        parts.append(columns)
    joined = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    names = np.array(head.classes, dtype=object)
    return joined | {name: names[joined[name]] for name in ("expert_pred", "pred")}


def _decision_margin(scores: Tensor) -> Tensor:
    if scores.shape[1] < 2:
        return torch.full_like(scores[:, 0], float("nan"))
    best = scores.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class _ScoreGains:
    """Lipschitz estimates of the score map between expert and variant features (Prop. 3, Eq. 7), [n] each.

    secant <= directional <= spectral <= certified, up to rounding. NaN for samples without drift.

    Attributes:
        secant: |score drift| / |feature drift|; any valid B is at least this.
        directional: largest |J u| at sampled points, u being the drift's direction.
        spectral: largest |J|_2 at the same points, by power iteration started at u.
        certified: the score map's own bound, which holds for every point; NaN where it knows none.
    """

    secant: Tensor
    directional: Tensor
    spectral: Tensor
    certified: Tensor


def score_gains(head: ScoreMap, start: Tensor, end: Tensor, change: Tensor | None = None) -> _ScoreGains:
    """Estimate how much the score map amplifies drift between expert and variant features.

    Args:
        head: the variant's score map.
        start: features of the expert, [n, d], in float64.
        end: features of the variant, [n, d].
        change: change of the scores from `start` to `end`, [n, c]; computed if None.
    """
    drift = end - start
    length = torch.linalg.vector_norm(drift, dim=1)
    direction = drift / length[:, None]
    change = head.scores(end) - head.scores(start) if change is None else change
    secant = torch.linalg.vector_norm(change, dim=1) / length
    bound = head.gain_bound(start, end)
    certified = torch.full_like(length, torch.nan) if bound is None else torch.where(length > 0, bound, torch.nan)
    if getattr(head, "is_bounded_exactly", False):
        return _ScoreGains(secant, secant, certified, certified)
    times = (0.0, *(node for node, _ in gauss_legendre(GAIN_NODES)), 1.0)
    points = torch.cat([start + t * drift for t in times])
    along, largest = _drift_and_largest_gains(head, points, direction.repeat(len(times), 1))
    # By the mean-value inequality some point of the segment reaches the secant, though perhaps no sampled one.
    directional = torch.maximum(secant, along.view(len(times), -1).amax(dim=0))
    spectral = torch.maximum(directional, largest.view(len(times), -1).amax(dim=0))
    return _ScoreGains(secant, directional, spectral, certified)


def _autograd_derivative(head: ScoreMap, point: Tensor) -> ScoreJacobian:
    pull = vjp(head.scores, point)[1]
    return ScoreJacobian(lambda v: jvp(head.scores, (point,), (v,))[1], lambda w: pull(w)[0])


def _drift_and_largest_gains(head: ScoreMap, point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the score map's gain |J u| along the drift u, and its largest gain by power iteration."""
    with forward_mode_attention():
        derivative = (
            head.derivative(point) if isinstance(head, Head | LinearHead) else _autograd_derivative(head, point)
        )
        image = along = derivative.push(direction)
        for _ in range(GAIN_ITERATIONS):
            back = derivative.pull(image)
            # A zero gain has no direction to divide out; the bound keeps its image zero.
            image = derivative.push(back / torch.linalg.vector_norm(back, dim=1, keepdim=True).clamp_min(1e-300))
    return torch.linalg.vector_norm(along, dim=1), torch.linalg.vector_norm(image, dim=1)


@dataclass(frozen=True)
class TaskVectorAlignment:
    """Sums over the entries of two task vectors, from which cosine, norm ratio and sign agreement follow.

    `agreeing` counts entries in which both are non-zero and of one sign, `moved` those in which both are non-zero.
    """

    dot: float = 0.0
    variant_energy: float = 0.0
    expert_energy: float = 0.0
    agreeing: int = 0
    moved: int = 0

    @classmethod
    def between(cls, variant: Tensor, expert: Tensor) -> TaskVectorAlignment:
        """Compute the sums of one pair of task vectors of equal shape, accumulated in float64."""
        left, right = variant.double().flatten(), expert.double().flatten()
        product = left * right
        return cls(
            dot=float(product.sum()),
            variant_energy=float(left.square().sum()),
            expert_energy=float(right.square().sum()),
            agreeing=int((product > 0).sum()),
            moved=int((product != 0).sum()),
        )

    def __add__(self, other: TaskVectorAlignment) -> TaskVectorAlignment:
        return TaskVectorAlignment(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def values(self) -> dict[str, float | None]:
        """Return the cosine, norm ratio and sign agreement of the task vectors; None if one is zero."""
        both = self.variant_energy > 0 and self.expert_energy > 0
        return {
            "cos": self.dot / (self.variant_energy * self.expert_energy) ** 0.5 if both else None,
            "norm_ratio": (self.variant_energy / self.expert_energy) ** 0.5 if self.expert_energy > 0 else None,
            "sign_agreement": self.agreeing / self.moved if self.moved else None,
        }


def task_vector_cosine(variant: Tensor, expert: Tensor) -> float | None:
    """Compute the cosine between two task vectors (weights minus base weights) of equal shape; None if one is zero."""
    return TaskVectorAlignment.between(variant, expert).values()["cos"]


@diagnostic("task_vectors", table="params", columns=PARAMS.columns[len(PARAMS.key) :], needs="weights", option="")
def alignment_rows(pool: ModelPool, task: str, variant: str) -> Iterator[dict[str, object]]:
    """Yield rows that compare a variant's task vector with the expert's, by module, layer and backbone.

    A parameter counts once, in the first layer that lists it. A head outside all layers, as in language models, is a
    group and not part of the backbone.
    """
    chain = pool.chain
    backbone, groups = TaskVectorAlignment(), {name: TaskVectorAlignment() for name in GROUPS}
    for layer in chain.layers:
        modules: dict[str, TaskVectorAlignment] = {}
        group_of = parameter_roles(layer)
        for name, slot in chain.own_parameters(layer).items():
            path, group = _module_path(chain, layer, name, slot), group_of[name]
            alignment = _task_vector_alignment(pool, slot, task, variant)
            modules[path] = modules.get(path, TaskVectorAlignment()) + alignment
            groups[group] += alignment
        for path, alignment in modules.items():
            yield {"scope": "module", "path": path, **alignment.values()}
        if modules:
            whole = sum(modules.values(), TaskVectorAlignment())
            yield {"scope": "layer", "path": layer.path, **whole.values()}
            backbone = backbone + whole
    for key in _matrix_keys_outside_layers(pool, ("base", variant, expert_name(task))):
        groups["head"] += _task_vector_alignment(pool, WeightSlot(key), task, variant)
    for group, alignment in groups.items():
        if alignment.expert_energy or alignment.variant_energy:
            yield {"scope": "group", "path": group, **alignment.values()}
    yield {"scope": "backbone", "path": "", **backbone.values()}


def _matrix_keys_outside_layers(pool: ModelPool, models: Sequence[str]) -> Iterator[str]:
    """Yield the keys of matrices that all these models have and that belong to no layer."""
    inside = {*pool.chain.parameter_keys(), *pool.chain.tied}
    headers, *others = (pool.source(model).headers for model in models)
    for key, header in headers.items():
        is_matrix = len(header.shape) == 2 and header.dtype.is_floating_point
        if key not in inside and is_matrix and all(key in other for other in others):
            yield key


def _task_vector_alignment(pool: ModelPool, slot: WeightSlot, task: str, variant: str) -> TaskVectorAlignment:
    alignment = TaskVectorAlignment()
    weights = (pool.stored(model, slot) for model in ("base", variant, expert_name(task)))
    for piece in zip(*(torch.split(weight.flatten(), _PIECE) for weight in weights), strict=True):
        # Widened before the subtraction: a task vector is a small difference of large weights.
        base, moved, expert = (part.double() for part in piece)
        alignment += TaskVectorAlignment.between(moved - base, expert - base)
    return alignment


def _module_path(chain: LayerChain, layer: Layer, name: str, slot: WeightSlot) -> str:
    """Return the path of a parameter's module in the library's names; fused parts have separate paths."""
    key = slot.key if slot.rows is None else f"{layer.path}.{name}"
    module = key.rpartition(".")[0]
    return key if not module or chain.blocks[0].path.startswith(f"{module}.") else module
