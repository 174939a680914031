"""RegMean on the inputs that the merged model itself makes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.regmean import LAWS, OffDiagonal, regmean


@merge_methods.method(
    "regmean_pp", title="RegMean++", source="arXiv:2508.03121", laws=LAWS, reads="prefix", needs_base=False
)
def regmean_pp(
    base: StateDict,
    experts: Mapping[str, StateDict],
    moments: Mapping[str, Tensor],
    *,
    off_diagonal: OffDiagonal = 0.95,
) -> dict[str, Tensor]:
    """As RegMean, where every expert's layer reads what the layers merged before it make of the task's samples."""
    return regmean(base, experts, moments, off_diagonal=off_diagonal)
