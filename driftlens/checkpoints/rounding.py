"""How much of a change of weights a number type keeps, counted tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from driftlens.base.rounding import Change
from driftlens.checkpoints.sources import StateSource, promoted

LOOKED_AT = 1 << 12
"""Entries of each tensor by which a model is judged that nobody reads as a whole: thousands suffice for a share."""
_ORDERED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def change_of(start: Tensor, end: Tensor, dtype: torch.dtype) -> Change:
    """Of two tensors of one shape: what differs, and what of that `dtype` keeps."""
    name = str(dtype).removeprefix("torch.")
    wide = promoted(start.dtype, end.dtype, torch.float32)
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


Rows = tuple[int, int] | None


def sampled(
    source: StateSource, key: str, other: Callable[[Rows], Tensor], dtype: torch.dtype, rows: Rows = None
) -> Change:
    """What `other` has in place of these rows of a tensor, by the first of them alone; norms are scaled up to all."""
    shape, few = source.headers[key].shape, None
    if shape:
        first, last = rows or (0, shape[0])
        shape = (last - first, *shape[1:])
        few = (first, min(last, first + max(1, LOOKED_AT // max(1, math.prod(shape[1:])))))
    start = source.read(key, few)
    change, scale = change_of(start, other(few), dtype), math.prod(shape) / max(1, start.numel())
    return replace(change, energy=scale * change.energy, start=scale * change.start)


def written(source: StateSource, key: str, value: Tensor, dtype: torch.dtype, rows: Rows = None) -> Change:
    """The same of what was computed in place of these rows, and is about to be stored in `dtype`."""
    first = 0 if rows is None else rows[0]
    return sampled(
        source,
        key,
        lambda few: value if few is None else value[few[0] - first : few[1] - first].cpu(),
        dtype,
        rows,
    )


def task_vector(base: StateSource, expert: StateSource) -> Change:
    """What an expert changes of its base, by the first entries of every tensor.

    The number type is the coarser of both, that of the expert where they are as coarse.
    """
    total = Change("")
    for key, header in base.headers.items():
        own = expert.headers.get(key)
        if own is not None and own.shape == header.shape and header.dtype.is_floating_point:
            narrow = header.dtype if header.dtype.itemsize < own.dtype.itemsize else own.dtype
            total += sampled(base, key, partial(expert.read, key), narrow)
    return total
