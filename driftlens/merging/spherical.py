"""SLERP of two experts."""

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
            hint="Leave two experts in the spec, or take `average`, which merges any number.",
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
