"""TIES-Merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated

from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.sparse import STEP_LAWS, DropRate, MergeFunc, Seed, TrimScope, dare, elected
from driftlens.merging.steps import StepScaling


@merge_methods.method(
    "ties", title="TIES-Merging", source="arXiv:2306.01708", laws=STEP_LAWS, reads="model", passes=3
)
def ties(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: StepScaling = 1.0,
    density: Annotated[
        float, Bounds(0, 1, low_open=True), "share of a task vector's entries that is kept"
    ] = 0.2,
    merge_func: Annotated[MergeFunc, "what is made of entries whose signs agree"] = "mean",
    trim_scope: Annotated[
        TrimScope, "whether the share is of the model's entries or of every tensor's"
    ] = "global",
    drop_rate: DropRate = 0.0,
    seed: Seed = 0,
) -> Iterator[tuple[str, Tensor]]:
    """base + scaling * what the largest entries of the task vectors make, those of the elected sign.

    As in the paper an exact tie of signs makes 0, where its code takes the majority sign of the whole model. Published
    since: `merge_func=sum` with scaling 0.3, and DARE-TIES with `drop_rate=0.5 merge_func=sum scaling=0.5`, which drops
    entries as `dare` does before it trims. A tensor that a file holds twice counts once in a global trim.
    """
    drop = partial(dare, seed=seed, drop_rate=drop_rate)
    return elected(base, experts, scaling, density, merge_func, trim_scope, drop)
