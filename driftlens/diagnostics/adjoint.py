"""Adjoint attribution: how much each layer's local mismatch moves one number (a loss, a margin, the final drift).

A covector at the final feature is pulled back through the path-averaged Jacobians; its product with each layer's
local mismatch is that layer's part of the change. One pull-back serves all layers, where carrying every mismatch
forward costs one product per pair of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp

from driftlens.base.diagnostic import diagnostic
from driftlens.linalg.state import PathJacobian, State, composite_nodes, inner
from driftlens.models.heads import ScoreMap
from driftlens.runs.schema import ADJOINT

SCORE_PANELS = 8
"""Panels of the score map's segment: where a feature shortens on the way, the normalisation bends sharply."""


@dataclass(frozen=True)
class Step:
    """One layer on one batch, as the walk saw it: the merged layer `call`, both models' features before it, and its m.

    `nodes` are those of its path-averaged Jacobian's quadrature.
    """

    call: Callable[[State], State]
    expert_in: State
    merged_in: State
    local_mismatch: State
    nodes: int


@dataclass(frozen=True)
class Target:
    """A number whose change [n] from expert to variant is to be explained: <covector, e_L> for every sample."""

    covector: Tensor
    change: Tensor


@diagnostic("adjoint", table="adjoint", columns=ADJOINT.columns[len(ADJOINT.key) :], needs="jacobian")
def adjoint_parts(steps: Sequence[Step], covector: State) -> Tensor:
    """<A_{l+1}' ... A_L' u, m_l> for every layer l and sample, [L, n].

    By Prop. 2 (Eq. 5) they sum to <u, e_L>, up to the quadrature error of the Jacobians.
    Source: FeatCal (arXiv:2605.13030), Eq. 5, read from the left.

    Args:
        steps: all layers in forward order.
        covector: u at the last boundary.
    """
    return torch.stack([inner(step.local_mismatch, u) for step, u in pulled_back(steps, covector)][::-1])


def pulled_back(steps: Sequence[Step], covector: State) -> Iterator[tuple[Step, State]]:
    """Every layer with the covector at its own output, the last layer first; arguments as for `adjoint_parts`."""
    for step in reversed(steps):
        yield step, covector
        if step is not steps[0]:
            covector = PathJacobian(step.call, step.expert_in, step.merged_in, step.nodes).vjp(covector)


def drift_target(expert: Tensor, variant: Tensor) -> Target:
    """The final drift itself: u = e_L / |e_L|^2, so that the parts are shares and sum to 1. NaN without drift."""
    drift = variant - expert
    energy = drift.flatten(1).square().sum(dim=1)
    each = energy.reshape(-1, *[1] * (drift.dim() - 1))
    return Target(drift / each, torch.where(energy > 0, 1.0, torch.nan))


def loss_target(head: ScoreMap, expert: Tensor, variant: Tensor, labels: Tensor) -> Target:
    """The cross-entropy of the variant minus that of the expert, in nats (Eq. 41).

    u = (averaged Jacobian of the score map)' (averaged gradient of the loss), both on their segments.

    Args:
        head: the variant's score map for the task; what another map of the expert's changes is no drift.
        expert: final features, [n, d].
        variant: final features, [n, d].
        labels: row of the true class, [n].
    """
    start, end = head.scores(expert), head.scores(variant)
    wanted = torch.zeros_like(start).scatter_(1, labels[:, None], 1.0)
    gradient = torch.zeros_like(start)
    for t, weight in composite_nodes(end - start):
        gradient += weight * (torch.lerp(start, end, t).softmax(dim=1) - wanted)
    return Target(_pulled(head, expert, variant, gradient), (gradient * (end - start)).sum(dim=1))


def margin_target(head: ScoreMap, expert: Tensor, variant: Tensor) -> Target:
    """The variant's margin of the expert's decision minus the expert's own, in scores.

    A margin is the score of the class that the expert chooses minus that of the strongest other class, its rival: each
    model's own. The variant decides otherwise exactly where its margin is negative. With one class there is no margin,
    and NaN.

    u pulls back the chosen class minus the rivals met on the way, each counting for the part of the segment of scores
    on which it is the strongest: scores are linear there, so the change is their product with u exactly.
    """
    start, end = head.scores(expert), head.scores(variant)
    if start.shape[1] < 2:
        return Target(torch.full_like(expert, torch.nan), torch.full_like(start[:, 0], torch.nan))
    chosen = start.argmax(dim=1, keepdim=True)
    before, after = (scores.scatter(1, chosen, -torch.inf).amax(dim=1) for scores in (start, end))
    direction = torch.zeros_like(start).scatter_(1, chosen, 1.0) - _rivals(start, end, chosen)
    change = ((end - start).gather(1, chosen)[:, 0]) - (after - before)
    return Target(_pulled(head, expert, variant, direction), change)


def _rivals(start: Tensor, end: Tensor, chosen: Tensor) -> Tensor:
    """For how much of the segment from `start` to `end` each class but the chosen one has the largest score, [n, c].

    The largest of lines is followed from crossing to crossing; a later one climbs more steeply, so no class comes back.
    """
    change = end - start
    others = start.scatter(1, chosen, -torch.inf)
    shares, t = torch.zeros_like(start), torch.zeros_like(start[:, :1])
    rival = others.argmax(dim=1, keepdim=True)
    while bool((t < 1).any()):
        ahead, steeper = others.gather(1, rival) - others, change - change.gather(1, rival)
        crossing = torch.where(steeper > 0, ahead / steeper, torch.inf).maximum(t)
        reached, following = crossing.min(dim=1, keepdim=True)
        reached = reached.clamp_max(1)
        shares.scatter_add_(1, rival, reached - t)
        t, rival = reached, following
    return shares


def _pulled(head: ScoreMap, expert: Tensor, variant: Tensor, direction: Tensor) -> Tensor:
    """The score map's path-averaged Jacobian, transposed, times a direction in score space.

    The segment is cut into panels of eight nodes: normalising a feature that nearly vanishes on the way is far from
    polynomial.
    """
    total = torch.zeros_like(expert)
    for t, weight in composite_nodes(direction, panels=SCORE_PANELS):
        total += weight * vjp(head.scores, torch.lerp(expert, variant, t))[1](direction)[0]
    return total
