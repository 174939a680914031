"""TIES-Merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from torch import Tensor

from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.sparse import MergeFunc, TrimScope, elected
from driftlens.settings import Bounds


@merge_methods.method(
    "ties",
    title="TIES-Merging",
    source="arXiv:2306.01708",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling", "homogeneous", "experts_at_base"},
    reads="model",
    passes=3,
)
def ties(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: Annotated[float, Bounds(), "factor on the merged step"] = 1.0,
    density: Annotated[
        float, Bounds(0, 1, low_open=True), "share of a task vector's entries that is kept"
    ] = 0.2,
    merge_func: Annotated[MergeFunc, "what is made of entries whose signs agree"] = "mean",
    trim_scope: Annotated[
        TrimScope, "whether the share is of the model's entries or of every tensor's"
    ] = "global",
) -> Iterator[tuple[str, Tensor]]:
    """base + scaling * what the largest entries of the task vectors make, those of the elected sign.

    As in the paper an exact tie of signs makes 0, where its code takes the majority sign of the whole model. Published
    since: `merge_func=sum` with scaling 0.3. A tensor that a file holds twice counts once in a global trim.
    """
    return elected(
        base, experts, scaling=scaling, density=density, merge_func=merge_func, trim_scope=trim_scope
    )
