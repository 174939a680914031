"""Consensus Task Arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import SumScaling, vectors_of


@merge_methods.method(
    "consensus_ta",
    title="Consensus Task Arithmetic",
    source="arXiv:2405.07813",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling", "homogeneous", "experts_at_base"},
)
def consensus_ta(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: SumScaling = 0.3,
    mask_threshold: Annotated[
        float, Bounds(0), "how far the other tasks may outweigh a task's own entry"
    ] = 0.4,
    min_tasks: Annotated[int, Bounds(0), "how many tasks must want an entry for it to stay"] = 2,
) -> dict[str, Tensor]:
    """base + scaling * the sum of task vectors, where at least `min_tasks` TALL masks are set.

    A task's mask is set where |its task vector| >= mask_threshold * |the sum of the others|. The paper chooses
    mask_threshold (0.2 to 0.6) per task and scaling on validation data.
    """
    merged = {}
    for name, start in base.items():
        vectors = torch.stack(vectors_of(base, experts, name))
        total = vectors.sum(dim=0)
        votes = (vectors.abs() >= mask_threshold * (total - vectors).abs()).sum(dim=0)
        merged[name] = start + scaling * torch.where(votes >= min_tasks, total, 0)
    return merged
