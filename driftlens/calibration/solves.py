"""FeatCal's solves, of linear sites that share a Gram matrix and of norms, and what is reported of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.engine.layer_sums import stacked
from driftlens.engine.problems import LinearProblem, NormProblem, SiteReport, SiteUpdate
from driftlens.linalg.cholesky import Factor
from driftlens.linalg.norm_affine import solve_layer_norm, solve_rms_norm
from driftlens.linalg.ridge import solve_bias, solve_ridge
from driftlens.models.chain import Site


def solve_linear(
    problem: LinearProblem, anchor: Mapping[str, Tensor] | None, *, lam: float, update: Collection[str]
) -> list[SiteUpdate]:
    """New weight (Eq. 17) and bias (Eq. 55) of each site; one factor serves the rows of all.

    Args:
        problem: the sites and their moments.
        anchor: by parameter name, in the dtype of the moments; None drops the terms with `lam`.
        lam: ridge.
        update: `linear` to solve for weights, `bias` for biases.

    Raises:
        NumericsError: the moments hold NaN or infinite entries.
        SingularGramError: gram + lam * I is singular to working precision.
    """
    pull = 0.0 if anchor is None else lam
    weights = (
        _Weights.solved(problem, anchor, pull) if "linear" in update else _Weights.kept(problem, anchor, pull)
    )
    updates, start = [], 0
    for site in problem.sites:
        stop = start + len(problem.merged[f"{site.name}.weight"])
        mine = weights.outputs(start, stop)
        parameters = {f"{site.name}.weight": mine.value} if "linear" in update else {}
        if "bias" in update and site.name in problem.expert_bias:
            parameters[f"{site.name}.bias"] = _bias(
                problem, site, slice(start, stop), mine.value, anchor, lam
            )
        updates.append(SiteUpdate(parameters, _report(problem, site, mine, pull)))
        start = stop
    return updates


@dataclass(frozen=True)
class _Weights:
    """Weights [o, k] of some outputs, and the objective (Eq. 15) by output, at the merged weights and at these."""

    value: Tensor
    before: Tensor | None
    after: Tensor | None
    factor: Factor | None

    @classmethod
    def solved(cls, problem: LinearProblem, anchor: Mapping[str, Tensor] | None, lam: float) -> _Weights:
        pulled = None if anchor is None else stacked(anchor, problem.sites)
        solution = solve_ridge(problem.moments, pulled, lam=lam)
        before = after = solution.objective
        if after is not None:
            before = after + solution.excess(stacked(problem.merged, problem.sites))
        return cls(solution.weight, before, after, solution.factor)

    @classmethod
    def kept(cls, problem: LinearProblem, anchor: Mapping[str, Tensor] | None, lam: float) -> _Weights:
        weight = stacked(problem.merged, problem.sites).to(problem.moments.gram)
        if problem.moments.target_energy is None:
            return cls(weight, None, None, None)
        objective = problem.moments.misfit(weight)
        if anchor is not None:
            objective = objective + lam * (weight - stacked(anchor, problem.sites)).square().sum(dim=1)
        return cls(weight, objective, objective, None)

    def outputs(self, start: int, stop: int) -> _Weights:
        before, after = (None if x is None else x[start:stop] for x in (self.before, self.after))
        return _Weights(self.value[start:stop], before, after, self.factor)


def _bias(
    problem: LinearProblem,
    site: Site,
    outputs: slice,
    weight: Tensor,
    anchor: Mapping[str, Tensor] | None,
    lam: float,
) -> Tensor:
    moments = problem.moments
    return solve_bias(
        moments.mean_target[outputs] + problem.expert_bias[site.name],
        weight @ moments.mean_in,
        moments.weight_sum,
        None if anchor is None else anchor[f"{site.name}.bias"],
        lam=lam,
    )


def _report(problem: LinearProblem, site: Site, weights: _Weights, lam: float) -> SiteReport:
    weight_sum = float(problem.moments.weight_sum)
    factor = weights.factor
    return SiteReport(
        site=site.name,
        kind=site.kind,
        lam=lam,
        objective_before=None if weights.before is None else float(weights.before.sum()),
        objective_after=None if weights.after is None else float(weights.after.sum()),
        weight_change=relative_change(weights.value, problem.merged[f"{site.name}.weight"]),
        condition_estimate=None if factor is None else factor.condition,
        smallest_eigenvalue=None if factor is None else factor.smallest_eigenvalue,
        task_weight_sum=weight_sum,
        task_weight_share=weight_sum / (weight_sum + lam) if site.name in problem.expert_bias else None,
    )


def relative_change(new: Tensor, old: Tensor) -> float | None:
    """|new - old|_F / |old|_F, in the dtype of `old`; None where that is zero."""
    size = float(torch.linalg.vector_norm(old))
    return float(torch.linalg.vector_norm(new.to(old) - old)) / size if size else None


def solve_norm(problem: NormProblem, anchor: Mapping[str, Tensor] | None, *, lam: float) -> SiteUpdate:
    """New scale and, where the norm has one, shift (Eq. 59).

    Args:
        problem: the norm and its moments.
        anchor: by parameter name, in the dtype of the moments; None drops the terms with `lam`.
        lam: ridge.

    Raises:
        SingularGramError: a coordinate's equations are singular to working precision.
    """
    moments, pull = problem.moments, anchor or {}
    scale_name, shift_name = f"{problem.site.name}.weight", f"{problem.site.name}.bias"
    merged = {name: value.to(moments.mean) for name, value in problem.merged.items()}
    if shift_name in merged:
        start, pulls = (merged[scale_name], merged[shift_name]), (pull.get(scale_name), pull.get(shift_name))
        scale, shift = solve_layer_norm(moments, *start, *pulls, lam=lam)
        parameters = {scale_name: scale, shift_name: shift}
    else:
        parameters = {scale_name: solve_rms_norm(moments, pull.get(scale_name), lam=lam)}
    report = SiteReport(
        site=problem.site.name,
        kind=problem.site.kind,
        lam=lam if anchor is not None else 0.0,
        objective_before=_objective(problem, merged, anchor, lam),
        objective_after=_objective(problem, parameters, anchor, lam),
        weight_change=relative_change(torch.cat([*parameters.values()]), torch.cat([*merged.values()])),
        task_weight_sum=float(moments.weight_sum),
    )
    return SiteUpdate(parameters, report)


def _objective(
    problem: NormProblem,
    parameters: Mapping[str, Tensor],
    anchor: Mapping[str, Tensor] | None,
    lam: float,
) -> float:
    """Eq. 57 from the moments alone."""
    name = problem.site.name
    total = problem.moments.misfit(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
    for key, value in (anchor or {}).items():
        total = total + lam * (parameters[key] - value).square().sum()
    return float(total)
