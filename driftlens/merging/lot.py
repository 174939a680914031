"""Layer-wise optimal task vector merging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.linalg.partial import solve_in_range
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import MATRIX, stepped


@merge_methods.method(
    "lot",
    title="LOT Merging",
    source="arXiv:2505.23859",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="moments",
    others="lot",
    norms=True,
    work=lambda settings, experts, rows, columns: columns**2 * (2 * experts * rows + 20 * columns),
)
def lot(
    base: StateDict,
    experts: Mapping[str, StateDict],
    moments: Mapping[str, Tensor],
    *,
    scaling: Annotated[
        float, Bounds(-100, 100), "factor on the merged step; published: 1.2 for ViT-B/32, 1.5 for ViT-L/14"
    ] = 1.2,
) -> dict[str, Tensor]:
    """base + scaling * the step that changes outputs as close to every expert's as possible, on that expert's inputs.

    Of linear modules (sum T_i G_i) times the pseudoinverse of sum G_i, with task vectors T_i: where no expert's inputs
    reach, the base stays. Of norms' scales the mean weighted by the squared normalised inputs. Every task counts alike,
    however many tokens it has. All else takes the mean task vector.
    """
    merged = stepped(base, experts, scaling)
    if MATRIX in base and moments:
        vectors = {task: (experts[task][MATRIX] - base[MATRIX]).double() for task in moments}
        total = torch.stack(list(moments.values())).sum(dim=0)
        if total.dim() == 2:
            wanted = torch.stack([vectors[task] @ gram for task, gram in moments.items()]).sum(dim=0)
            step = solve_in_range(total, wanted)
        else:
            shares = [gram / total for gram in moments.values()]
            mean = torch.stack(list(vectors.values())).mean(dim=0)
            weighted = torch.stack([share * vectors[t] for share, t in zip(shares, moments, strict=True)])
            step = torch.where(total > 0, weighted.sum(dim=0), mean)
        merged[MATRIX] = base[MATRIX] + scaling * step.to(base[MATRIX])
    return merged
