"""Model Stock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import vectors_of


@merge_methods.method(
    "model_stock",
    title="Model Stock",
    source="arXiv:2403.19522",
    laws={
        "expert_order_free",
        "equal_experts_are_fixed",
        "one_expert_is_fixed",
        "homogeneous",
        "experts_at_base",
    },
    reads="tensor",
)
def model_stock(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    filter_wise: Annotated[bool, "one ratio for each row in place of one for each tensor"] = False,
) -> dict[str, Tensor]:
    """base + t * the mean task vector, t = n c / (1 + (n - 1) c), c the cosine between task vectors.

    The paper has one angle among n experts; c is the mean over pairs, as in mergekit. A task vector of zero is at right
    angles to all others.
    """
    return {name: start + _step(vectors_of(base, experts, name), filter_wise) for name, start in base.items()}


def _step(vectors: list[Tensor], filter_wise: bool) -> Tensor:
    count, first = len(vectors), vectors[0]
    if count == 1:
        return first
    rows = torch.stack(vectors).double()
    rows = rows.reshape(count, *((-1, first.shape[-1]) if filter_wise and first.dim() > 1 else (1, -1)))
    units = rows / rows.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    # All ordered pairs, less each vector with itself.
    pairs = units.sum(dim=0).square().sum(dim=-1) - units.square().sum(dim=(0, -1))
    cosine = pairs / (count * (count - 1))
    below = 1 + (count - 1) * cosine
    # Where task vectors cancel there is no step, whatever its length.
    ratio = torch.where(below > 1e-12, count * cosine / below, 0.0)
    return (ratio[:, None] * rows.mean(dim=0)).view_as(first).to(first)
