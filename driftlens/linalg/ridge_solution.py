"""A solved ridge regression and its objective, from the moments alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.linalg.cholesky import Factor
from driftlens.linalg.moments import Moments
from driftlens.linalg.ridge import ridge_factor, solve_weight


@dataclass(frozen=True)
class RidgeSolution:
    """The weight that minimises weight_sum * E |W x - y|^2 + lam * |W - anchor|_F^2.

    Attributes:
        weight: the minimiser, [o, k].
        factor: of the matrix that was inverted, weight_sum * E[x x'] + lam * I.
        objective: at `weight`, by output, [o]; outputs don't interact, so sums over some are those sites' objectives.
            None where the moments lack the energy of y.
    """

    weight: Tensor
    factor: Factor
    objective: Tensor | None

    def excess(self, other: Tensor) -> Tensor:
        """How much higher the objective is at another weight, by output, [o], in the dtype of `other`.

        Exactly tr(D H D') with D the difference of the weights and H the matrix that was inverted.
        """
        return self.factor.energy((other - self.weight).to(other.dtype))


def solve_ridge(moments: Moments, anchor: Tensor | None, *, lam: float) -> RidgeSolution:
    """Weight and objective from the moments of all tasks together; see `solve_weight`.

    Args:
        moments: of the site, or of several stacked sites; `weight_sum` is the sum of the task weights.
        anchor: [o, k]; None drops the terms with `lam`.
        lam: lambda >= 0.

    Raises:
        NumericsError: a moment holds NaN or infinite entries.
        SingularGramError: gram + lam * I is not positive definite to working precision.
    """
    cross = moments.output_cross * moments.weight_sum
    factor = ridge_factor(moments.gram, 0.0 if anchor is None else lam, scale=moments.weight_sum)
    weight = solve_weight(moments.gram, cross, anchor, lam=lam, factor=factor)
    if moments.target_energy is None:
        return RidgeSolution(weight, factor, None)
    # At the solution W H = R, so that W's quadratic form needs no product with H.
    objective = moments.weight_sum * moments.target_energy - torch.linalg.vecdot(cross, weight)
    if anchor is not None:
        objective = objective + lam * torch.linalg.vecdot(anchor, anchor - weight)
    return RidgeSolution(weight, factor, objective)
