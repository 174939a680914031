"""Isotropic merging in the common subspace."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from driftlens.linalg.partial import singular_parts, svd_operations
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import StepScaling, stepped


@merge_methods.method(
    "iso_c",
    title="Iso-C",
    source="arXiv:2502.04959",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="site",
    others="iso_c",
    work=lambda settings, experts, rows, columns: svd_operations(1, rows, columns),
)
def iso_c(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: StepScaling = 1.0
) -> dict[str, Tensor]:
    """base + scaling * the sum of task vectors, all of whose singular values are made their mean.

    Directions that the sum doesn't have stay out of it, and out of the mean. What is no matrix of a linear module takes
    the mean task vector.
    """
    return stepped(base, experts, scaling, _step)


def _step(vectors: list[Tensor]) -> Tensor:
    left, values, right = singular_parts(torch.stack(vectors).sum(dim=0))
    return values.sum() / max(1, len(values)) * left @ right
