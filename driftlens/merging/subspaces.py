"""Methods that merge linear modules by their singular vectors: Iso-C and TSV-Merge."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from driftlens.linalg.cholesky import polar, singular_parts
from driftlens.merging.averages import StepScaling, stepped
from driftlens.merging.method import StateDict, merge_methods


@merge_methods.method(
    "iso_c",
    title="Iso-C",
    source="arXiv:2502.04959",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="site",
    others="iso_c",
)
def iso_c(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: StepScaling = 1.0
) -> dict[str, Tensor]:
    """base + scaling * the sum of task vectors, all of whose singular values are made their mean.

    Directions that the sum doesn't have stay out of it, and out of the mean. What is no matrix of a linear module takes
    the mean task vector.
    """
    return stepped(base, experts, scaling, _isotropic)


def _isotropic(vectors: list[Tensor]) -> Tensor:
    left, values, right = singular_parts(torch.stack(vectors).sum(dim=0))
    return values.sum() / max(1, len(values)) * left @ right


@merge_methods.method(
    "tsv_m",
    title="TSV-Merge",
    source="arXiv:2412.00081",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling", "one_expert_at_scaling_one"},
    reads="site",
    others="tsv_m",
)
def tsv_m(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: StepScaling = 1.0
) -> dict[str, Tensor]:
    """base + scaling * U S V', of every expert's leading singular vectors, brought apart by polar factors.

    Each of N experts gives an Nth of a matrix's rank, and one vector where that is none. Vectors that several experts
    share count once in the polar factors, so N equal experts give the leading Nth of their common step. What is no
    matrix of a linear module takes the mean task vector.
    """
    return stepped(base, experts, scaling, _apart)


def _apart(vectors: list[Tensor]) -> Tensor:
    rank = max(1, min(vectors[0].shape) // len(vectors))
    parts = [singular_parts(vector) for vector in vectors]
    left = torch.cat([part[0][:, :rank] for part in parts], dim=1)
    values = torch.cat([part[1][:rank] for part in parts])
    right = torch.cat([part[2][:rank] for part in parts])
    return polar(left) * values @ polar(right)
