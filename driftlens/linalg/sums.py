"""Sums of float32 products, kept in float64."""

from __future__ import annotations

import torch
from torch import Tensor

_ENTRIES = 2**18  # converted at a time: about what a core's own cache holds


def add_scaled(total: Tensor, part: Tensor, scale: float = 1.0) -> None:
    """Add `scale * part` to `total` in place, of one shape; `part` may be of a narrower dtype.

    Mixed sums make a converted copy first. A copy of all of a large matrix takes ten times longer than the sum, for the
    sake of the memory it has to be given, so only some rows are converted at a time.
    """
    rows = max(1, _ENTRIES // max(1, total[0].numel()))
    for start in range(0, len(total), rows):
        mine = total[start : start + rows]
        torch.add(mine, part[start : start + rows], alpha=scale, out=mine)


def grown(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum with one more part in it: in the part's own dtype while it is the only one, then in `dtype`.

    `total` may be modified; `part` isn't, once there are two.
    """
    if total is None:
        return part
    if total.dtype != dtype:
        total = total.to(dtype)
    add_scaled(total, part)
    return total
