"""Spectral calibration: the singular values of what merging changed, without data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.devices import near_factors, wide
from driftlens.base.errors import SpecError
from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.calibration.featcal import relative_change
from driftlens.engine.calibrating import Weightwise
from driftlens.engine.problems import SiteReport, SiteUpdate, WeightProblem


@calibrators.register("svc")
class SVC(Calibrator, Weightwise):
    """W_0 + U diag(gamma S) V' with U S V' = W_merged - W_0, in float64, of linear modules; no sample is read.

    gamma_r = N / sum_i max(alpha, s_r^i), where s_r^i is how long the merged change is in direction u_r against what
    the change of expert i has in the same direction: <s_r v_r, u_r' dW_i> / |u_r' dW_i|^2. So no direction is stretched
    more than 1 / alpha times.
    """

    title = "SVC"
    source = "FusionBench"
    update: Sequence[str] = ("linear",)

    def __init__(
        self,
        alpha: Annotated[
            float, Bounds(low=0, low_open=True), Label("Least α"), "least share of an expert's length"
        ] = 0.1,
    ) -> None:
        self.alpha = alpha

    def check(self, *, has_base: bool = True) -> None:
        """Refuse settings that make no sense, and models without a base."""
        super().check(has_base=has_base)
        if not has_base:
            raise SpecError("SVC looks at what merging changed, and there is no base", hint="Name the base.")

    def solve(self, problem: WeightProblem) -> list[SiteUpdate]:
        """The new weight of the problem's site."""
        [site], name = problem.sites, f"{problem.sites[0].name}.weight"
        base = wide(problem.base)
        changes = (wide(expert) - base for expert in problem.experts())
        weight = base + stretched(wide(problem.merged) - base, changes, self.alpha)
        report = SiteReport(
            site=site.name,
            kind=site.kind,
            lam=0.0,
            objective_before=None,
            objective_after=None,
            weight_change=relative_change(weight, problem.merged),
        )
        return [SiteUpdate({name: weight}, report)]


def stretched(merged: Tensor, experts: Iterable[Tensor], alpha: float) -> Tensor:
    """The change of the merged model [o, k], each singular direction brought to the length that experts have there."""
    factors = torch.linalg.svd(near_factors(merged), full_matrices=False)
    left, sizes, right = (factor.to(merged.device) for factor in factors)
    rows = sizes[:, None] * right
    total, count = torch.zeros_like(sizes), 0
    for change in experts:
        along = left.mT @ change
        size = along.square().sum(dim=1)
        share = torch.where(size > 0, (rows * along).sum(dim=1) / size.where(size > 0, 1.0), 0.0)
        total, count = total + share.clamp_min(alpha), count + 1
    return left @ ((count / total)[:, None] * rows)
