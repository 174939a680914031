"""How much of a change of weights a number type keeps, counted tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from driftlens.base.rounding import Change
from driftlens.checkpoints.sources import StateSource

LOOKED_AT = 1 << 12
"""Entries of each tensor by which a model is judged that nobody reads as a whole: thousands suffice for a share."""
_ORDERED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def change_of(start: Tensor, end: Tensor, dtype: torch.dtype) -> Change:
    """Of two tensors of one shape: what differs, and what of that `dtype` keeps."""
    name = str(dtype).removeprefix("torch.")
    wide = torch.promote_types(torch.promote_types(start.dtype, end.dtype), torch.float32)
    start, end = start.to(wide), end.to(wide)
    differs = start != end
    norm = float(start.double().square().sum())
    if not (changed := int(differs.sum())):
        return Change(name, start=norm)
    apart = (_ordinal(start.to(dtype)) - _ordinal(end.to(dtype)))[differs]
    steps = {count: int((apart.abs() == count).sum()) for count in (0, 1)}
    energy = float((end - start).double().square().sum())
    return Change(name, start.numel(), changed, steps[0], steps[1], energy, norm)


def _ordinal(tensor: Tensor) -> Tensor:
    """Integers in the order of a tensor's numbers, whose neighbours are one apart; both zeros are 0."""
    bits = tensor.contiguous().view(_ORDERED[tensor.dtype.itemsize]).long()
    most = (1 << (8 * tensor.dtype.itemsize - 1)) - 1
    return torch.where(bits < 0, -(bits & most), bits)


def task_vector(base: StateSource, expert: StateSource) -> Change:
    """What an expert changes of its base, of the first entries of every tensor; norms are scaled up to all of them.

    The number type is the coarser of both, that of the expert where they are as coarse.
    """
    total = Change("")
    for key, header in base.headers.items():
        own = expert.headers.get(key)
        if own is None or own.shape != header.shape or not header.dtype.is_floating_point or 0 in own.shape:
            continue
        rows = None
        if header.shape:
            width = math.prod(header.shape[1:])
            rows = (0, min(header.shape[0], max(1, LOOKED_AT // width)))
        narrow = header.dtype if header.dtype.itemsize < own.dtype.itemsize else own.dtype
        start = base.read(key, rows)
        change, scale = (
            change_of(start, expert.read(key, rows), narrow),
            math.prod(header.shape) / start.numel(),
        )
        total += replace(change, energy=scale * change.energy, start=scale * change.start)
    return total
