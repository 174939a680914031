"""Methods that merge linear modules by their singular vectors: Iso-C, Iso-CTS, TSV-Merge."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.linalg.cholesky import polar, singular_parts, svd_operations
from driftlens.merging.averages import StepScaling, stepped
from driftlens.merging.method import StateDict, merge_methods


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
    return stepped(base, experts, scaling, _isotropic)


def _isotropic(vectors: list[Tensor]) -> Tensor:
    left, values, right = singular_parts(torch.stack(vectors).sum(dim=0))
    return values.sum() / max(1, len(values)) * left @ right


@merge_methods.method(
    "iso_cts",
    title="Iso-CTS",
    source="arXiv:2502.04959",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="site",
    others="iso_cts",
    work=lambda settings, experts, rows, columns: svd_operations(experts + 3, rows, columns),
)
def iso_cts(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: StepScaling = 1.0,
    common: Annotated[float, Bounds(0, 1), "share of a matrix's rank that the sum's directions keep"] = 0.8,
) -> dict[str, Tensor]:
    """As Iso-C, where the sum's least directions give way to each expert's own beside the common ones.

    Experts share the rest of the rank alike, so `common` is rounded. Directions that a step doesn't have stay out of
    it, and out of the mean. What is no matrix of a linear module takes the mean task vector.
    """
    return stepped(base, experts, scaling, partial(_isotropic_by_task, common=common))


def _isotropic_by_task(vectors: list[Tensor], common: float) -> Tensor:
    rank, count = min(vectors[0].shape), len(vectors)
    own = min(rank // count, round((rank - int(rank * common)) / count))
    total = torch.stack(vectors).sum(dim=0)
    shared = _leading(total, total, rank - count * own)
    parts = [shared]
    for vector in vectors:
        rest = vector.double() - shared[0] @ (shared[0].mT @ vector.double())
        parts.append(_leading(rest, vector, own))
    left, values, right = (
        torch.cat([part[place] for part in parts], dim=dim) for place, dim in ((0, 1), (1, 0), (2, 0))
    )
    return values.sum() / max(1, len(values)) * polar(left) @ polar(right)


def _leading(matrix: Tensor, whole: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = singular_parts(matrix, whole)
    return left[:, :count], values[:count], right[:count]


@merge_methods.method(
    "tsv_m",
    title="TSV-Merge",
    source="arXiv:2412.00081",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling", "one_expert_at_scaling_one"},
    reads="site",
    others="tsv_m",
    work=lambda settings, experts, rows, columns: svd_operations(experts + 2, rows, columns),
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
