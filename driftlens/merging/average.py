"""Simple averaging."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from driftlens.merging.method import StateDict, merge_methods


@merge_methods.method(
    "average",
    title="Simple Averaging",
    source="arXiv:2203.05482",
    laws={"expert_order_free", "equal_experts_are_fixed"},
    needs_base=False,
)
def average(base: StateDict, experts: Mapping[str, StateDict]) -> dict[str, Tensor]:
    """Mean over tasks of the experts' parameters."""
    return {
        name: sum((expert[name] for expert in experts.values()), start=0 * base[name]) / len(experts)
        for name in base
    }
