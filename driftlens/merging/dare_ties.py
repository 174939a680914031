"""DARE, with TIES."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated

from torch import Tensor

from driftlens.merging import sparse
from driftlens.merging.dare import DropRate, Seed
from driftlens.merging.method import StateDict, merge_methods
from driftlens.settings import Bounds


@merge_methods.method(
    "dare_ties",
    title="DARE with TIES",
    source="arXiv:2311.03099",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling", "homogeneous", "experts_at_base"},
    reads="model",
    passes=3,
)
def dare_ties(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: Annotated[float, Bounds(), "factor on the merged step"] = 0.5,
    drop_rate: DropRate = 0.5,
    seed: Seed = 0,
    density: Annotated[
        float, Bounds(0, 1, low_open=True), "share of a task vector's entries that is kept"
    ] = 0.2,
    merge_func: Annotated[sparse.MergeFunc, "what is made of entries whose signs agree"] = "sum",
    trim_scope: Annotated[
        sparse.TrimScope, "whether the share is of the model's entries or of every tensor's"
    ] = "global",
) -> Iterator[tuple[str, Tensor]]:
    """TIES on task vectors that DARE made sparse.

    Where drop_rate is at least 1 - density the trim removes nothing more.
    """
    return sparse.elected(
        base,
        experts,
        scaling=scaling,
        density=density,
        merge_func=merge_func,
        trim_scope=trim_scope,
        drop=partial(sparse.dare, seed=seed, drop_rate=drop_rate),
    )
