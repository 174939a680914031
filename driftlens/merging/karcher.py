"""Karcher mean of any number of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict, merge_methods

MOST_STEPS = 1000
"""For each tensor: directions that have not met by then never do."""


@merge_methods.method(
    "karcher",
    title="Karcher mean",
    source="doi:10.1002/cpa.3160300502",
    laws={"expert_order_free", "equal_experts_are_fixed", "one_expert_is_fixed", "experts_at_base"},
    reads="tensor",
    needs_base=False,
)
def karcher(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    max_iter: Annotated[int, Bounds(1, MOST_STEPS), "steps at most"] = 10,
    tol: Annotated[float, Bounds(0), "length of a step on the unit sphere that is the last"] = 1e-5,
) -> dict[str, Tensor]:
    """Each tensor's direction the Riemannian mean of the experts' on the sphere, its norm the mean of theirs.

    Tensors that are zero have no direction, and count for the norm alone.
    """
    return {name: karcher_mean([expert[name] for expert in experts.values()], max_iter, tol) for name in base}


def karcher_mean(tensors: list[Tensor], max_iter: int, tol: float) -> Tensor:
    """The mean on the sphere times the mean norm, by steps along the mean of the logarithms."""
    rows = torch.stack([tensor.double().flatten() for tensor in tensors])
    norms = rows.norm(dim=1)
    units = rows[norms > 0] / norms[norms > 0, None]
    if not len(units):
        return torch.zeros_like(tensors[0])
    mean = units.mean(dim=0)
    mean = mean / mean.norm() if mean.norm() > tol else units[0]
    for _ in range(max_iter):
        cosines = units @ mean
        rest = units - cosines[:, None] * mean
        sines = rest.norm(dim=1)
        angles = torch.atan2(sines, cosines)
        factors = torch.where(sines > 0, angles / sines.clamp(min=torch.finfo(sines.dtype).tiny), 1.0)
        step = (factors[:, None] * rest).mean(dim=0)
        length = step.norm()
        if length <= tol:
            break
        mean = length.cos() * mean + length.sin() * step / length
        mean = mean / mean.norm()
    return (norms.mean() * mean).view_as(tensors[0]).to(tensors[0])
