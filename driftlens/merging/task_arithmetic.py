"""Task Arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import SumScaling


@merge_methods.method(
    "task_arithmetic",
    title="Task Arithmetic",
    source="arXiv:2212.04089",
    laws={
        "expert_order_free",
        "zero_scaling_is_base",
        "affine_in_scaling",
        "one_expert_at_scaling_one",
        "homogeneous",
    },
)
def task_arithmetic(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: SumScaling = 0.3
) -> dict[str, Tensor]:
    """base + scaling * sum over tasks of (expert - base)."""
    return {
        name: start + scaling * sum((expert[name] - start for expert in experts.values()), start=0 * start)
        for name, start in base.items()
    }
