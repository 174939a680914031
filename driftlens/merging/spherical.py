"""Means on the sphere: SLERP of two experts, the Karcher mean of any number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.errors import SpecError
from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict, merge_methods

PARALLEL = 0.9995
"""Beyond this cosine a straight line is taken, as is usual: the angle's sine would be too small to divide by."""


@merge_methods.method(
    "slerp",
    title="SLERP",
    source="doi:10.1145/325334.325242",
    laws={"expert_order_free", "equal_experts_are_fixed", "experts_at_base"},
    reads="tensor",
    needs_base=False,
)
def slerp(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    t: Annotated[
        float, Bounds(0, 1), "how far from the first task's expert to the second's, sorted by name"
    ] = 0.5,
) -> dict[str, Tensor]:
    """Each tensor on the great circle between those of two experts."""
    if len(experts) != 2:
        raise SpecError(
            f"merge method 'slerp' merges 2 experts, and there are {len(experts)}",
            hint="Leave two experts in the spec, or take `karcher`, which merges any number.",
        )
    first, second = experts.values()
    return {name: between(first[name], second[name], t) for name in base}


def between(first: Tensor, second: Tensor, t: float) -> Tensor:
    """(sin((1-t) a) first + sin(t a) second) / sin(a), a the angle between the two as vectors."""
    a, b = first.double().flatten(), second.double().flatten()
    cosine = a @ b / (a.norm() * b.norm()).clamp(min=torch.finfo(a.dtype).tiny)
    if abs(cosine) > PARALLEL:
        return (1 - t) * first + t * second
    angle = cosine.arccos()
    parts = [(share * angle).sin() / angle.sin() for share in (1 - t, t)]
    return (parts[0] * first + parts[1] * second).to(first)


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
