"""Model Breadcrumbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.sparse import STEP_LAWS, ranked
from driftlens.merging.steps import SumScaling, vectors_of


@merge_methods.method(
    "breadcrumbs", title="Model Breadcrumbs", source="arXiv:2312.06795", laws=STEP_LAWS, reads="tensor"
)
def breadcrumbs(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: SumScaling = 0.2,
    outliers: Annotated[float, Bounds(0, 1), "share of the largest entries that is dropped first"] = 0.006,
    density: Annotated[float, Bounds(0, 1, low_open=True), "share of the entries left that is kept"] = 0.15,
    scope: Annotated[Literal["row", "tensor"], "of what these are shares"] = "row",
) -> dict[str, Tensor]:
    """base + scaling * the sum of task vectors without their largest and their many small entries.

    The paper masks by layer; by rows is what its code does. Scalars stay whole.
    """
    return {
        name: start
        + scaling
        * sum(
            (_trail(vector, outliers, density, scope) for vector in vectors_of(base, experts, name)),
            start=0 * start,
        )
        for name, start in base.items()
    }


def _trail(vector: Tensor, outliers: float, density: float, scope: str) -> Tensor:
    if not vector.dim():
        return vector
    size = vector.abs() if scope == "row" else vector.abs().flatten()
    dropped = int(outliers * size.shape[-1])
    keep = ranked(size, dropped, int(density * (size.shape[-1] - dropped)))
    return torch.where(keep.view_as(vector), vector, 0)
