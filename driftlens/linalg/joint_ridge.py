"""Ridge of a linear map and its bias around given ones, with two targets, chosen by cross-validation over folds.

The inputs are x~ = [x; c] with c^2 = 1000, so that the bias is hardly penalised, or x alone where there is no bias. The
local target is what an expert's own map makes of x, the residual target what the expert really gives:

    D(l0, l1, t) = C0 (A + l0 I)^-1 + t Cd (A + l1 I)^-1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from driftlens.linalg.gram import JointMoments
from driftlens.linalg.ridge import Factor, factorize, probe, stationarity_error
from driftlens.utils.devices import HOST, place_of_sums
from driftlens.utils.errors import NumericsError

BIAS_INPUT = math.sqrt(1000.0)
GRID = (1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1, 10**-0.5, 1.0, 3.0)
"""Values of l0 and l1: 1e-4 to 1 by half decades, and 3."""
WIDEST = 256
"""Inputs beyond which folds are compared in the span of this many directions, not in all of their space."""
_STEPS = 5


def total(parts: Sequence[JointMoments], dtype: torch.dtype | None = None) -> JointMoments:
    """The sum of moments, in another dtype or in theirs."""
    dtype = dtype or parts[0].gram.dtype
    place = place_of_sums(dtype, parts[0].gram.device)
    summed = JointMoments(
        **{name: value.to(place, dtype, copy=True) for name, value in vars(parts[0]).items()}
    )
    for part in parts[1:]:
        summed.add(part)
    return summed


class Ridges(NamedTuple):
    """Ridges of the two parts, the share t of the second, and the held-out misfit with them where it is known."""

    local: float
    upstream: float
    share: float
    held_out: float | None = None


def choose_ridges(
    folds: Sequence[JointMoments],
    *,
    most: float = 1.0,
    grid: Sequence[float] = GRID,
) -> Ridges:
    """The ridges and the share in [0, most] whose maps, each fitted without a fold, miss that fold least.

    Misfits are those to the residual target; with `most` 0, the folds hold no other than the local one. One
    eigendecomposition per fold serves the whole grid. Where there are more than `WIDEST` inputs, maps are compared
    inside the span that a few products with the Gram matrix of all folds leave of as many random directions; that
    changes the choice, and not what is solved with it. All is computed in the dtype of the moments.
    """
    for fold in folds:
        require_finite(fold)
    if len(folds[0].gram) > WIDEST:
        basis = _span(sum((fold.gram for fold in folds[1:]), folds[0].gram), WIDEST)
        folds = [fold.within(basis) for fold in folds]
    # They are small by now. Devices are slow at what follows, or can't do it, and each step would wait for them.
    folds = [JointMoments(**{name: value.to(HOST) for name, value in vars(fold).items()}) for fold in folds]
    everything = total(folds)
    ridges = everything.gram.new_tensor(grid)
    plain = everything.gram.new_zeros(len(grid))
    square = everything.gram.new_zeros(len(grid))
    mixed = everything.gram.new_zeros(len(grid), len(grid))
    for fold in folds:
        values, vectors = torch.linalg.eigh(everything.gram - fold.gram)
        held_out = vectors.mT @ fold.gram @ vectors
        local = (everything.local - fold.local) @ vectors
        upstream = (everything.upstream - fold.upstream) @ vectors
        target = (fold.local + fold.upstream) @ vectors
        inverse = 1 / (values.clamp_min(0)[:, None] + ridges)  # [k, grid]
        by_local, by_upstream = (inverse.mT @ (part.mT @ part * held_out) for part in (local, upstream))
        plain += (by_local * inverse.mT).sum(1) - 2 * inverse.mT @ (local * target).sum(0)
        square += (by_upstream * inverse.mT).sum(1)
        linear = inverse.mT @ (upstream * target).sum(0)
        mixed += inverse.mT @ (local.mT @ upstream * held_out) @ inverse - linear
    best = torch.where(square > 0, -mixed / square, 0.0).clamp(0, most)
    scores = plain[:, None] + best * (2 * mixed + best * square)
    # Of equal scores the largest ridges, which change least.
    flat = int(scores.flip(0, 1).argmin())
    chosen, beside = (len(grid) - 1 - place for place in divmod(flat, len(grid)))
    return Ridges(
        grid[chosen],
        grid[beside],
        float(best[chosen, beside]),
        float(everything.energy + scores[chosen, beside]),
    )


def _span(gram: Tensor, width: int) -> Tensor:
    """An orthonormal basis [k, width] of nearly the leading eigenvectors' span."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(len(gram), width, generator=generator, dtype=torch.float64).to(gram)
    for _ in range(2):
        basis = torch.linalg.qr((gram @ basis).to(HOST)).Q.to(gram)
    return basis


class _JointSolution(NamedTuple):
    """D, [o, k], and the larger stationarity error of its parts; None where a metric leaves it to iteration."""

    change: Tensor
    error: float | None


def solve_joint(
    moments: JointMoments,
    ridges: Ridges,
    *,
    tasks: Sequence[tuple[Tensor, JointMoments]] = (),
    is_two_sided: bool = False,
) -> _JointSolution:
    """D of the whole, with the ridges and the share given; `moments` are of all folds.

    `tasks` has the output metric S_i of every task and its moments, which add up to those of all folds: then it is
    sum_i S_i D A_i + l0 D0 + l1 D1 = sum_i S_i C_i that is solved, D = D0 + D1 and C_i = C0_i + t Cd_i, by a few
    preconditioned conjugate-gradient steps from the solution without metric. What they add has the ridge l1 (l0 where
    t is 0), as most of a change is upstream repair as a rule: with steps for D0 and D1 apart they took twice as long.
    They are preconditioned by V (A + l I)^-1, or if it `is_two_sided` by S^-1 V (A + l I)^-1 with S the mean of all
    S_i, which must be positive definite. The tasks' moments may be of a narrower dtype.
    """
    require_finite(moments)
    parts = [("local", ridges.local, 1.0), ("upstream", ridges.upstream, ridges.share)]
    change, factors = torch.zeros_like(moments.local), dict[float, Factor]()
    penalty = torch.zeros_like(change)
    direction, error = probe(moments.gram), 0.0
    image = moments.gram @ direction
    for part, ridge, share in parts:
        if share == 0:
            continue
        if ridge not in factors:
            factors[ridge] = factorize(moments.gram, what=f"gram + {ridge:g} I", shift=ridge)
        target: Tensor = getattr(moments, part)
        solution = factors[ridge].solve_rows(target.clone())
        change += share * solution
        if not tasks:
            error = max(error, stationarity_error(solution, image + ridge * direction, target @ direction))
        penalty += share * ridge * solution
    if not tasks:
        return _JointSolution(change, error)
    ridge = ridges.upstream if ridges.share else ridges.local
    left = -penalty
    for metric, sums in tasks:
        wanted = (sums.local + ridges.share * sums.upstream).to(left)
        left += metric.to(left) @ (wanted - change @ sums.gram.to(left))
    outputs = _mean_metric(tasks, like=change) if is_two_sided else None
    return _JointSolution(change + _towards(left, factors[ridge], ridge, tasks, outputs), None)


def _mean_metric(tasks: Sequence[tuple[Tensor, JointMoments]], like: Tensor) -> Factor:
    mean = sum((metric for metric, _ in tasks[1:]), tasks[0][0]) / len(tasks)
    return factorize(mean.to(like), what="the mean output metric")


def _towards(
    left: Tensor,
    inputs: Factor,
    ridge: float,
    tasks: Sequence[tuple[Tensor, JointMoments]],
    outputs: Factor | None,
) -> Tensor:
    """E with sum_i S_i E A_i + l E nearly what is left, [o, k], by conjugate gradients from 0."""
    solution, towards, before = torch.zeros_like(left), torch.zeros_like(left), left.new_tensor(math.inf)
    for _ in range(_STEPS):
        better = inputs.solve_rows(left.clone())
        if outputs is not None:
            better = outputs.solve_rows(better.mT.clone()).mT
        size = (left * better).sum()
        if not bool(size > 0):
            break
        towards, before = better + size / before * towards, size
        pushed = ridge * towards
        for metric, sums in tasks:
            pushed += metric.to(left) @ (towards @ sums.gram.to(left))
        step = size / (towards * pushed).sum()
        solution, left = solution + step * towards, left - step * pushed
    return solution


def require_finite(moments: JointMoments) -> None:
    """Refuse moments with NaN or infinite entries."""
    ends = [end for value in vars(moments).values() for end in value.aminmax()]
    if not bool(torch.isfinite(torch.stack(ends)).all()):
        raise NumericsError(
            "the moments hold NaN or infinite entries",
            hint="Look at the features and weights that they were computed from.",
        )
