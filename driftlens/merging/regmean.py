"""Merging by regression of linear modules' outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.linalg.partial import solve_in_range
from driftlens.merging.average import average
from driftlens.merging.method import StateDict, merge_methods

LAWS = {"expert_order_free", "equal_experts_are_fixed", "one_expert_is_fixed"}


@merge_methods.method(
    "regmean", title="RegMean", source="arXiv:2212.09849", laws=LAWS, reads="moments", needs_base=False
)
@merge_methods.method(
    "regmean_pp", title="RegMean++", source="arXiv:2508.03121", laws=LAWS, reads="prefix", needs_base=False
)
def regmean(
    base: StateDict,
    experts: Mapping[str, StateDict],
    moments: Mapping[str, Tensor],
    *,
    off_diagonal: Annotated[
        float, Bounds(0, 1), "factor on what is beside the diagonal of the experts' Gram matrices"
    ] = 0.95,
) -> dict[str, Tensor]:
    """The weight whose outputs come closest to every expert's own, on the inputs that this expert feeds the module.

    (sum W_i G_i) (sum G_i)^-1, with G_i shrunk towards its diagonal. Where no expert's inputs ever reach, the weight is
    the mean, as is everything else. In RegMean++ every expert's layer reads what the layers merged before it make of
    the task's samples.
    """
    merged = average(base, experts)
    mean = torch.stack([expert["weight"].double() for expert in experts.values()]).mean(dim=0)
    total, missing = torch.zeros_like(next(iter(moments.values()))), torch.zeros_like(mean)
    for task, gram in moments.items():
        shrunk = off_diagonal * gram + (1 - off_diagonal) * gram.diag().diag()
        total += shrunk
        missing += (experts[task]["weight"].double() - mean) @ shrunk
    return {**merged, "weight": mean + solve_in_range(total, missing)}
