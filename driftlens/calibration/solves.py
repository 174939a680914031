"""FeatCal's solves, of linear sites that share a Gram matrix and of norms, and what is reported of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.engine.problems import LinearProblem, NormProblem, SiteReport, SiteUpdate
from driftlens.linalg.cholesky import Factor, probe, stationarity_error
from driftlens.linalg.norm_affine import solve_layer_norm, solve_rms_norm
from driftlens.linalg.ridge import Moments, ridge_factor, solve_bias, solve_ridge
from driftlens.models.chain import Site


def solve_linear(
    problem: LinearProblem, anchor: Mapping[str, Tensor] | None, *, lam: float, update: Collection[str]
) -> list[SiteUpdate]:
    """New weight (Eq. 17) and bias (Eq. 55) of each site, as `update` says; one factor serves the rows of all.

    `anchor` is by parameter name, in the dtype of the moments; None drops the terms with `lam`.
    """
    pull, moments = 0.0 if anchor is None else lam, problem.moments
    solves = "linear" in update
    factor = ridge_factor(moments.gram, pull, scale=moments.weight_sum) if solves else None
    direction = probe(moments.gram) if solves else None
    image = None if direction is None else moments.weight_sum * (moments.gram @ direction) + pull * direction
    updates, start = [], 0
    for site in problem.sites:  # one by one: all at once would hold several copies of all weights
        name = f"{site.name}.weight"
        merged = problem.merged[name]
        of_site = moments.of_outputs(slice(start, start + len(merged)))
        start += len(merged)
        weights = _Weights.of(of_site, merged, None if anchor is None else anchor[name], pull, factor)
        parameters = {name: weights.value} if solves else {}
        error = None
        if direction is not None and image is not None:
            wanted = of_site.weight_sum * (of_site.output_cross @ direction)
            if anchor is not None:
                wanted = wanted + pull * (anchor[name] @ direction)
            error = stationarity_error(weights.value, image, wanted)
        if "bias" in update and site.name in problem.expert_bias:
            parameters[f"{site.name}.bias"] = solve_bias(
                of_site.mean_target + problem.expert_bias[site.name],
                weights.value @ of_site.mean_in,
                of_site.weight_sum,
                None if anchor is None else anchor[f"{site.name}.bias"],
                lam=lam,
            )
        updates.append(SiteUpdate(parameters, _report(problem, site, weights, pull, error)))
    return updates


@dataclass(frozen=True)
class _Weights:
    """Weights [o, k] of some outputs, and the objective (Eq. 15) by output, at the merged weights and at these."""

    value: Tensor
    before: Tensor | None
    after: Tensor | None
    factor: Factor | None

    @classmethod
    def of(
        cls, moments: Moments, merged: Tensor, anchor: Tensor | None, lam: float, factor: Factor | None
    ) -> _Weights:
        """The solution; where there is no factor, the merged weights."""
        if factor is not None:
            solution = solve_ridge(moments, anchor, lam=lam, factor=factor)
            after = solution.objective
            return cls(
                solution.weight, None if after is None else after + solution.excess(merged), after, factor
            )
        weight = merged.to(moments.gram)
        if moments.target_energy is None:
            return cls(weight, None, None, None)
        objective = moments.misfit(weight)
        if anchor is not None:
            objective = objective + lam * (weight - anchor).square().sum(dim=1)
        return cls(weight, objective, objective, None)


def _report(
    problem: LinearProblem, site: Site, weights: _Weights, lam: float, error: float | None
) -> SiteReport:
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
        stationarity_error=error,
    )


def relative_change(new: Tensor, old: Tensor) -> float | None:
    """|new - old|_F / |old|_F, in the dtype of `old`; None where that is zero."""
    size = float(torch.linalg.vector_norm(old))
    return float(torch.linalg.vector_norm(new.to(old) - old)) / size if size else None


def solve_norm(problem: NormProblem, anchor: Mapping[str, Tensor] | None, *, lam: float) -> SiteUpdate:
    """New scale and, where the norm has one, shift (Eq. 59); arguments as for `solve_linear`."""
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
    problem: NormProblem, parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor] | None, lam: float
) -> float:
    """Eq. 57 from the moments alone."""
    name = problem.site.name
    total = problem.moments.misfit(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
    for key, value in (anchor or {}).items():
        total = total + lam * (parameters[key] - value).square().sum()
    return float(total)
