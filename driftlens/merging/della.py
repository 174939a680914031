"""DELLA-Merging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.errors import SpecError
from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.sparse import STEP_LAWS, DropRate, Seed, agreed, keep_mask
from driftlens.merging.steps import StepScaling


@merge_methods.method(
    "della",
    title="DELLA-Merging",
    source="arXiv:2406.11617",
    laws=STEP_LAWS | {"unbiased_over_masks"},
    reads="tensor",
)
def della(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: StepScaling = 1.0,
    drop_rate: DropRate = 0.5,
    window: Annotated[
        float, Bounds(0, 1), "by how much the chances of a row's least and largest differ"
    ] = 0.2,
    seed: Seed = 0,
) -> dict[str, Tensor]:
    """base + scaling * the mean of what MAGPRUNE leaves of the task vectors, those entries of the elected sign.

    Entries are dropped at random, the larger in their row the less often, and divided by their chance to stay. Chances
    go evenly from drop_rate - window / 2 to drop_rate + window / 2. The paper searches all three settings on
    validation data, so these are middling.
    """
    low, high = drop_rate - window / 2, drop_rate + window / 2
    if low < 0 or high >= 1:
        raise SpecError(
            f"merge method 'della' would drop entries with chances from {low:g} to {high:g}",
            hint="Choose window so that drop_rate - window / 2 is at least 0, and drop_rate + window / 2 less than 1.",
        )
    merged = {}
    for name, start in base.items():
        vectors = []
        for task, expert in experts.items():
            vector = expert[name] - start
            keep = keep_chances(vector, drop_rate, window)
            vectors.append(torch.where(keep_mask(keep, seed, task, name), vector / keep.to(vector), 0))
        merged[name] = start + scaling * agreed(vectors, "mean")
    return merged


def keep_chances(vector: Tensor, drop_rate: float, window: float) -> Tensor:
    """1 - p of every entry, from its place in its row by magnitude."""
    if not vector.dim() or vector.shape[-1] == 1:
        return torch.full_like(vector, 1 - drop_rate)
    places = vector.abs().argsort(dim=-1, stable=True).argsort(dim=-1)
    return 1 - drop_rate + window * (places / (vector.shape[-1] - 1) - 0.5)
