"""A merge method: the entrywise median of the task vectors."""

from typing import Annotated

import torch

from driftlens.merging.method import merge_methods
from driftlens.utils.registry import Bounds


@merge_methods.method("median", title="Median of Task Vectors", source="", laws={"expert_order_free"})
def median(base, experts, *, scaling: Annotated[float, Bounds(low=0), "factor of the median"] = 1.0):
    """Return base + scaling * median over tasks of (expert - base), entry by entry."""
    steps = {name: [expert[name] - base[name] for expert in experts.values()] for name in base}
    return {name: base[name] + scaling * torch.stack(steps[name]).quantile(0.5, dim=0) for name in base}
