"""From final features to scores: output drift, how much the score map can stretch it, decisions, margins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp, vjp

from driftlens.linalg.state import (
    cross_entropy_change,
    forward_mode_attention,
    gauss_legendre,
    softmax_change,
)
from driftlens.models.heads import (
    Derivative,
    Head,
    LinearHead,
    LmHead,
    ScoreMap,
    class_rows,
    is_of_vocabulary,
)
from driftlens.runs.schema import OUTPUTS
from driftlens.utils.diagnostic import Seen, diagnostic

GAIN_NODES = 4
GAIN_ITERATIONS = 30
# Scores of one model in memory at a time: 64 MiB in float64. A vocabulary's scores of all samples would be gigabytes.
_SCORES = 1 << 23


def output_columns(
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
        Columns [n]: `expert_pred` and `pred` (rows of the head), `flipped`, `score_drift_l2`, `score_drift_inf`, the
        estimates of B in `ScoreGains` (`score_gain` is the directional one), `score_bound`, `score_map_mismatch`,
        `margin` (NaN with a single class), `certified`, `confidence` and `confidence_expert` (largest class
        probability, at the temperature of the head's scores), `kl` from the expert's class probabilities to the
        variant's in nats, `softmax_integral_error`; with labels the cross-entropies `ce` and `ce_expert` in nats and
        `ce_integral_error`.
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
        "margin": _margin(expert_scores),
        **decisions(expert_scores, scores),
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


def decisions(expert_scores: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """Return `flipped`, `certified` and `kl` for scores [n, c], [n] each, as `output_columns` defines them."""
    log_p, expert_log_p = scores.log_softmax(dim=1), expert_scores.log_softmax(dim=1)
    return {
        "flipped": scores.argmax(dim=1) != expert_scores.argmax(dim=1),
        "certified": (scores - expert_scores).abs().amax(dim=1) < _margin(expert_scores) / 2,
        # Rounding may leave the divergence of equal distributions a hair below 0.
        "kl": (expert_log_p.exp() * (expert_log_p - log_p)).sum(dim=1).clamp_min(0),
    }


@diagnostic("output", table="outputs", columns=OUTPUTS.columns[len(OUTPUTS.key) + 1 :], option="")
def _of_samples(seen: Seen) -> dict[str, Any]:
    """Return `output_columns`, a chunk of samples at a time; of a language model also `token_` columns."""
    head: ScoreMap = seen.head
    # A language model's decisions are compared over all tokens too, not only those of the classes.
    of_tokens = [
        replace(lm_head, classes=(), tokens=None)
        for lm_head in (seen.expert_head, head)
        if isinstance(lm_head, LmHead)
    ]
    rows = max(1, _SCORES // max([len(head.classes), 1, *(lm_head.num_tokens for lm_head in of_tokens)]))
    labels = class_rows(head, seen.labels) if seen.labels is not None else None
    parts: list[dict[str, Tensor]] = []
    for begin in range(0, len(seen.variant), rows):
        chunk = slice(begin, begin + rows)
        expert, variant = (
            torch.from_numpy(seen.expert[chunk]).double(),
            torch.from_numpy(seen.variant[chunk]).double(),
        )
        columns = decided = output_columns(
            head, expert, variant, None if labels is None else labels[chunk], expert_head=seen.expert_head
        )
        if len(of_tokens) == 2:
            # A head over the vocabulary has compared all tokens already.
            if not is_of_vocabulary(head):
                decided = decisions(
                    *(lm_head.scores(x) for lm_head, x in zip(of_tokens, (expert, variant), strict=True))
                )
            columns = columns | {f"token_{name}": decided[name] for name in ("flipped", "certified", "kl")}
        parts.append(columns)
    joined = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    names = np.array(head.classes, dtype=object)
    return joined | {name: names[joined[name]] for name in ("expert_pred", "pred")}


def _margin(scores: Tensor) -> Tensor:
    if scores.shape[1] < 2:
        return torch.full_like(scores[:, 0], float("nan"))
    best = scores.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class ScoreGains:
    """Estimates of the Lipschitz constant B of the score map on the segment (Prop. 3, Eq. 7), [n] each, in this order.

    secant <= directional <= spectral <= certified, up to rounding. NaN for samples without drift.

    Attributes:
        secant: |score drift| / |feature drift|; any valid B is at least this.
        directional: largest |J u| at sampled points, u being the drift's direction.
        spectral: largest |J|_2 at the same points, by power iteration started at u; both are sampled, hence from below.
        certified: the score map's own bound, which holds for every point; NaN where it knows none.
    """

    secant: Tensor
    directional: Tensor
    spectral: Tensor
    certified: Tensor


def score_gains(head: ScoreMap, start: Tensor, end: Tensor, change: Tensor | None = None) -> ScoreGains:
    """Estimate the gains of `head.scores` on the segments from the expert's features to the variant's.

    Nothing is sampled if the gain is bounded exactly. Use float64.

    Args:
        head: the variant's score map.
        start: features of the expert, [n, d].
        end: features of the variant, [n, d].
        change: change of the scores from `start` to `end`, [n, c]; computed if None.
    """
    drift = end - start
    length = torch.linalg.vector_norm(drift, dim=1)
    direction = drift / length[:, None]
    change = head.scores(end) - head.scores(start) if change is None else change
    secant = torch.linalg.vector_norm(change, dim=1) / length
    bound = head.gain_bound(start, end)
    certified = (
        torch.full_like(length, torch.nan) if bound is None else torch.where(length > 0, bound, torch.nan)
    )
    if getattr(head, "is_bounded_exactly", False):
        return ScoreGains(secant, secant, certified, certified)
    times = (0.0, *(node for node, _ in gauss_legendre(GAIN_NODES)), 1.0)
    points = torch.cat([start + t * drift for t in times])
    along, largest = _gains_at(head, points, direction.repeat(len(times), 1))
    # By the mean-value inequality some point of the segment reaches the secant, though perhaps no sampled one.
    directional = torch.maximum(secant, along.view(len(times), -1).amax(dim=0))
    spectral = torch.maximum(directional, largest.view(len(times), -1).amax(dim=0))
    return ScoreGains(secant, directional, spectral, certified)


def _derivative(head: ScoreMap, point: Tensor) -> Derivative:
    """Compute the derivative of a map that does not provide one."""
    pull = vjp(head.scores, point)[1]
    return Derivative(lambda v: jvp(head.scores, (point,), (v,))[1], lambda w: pull(w)[0])


def _gains_at(head: ScoreMap, point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return |J u| along the drift u, and the largest gain found by power iteration from u."""
    with forward_mode_attention():
        derivative = (
            head.derivative(point) if isinstance(head, Head | LinearHead) else _derivative(head, point)
        )
        image = along = derivative.push(direction)
        for _ in range(GAIN_ITERATIONS):
            back = derivative.pull(image)
            # A zero gain has no direction to divide out; the bound keeps its image zero.
            image = derivative.push(
                back / torch.linalg.vector_norm(back, dim=1, keepdim=True).clamp_min(1e-300)
            )
    return torch.linalg.vector_norm(along, dim=1), torch.linalg.vector_norm(image, dim=1)
