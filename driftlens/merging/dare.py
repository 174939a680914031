"""DARE, with Task Arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from driftlens.merging import sparse
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import SumScaling


@merge_methods.method(
    "dare",
    title="DARE with Task Arithmetic",
    source="arXiv:2311.03099",
    laws=sparse.STEP_LAWS | {"unbiased_over_masks"},
    reads="tensor",
)
def dare(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: SumScaling = 0.3,
    drop_rate: sparse.DropRate = 0.5,
    seed: sparse.Seed = 0,
) -> dict[str, Tensor]:
    """base + scaling * the sum of task vectors, of which a random share stays, divided by that share.

    An entry's mask depends on seed, task, tensor and place alone. Language models are published with drop_rate 0.9.
    """
    merged = {}
    for name, start in base.items():
        step = 0 * start
        for task, expert in experts.items():
            step = step + sparse.dare(expert[name] - start, task, name, seed=seed, drop_rate=drop_rate)
        merged[name] = start + scaling * step
    return merged
