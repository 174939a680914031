"""A step from the base along task vectors, as several methods take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict

StepScaling = Annotated[float, Bounds(-100, 100), "factor on the merged step"]
SumScaling = Annotated[float, Bounds(-100, 100), "factor on the sum of task vectors"]
MOST_STEPS = 1_000_000
"""Of a descent."""
MATRIX = "weight"
"""The name under which a linear module's matrix comes; all else comes under other names."""


def vectors_of(base: StateDict, experts: Mapping[str, StateDict], name: str) -> list[Tensor]:
    """The task vectors of one tensor."""
    start = base[name]
    return [expert[name] - start for expert in experts.values()]


def stepped(
    base: StateDict,
    experts: Mapping[str, StateDict],
    scaling: float,
    of_matrices: Callable[[list[Tensor]], Tensor] | None = None,
) -> dict[str, Tensor]:
    """base + scaling * step: of a matrix what `of_matrices` makes of its task vectors, of all else their mean."""
    merged = {}
    for name, start in base.items():
        vectors = vectors_of(base, experts, name)
        if of_matrices is not None and name == MATRIX and start.dim() == 2:
            step = of_matrices(vectors)
        else:
            step = torch.stack(vectors).mean(dim=0)
        merged[name] = start + scaling * step.to(start)
    return merged
