"""Task vectors, as several methods take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from driftlens.merging.method import StateDict

MATRIX = "weight"
"""The name under which a linear module's matrix comes; all else comes under other names."""


def vectors_of(base: StateDict, experts: Mapping[str, StateDict], name: str) -> list[Tensor]:
    """The task vectors of one tensor."""
    return [expert[name] - base[name] for expert in experts.values()]


def stepped(
    base: StateDict,
    experts: Mapping[str, StateDict],
    scaling: float,
    of_matrices: Callable[[list[Tensor]], Tensor],
) -> dict[str, Tensor]:
    """base + scaling * step: of a matrix what `of_matrices` makes of its task vectors, of all else their mean."""
    merged = {}
    for name, start in base.items():
        vectors = vectors_of(base, experts, name)
        is_matrix = name == MATRIX and start.dim() == 2
        step = of_matrices(vectors) if is_matrix else sum(vectors, start=0 * start) / len(vectors)
        merged[name] = start + scaling * step.to(start)
    return merged
