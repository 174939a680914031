"""How much the score map can stretch a feature drift: four estimates, the last of them a bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vjp

from driftlens.linalg.path_jacobian import forward_mode_attention
from driftlens.linalg.quadrature import gauss_legendre
from driftlens.models.heads import Head

NODES = 4
ITERATIONS = 30


@dataclass(frozen=True)
class ScoreGains:
    """Estimates of the Lipschitz constant B of the score map on the segment (Prop. 3, Eq. 7), [n] each, in this order.

    secant <= directional <= spectral <= certified, up to rounding. NaN for samples without drift.

    Attributes:
        secant: |score drift| / |feature drift|; any valid B is at least this.
        directional: largest |J u| at sampled points, u being the drift's direction.
        spectral: largest |J|_2 at the same points, by power iteration started at u; both are sampled, hence from below.
        certified: scale * |class embeddings|_2 / shortest feature on the segment; holds for every point. Infinite where
            the segment meets the origin.
    """

    secant: Tensor
    directional: Tensor
    spectral: Tensor
    certified: Tensor


def score_gains(head: Head, start: Tensor, end: Tensor) -> ScoreGains:
    """Gains of `head.scores` on the segments from `start` to `end`.

    Args:
        head: normalise, class embeddings, logit scale.
        start: expert features, [n, d], float64 advised.
        end: variant features, [n, d].
    """
    drift = end - start
    length = torch.linalg.vector_norm(drift, dim=1)
    direction = drift / length[:, None]
    secant = torch.linalg.vector_norm(head.scores(end) - head.scores(start), dim=1) / length
    times = (0.0, *(node for node, _ in gauss_legendre(NODES)), 1.0)
    points = torch.cat([start + t * drift for t in times])
    along, largest = _gains_at(head, points, direction.repeat(len(times), 1))
    # By the mean-value inequality some point of the segment reaches the secant, though perhaps no sampled one.
    directional = torch.maximum(secant, along.view(len(times), -1).amax(dim=0))
    spectral = torch.maximum(directional, largest.view(len(times), -1).amax(dim=0))
    certified = head.logit_scale * torch.linalg.matrix_norm(head.embeddings, ord=2) / _shortest(start, drift)
    return ScoreGains(secant, directional, spectral, torch.where(length > 0, certified, torch.nan))


def _gains_at(head: Head, point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """|J u| along the drift, and the largest gain found by power iteration from it."""
    with forward_mode_attention():
        pull = vjp(head.scores, point)[1]
        vector = direction
        image = along = jvp(head.scores, (point,), (vector,))[1]
        for _ in range(ITERATIONS):
            back = pull(image)[0]
            vector = back / torch.linalg.vector_norm(back, dim=1, keepdim=True).clamp_min(1e-300)
            image = jvp(head.scores, (point,), (vector,))[1]
    return torch.linalg.vector_norm(along, dim=1), torch.linalg.vector_norm(image, dim=1)


def _shortest(start: Tensor, drift: Tensor) -> Tensor:
    """Smallest norm on the segment: a quadratic in t, its minimum clamped to [0, 1]."""
    t = (-(start * drift).sum(dim=1) / drift.square().sum(dim=1).clamp_min(1e-300)).clamp(0, 1)
    return torch.linalg.vector_norm(start + t[:, None] * drift, dim=1)
