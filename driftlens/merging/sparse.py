"""Merge methods that drop entries of task vectors: TIES and DARE."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from driftlens.merging.method import StateDict, StepScaling, SumScaling, merge_methods
from driftlens.utils.registry import Bounds

MergeFunc = Literal["mean", "sum", "max"]
TrimScope = Literal["global", "per_tensor"]
DropRate = Annotated[float, Bounds(0, 0.999), "share of entries dropped at random"]
Seed = Annotated[int, Bounds(0), "of the random masks"]
# (task vector, task, name) -> task vector
Drop = Callable[[Tensor, str, str], Tensor]
STEP_LAWS = {
    "expert_order_free",
    "zero_scaling_is_base",
    "affine_in_scaling",
    "homogeneous",
    "experts_at_base",
}
# A float32's magnitude has 31 bits. `_trim_thresholds` counts by the 16 high ones, then by these low ones: counts of
# all values at once would take 16 GiB.
LOW_BITS = 15


def _random_keep_mask(keep: Tensor, seed: int, task: str, name: str) -> Tensor:
    """Sample a mask that is True with probability `keep`, determined by the arguments alone."""
    # A hash, so that a mask doesn't depend on the order of tasks or tensors; on the CPU, so that no device differs.
    key = hashlib.sha256(repr((seed, task, name)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    return torch.rand(keep.shape, generator=generator).to(keep.device) < keep


def _drop_random_entries(vector: Tensor, task: str, name: str, *, seed: int, drop_rate: float) -> Tensor:
    """Drop random entries of a task vector, and divide the others by the share that is kept."""
    if not drop_rate:
        return vector
    keep = _random_keep_mask(torch.full_like(vector, 1 - drop_rate, dtype=torch.float32), seed, task, name)
    return torch.where(keep, vector / (1 - drop_rate), 0)


def _merge_elected_sign(vectors: Sequence[Tensor], merge_func: MergeFunc) -> Tensor:
    """Merge task vectors entry by entry, using only values with the sign of their sum (TIES)."""
    # As in the paper; the authors' code breaks ties by the majority sign of the whole model.
    stacked = torch.stack(list(vectors))
    sign = stacked.sum(dim=0).sign()
    same = torch.where(stacked.sign() == sign, stacked, 0)
    if merge_func == "max":
        return sign * same.abs().amax(dim=0)
    total = same.sum(dim=0)
    return total if merge_func == "sum" else total / (same != 0).sum(dim=0).clamp(min=1)


def _trim_elect_and_merge(
    base: StateDict,
    experts: Mapping[str, StateDict],
    scaling: float,
    density: float,
    merge_func: MergeFunc,
    trim_scope: TrimScope,
    drop: Drop,
) -> Iterator[tuple[str, Tensor]]:
    """Trim task vectors, elect signs and merge, as in TIES, after `drop` removed random entries.

    Entries are kept that reach the (D - int(density * D))-th smallest of D magnitudes, of a model's or of a tensor's.
    """
    limits = _trim_thresholds(base, experts, density, drop) if trim_scope == "global" else {}
    for name, start in base.items():
        trimmed = []
        for task, expert in experts.items():
            vector = drop(expert[name] - start, task, name)
            size = vector.abs()
            lowest = size.numel() - int(density * size.numel())
            limit = limits[task] if limits else size.flatten().kthvalue(lowest).values if lowest else 0.0
            trimmed.append(torch.where(size >= limit, vector, 0))
        yield name, start + scaling * _merge_elected_sign(trimmed, merge_func)


def _trim_thresholds(
    base: StateDict, experts: Mapping[str, StateDict], density: float, drop: Drop
) -> dict[str, float]:
    """Return the smallest magnitude that trimming keeps in each task vector, over all tensors."""
    # Sorting all magnitudes would need them in memory at once.
    high = {task: torch.zeros(2 ** (31 - LOW_BITS), dtype=torch.int64) for task in experts}
    low = {task: torch.zeros(2**LOW_BITS, dtype=torch.int64) for task in experts}
    seen, names, total = set(), [], 0
    for name, start in base.items():
        mark, counts, moved = hashlib.blake2b(_float32_bytes(start)), {}, False
        for task, expert in experts.items():
            vector = expert[name] - start
            moved |= bool(vector.any())
            mark.update(_float32_bytes(vector))
            counts[task] = torch.bincount(
                _magnitude_bits(drop(vector, task, name)) >> LOW_BITS, minlength=len(high[task])
            )
        # Some files store tied tensors twice, which count once. Unmoved ones are often equal without being tied, as
        # the initial scales of two norms are.
        if not moved or mark.digest() not in seen:
            seen.add(mark.digest())
            names.append(name)
            total += start.numel()
            for task, count in counts.items():
                high[task] += count
    place = total - int(density * total)
    if not place:
        return dict.fromkeys(experts, 0.0)
    bins = {task: _histogram_bin(count, place) for task, count in high.items()}
    for name in names:
        start = base[name]
        for task, expert in experts.items():
            bits = _magnitude_bits(drop(expert[name] - start, task, name))
            bits = bits[bits >> LOW_BITS == bins[task][0]] & (2**LOW_BITS - 1)
            low[task] += torch.bincount(bits, minlength=len(low[task]))
    limits = {task: bins[task][0] << LOW_BITS | _histogram_bin(low[task], bins[task][1])[0] for task in experts}
    return {task: float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)) for task, bits in limits.items()}


def _histogram_bin(counts: Tensor, place: int) -> tuple[int, int]:
    """Return the histogram bin of the k-th smallest value, and its rank in this bin."""
    upto = counts.cumsum(dim=0)
    index = int(torch.searchsorted(upto, place))
    return index, place - (int(upto[index - 1]) if index else 0)


def _magnitude_bits(vector: Tensor) -> Tensor:
    """Return magnitudes as integers in the same order, from the bits of float32."""
    # The bits of non-negative IEEE floats, read as integers, are ordered as the floats are.
    return vector.float().abs().flatten().view(torch.int32)


def _float32_bytes(tensor: Tensor) -> bytes:
    data: bytes = tensor.float().cpu().numpy().tobytes()
    return data


@merge_methods.method("ties", title="TIES-Merging", source="arXiv:2306.01708", laws=STEP_LAWS, reads="model")
def _merge_ties(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: StepScaling = 1.0,
    density: Annotated[float, Bounds(0, 1, low_open=True), "kept share of a task vector's entries"] = 0.2,
    merge_func: Annotated[MergeFunc, "combination of entries of the elected sign"] = "mean",
    trim_scope: Annotated[TrimScope, "trim the whole model, or each tensor"] = "global",
    drop_rate: DropRate = 0.0,
    seed: Seed = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Return base + scaling * the TIES merge of task vectors: trimmed, and combined where signs agree.

    Published variants: `merge_func=sum` with scaling 0.3, and DARE-TIES with `drop_rate=0.5 merge_func=sum
    scaling=0.5`, which drops entries as `dare` does before it trims.
    """
    drop = partial(_drop_random_entries, seed=seed, drop_rate=drop_rate)
    return _trim_elect_and_merge(base, experts, scaling, density, merge_func, trim_scope, drop)


@merge_methods.method(
    "dare",
    title="DARE with Task Arithmetic",
    source="arXiv:2311.03099",
    laws=STEP_LAWS | {"unbiased_over_masks"},
    reads="tensor",
)
def _merge_dare(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: SumScaling = 0.3,
    drop_rate: DropRate = 0.5,
    seed: Seed = 0,
) -> dict[str, Tensor]:
    """Return base + scaling * the sum of task vectors with random entries dropped, divided by the share that is kept.

    An entry's mask depends on seed, task, tensor and position alone. Language models are published with drop_rate
    0.9.
    """
    merged = {}
    for name, start in base.items():
        step = 0 * start
        for task, expert in experts.items():
            step = step + _drop_random_entries(expert[name] - start, task, name, seed=seed, drop_rate=drop_rate)
        merged[name] = start + scaling * step
    return merged
