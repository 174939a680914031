"""Softmax and cross-entropy along a straight line of scores: integrals with values known in closed form.

Both are checks of the machinery, not measurements: the left sides need no quadrature. Scores of CLIP are scaled by
about 100, so the line is cut into panels short enough for eight nodes each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from driftlens.linalg.quadrature import gauss_legendre

NODES = 8
PANEL = 2.0
"""Longest change of score differences over a panel; eight nodes then err below 1e-11 (over 4, by up to 8e-9)."""


def softmax_change(scores: Tensor, change: Tensor) -> Tensor:
    """p(z + d) - p(z) as the integral of (diag p - p p') d along the line.

    Source: FeatCal (arXiv:2605.13030), appendix on the output-drift bridge, softmax probability bridge.

    Args:
        scores: z, [n, classes].
        change: d, [n, classes].

    Returns:
        [n, classes], equal to the difference of the two softmaxes up to quadrature error.
    """
    total = torch.zeros_like(scores)
    for t, weight in composite_nodes(change):
        p = (scores + t * change).softmax(dim=1)
        total += weight * p * (change - (p * change).sum(dim=1, keepdim=True))
    return total


def cross_entropy_change(scores: Tensor, change: Tensor, labels: Tensor) -> Tensor:
    """CE(y, z + d) - CE(y, z) as the integral of (p - one_hot(y))' d along the line.

    Source: FeatCal (arXiv:2605.13030), Eq. 41 with the cross-entropy as loss.

    Args:
        scores: z, [n, classes].
        change: d, [n, classes].
        labels: y, [n].

    Returns:
        [n] in nats, equal to the difference of the two cross-entropies up to quadrature error.
    """
    wanted = change.gather(1, labels[:, None])[:, 0]
    total = torch.zeros_like(wanted)
    for t, weight in composite_nodes(change):
        p = (scores + t * change).softmax(dim=1)
        total += weight * ((p * change).sum(dim=1) - wanted)
    return total


def composite_nodes(change: Tensor, panels: int | None = None) -> Iterator[tuple[float, float]]:
    """(node, weight) pairs on [0, 1]: eight per panel, and as many panels as the change of scores asks for.

    Args:
        change: d, [n, classes].
        panels: how many panels instead.
    """
    if panels is None:
        spread = float((change.amax(dim=1) - change.amin(dim=1)).max()) if change.numel() else 0.0
        panels = max(1, math.ceil(spread / PANEL))
    for panel in range(panels):
        for t, weight in gauss_legendre(NODES):
            yield (panel + t) / panels, weight / panels
