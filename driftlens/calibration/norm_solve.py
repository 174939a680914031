"""FeatCal's solve of one norm, and what is reported of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from driftlens.calibration.linear_solve import relative_change
from driftlens.engine.problems import NormProblem, SiteReport, SiteUpdate
from driftlens.linalg.norm_affine import solve_layer_norm, solve_rms_norm


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
