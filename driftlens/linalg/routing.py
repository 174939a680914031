"""The router whose scores are nearest to those of several routers, as far as these scores decide anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from driftlens.base.errors import NumericsError

SHRINK = 0.9
"""Share of the entries beside the curvature's diagonal that counts, as in HARC: one solution is left, near in steps."""
_STEPS, _TOLERANCE = 1000, 1e-9
"""Of conjugate gradients, and the size of a residual that is none, against the first one, where the dtype has it."""

Rows = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Reads the rows of one task, some at a time: what the router reads, x [T, k], and its target's scores, p [T, E]."""


class RouterSolution(NamedTuple):
    """The way from the first weights [E, k], the objective there and behind it, |A D - R| / (|A D| + |R|)."""

    change: Tensor
    before: float
    after: float
    error: float


def scored(logits: Tensor, scoring: str) -> Tensor:
    """Scores of experts, [T, E]: a softmax over all of them, also where only the chosen ones are normalised."""
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)


@dataclass(frozen=True)
class Routing:
    """Rows of every task, and by which `scoring` their scores were made, `softmax` or `sigmoid`.

    Attributes:
        rows: by task.
        counts: of rows, by task; each task counts as much as another.
        scoring: of all routers.
        total: adds a tensor up over all processes that hold rows.
    """

    rows: Mapping[str, Rows]
    counts: Mapping[str, int]
    scoring: str
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def curved(self, scores: Tensor, logits: Tensor) -> Tensor:
        """H(p) z of every row: diag(p) - p p' for softmax, diag(p (1 - p)) for sigmoid, which scores experts alone."""
        weighted = scores * logits
        if self.scoring == "sigmoid":
            return weighted * (1 - scores)
        return weighted - scores * weighted.sum(dim=-1, keepdim=True)

    def diagonal(self, task: str, like: Tensor) -> Tensor:
        """Of the curvature S_i = mean of H(p) (x) x x', [E, k]."""
        curvature = torch.zeros_like(like)
        for x, scores in self.rows[task]():
            curvature += (scores * (1 - scores)).mT @ x.square()
        return curvature / max(1, self.counts[task])

    def pushed(self, task: str, way: Tensor, diagonal: Tensor) -> Tensor:
        """A_i D, the shrunk curvature SHRINK S_i + (1 - SHRINK) diag S_i times weights [E, k]."""
        product = torch.zeros_like(way)
        for x, scores in self.rows[task]():
            product += self.curved(scores, x @ way.mT).mT @ x
        return SHRINK / max(1, self.counts[task]) * product + (1 - SHRINK) * diagonal * way


def solve_router(routing: Routing, ways: Mapping[str, Tensor]) -> RouterSolution:
    """Weights nearest to those of every task's router, from the first weights W_0 on.

    Minimises over W = W_0 + D, with D_i = W_i - W_0 the way to the router of task i,

        sum_i mean_x (W x - W_i x)' H(p_i(x)) (W x - W_i x),    p_i(x) = scores of W_i x,

    where H is the curvature of what softmax (or sigmoid) loses, so that scores which decide nothing count nothing, and
    entries beside the diagonal of the whole curvature count `SHRINK`: sum_i A_i D = sum_i A_i D_i, solved by conjugate
    gradients with the diagonal as preconditioner. Rows are read once a step and none is kept.

    Source: HARC (arXiv:2606.03391) and its code, for softmax; a sigmoid's curvature p (1 - p) is ours.

    Args:
        routing: rows of every task that this process holds.
        ways: D_i by task, [E, k], in the dtype that is solved in; a bias is the column of a constant input.

    Returns:
        D [E, k], exactly zero where all D_i are.

    Raises:
        NumericsError: weights or rows are NaN or infinite.
    """
    tasks = [task for task in sorted(ways) if task in routing.rows]
    zeros = torch.zeros_like(next(iter(ways.values())))
    diagonals = {task: routing.diagonal(task, zeros) for task in tasks}
    diagonal = routing.total(sum(diagonals.values(), zeros.clone()))
    images = {task: routing.pushed(task, ways[task], diagonals[task]) for task in tasks}
    wanted = routing.total(sum(images.values(), zeros.clone()))
    before = float(routing.total(sum((ways[task] * images[task] for task in tasks), zeros.clone())).sum())
    if not math.isfinite(before):
        raise NumericsError(
            "the curvature of a router's scores is NaN or infinite",
            hint="Look at the features and weights that it was computed from.",
        )
    # Where nothing is ever read, or decides anything, weights stay.
    inverse = torch.where(diagonal > 0, 1 / diagonal, 0)
    change, residual = zeros.clone(), wanted.clone()
    better = inverse * residual
    towards, size = better, float((residual * better).sum())
    enough = size * max(_TOLERANCE, 4 * torch.finfo(zeros.dtype).eps) ** 2
    for _ in range(_STEPS):
        if not size > enough:
            break
        image = sum((routing.pushed(task, towards, diagonals[task]) for task in tasks), zeros.clone())
        image = routing.total(image)
        step = size / float((towards * image).sum())
        change, residual = change + step * towards, residual - step * image
        better = inverse * residual
        size, last = float((residual * better).sum()), size
        towards = better + size / last * towards
    there = sum((routing.pushed(task, change, diagonals[task]) for task in tasks), zeros.clone())
    there = routing.total(there)
    sizes = [float(torch.linalg.vector_norm(part)) for part in (there - wanted, there, wanted)]
    after = before - 2 * float((wanted * change).sum()) + float((change * there).sum())
    return RouterSolution(change, before, after, sizes[0] / ((sizes[1] + sizes[2]) or 1.0))
