"""mergekit's methods as mergekit 0.1.5 computes them: in the dtype of the tensors, rounded where it rounds.

Our own methods (the files beside this one) follow their papers in float32. A recipe asks for what mergekit makes, to
the last bit: the order of operations, the order among ties and sums in bfloat16 are followed here. Random masks and
samples are drawn by the same law, not by mergekit's own draws, which depend on the order of its work.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftlens.base.errors import NumericsError
from driftlens.merging.sparse import keep_mask

_TIE = 1e-8
_CHUNK = 2**20
"""Entries that are taken at a time; of SLERP the order of its sums, and so their rounding, depends on it."""
_SAMPLE = 1_000_000
"""Entries of which Arcee Fusion takes quartiles, of larger tensors a sample."""


class Group(NamedTuple):
    """One tensor of every model of a recipe, all of one shape and dtype.

    `models` has all of them in the recipe's order, with the base among them; `key` seeds what is drawn at random. Both
    sequences may read a tensor whenever it is asked for: what is needed twice is kept by whoever needs it.
    """

    base: Tensor | None
    experts: Sequence[Tensor]
    models: Sequence[Tensor]
    key: str = ""

    @property
    def origin(self) -> Tensor:
        """The base, of methods that need one."""
        assert self.base is not None
        return self.base


def linear(group: Group, *, weight: Sequence[float], normalize: bool) -> Tensor:
    """A weighted sum in float32, or mean."""
    factors, total = torch.tensor(weight, dtype=torch.float32), torch.zeros(())
    for number, (tensor, factor) in enumerate(zip(group.models, factors, strict=True)):
        total = total if number else torch.zeros_like(tensor, dtype=torch.float32)
        total.addcmul_(tensor, factor)
    if normalize:
        total.div_(factors.sum())
    return total.to(tensor.dtype)


def slerp(group: Group, *, t: float) -> Tensor:
    """On the great circle from the base to the one other model, in float32."""
    first, second = (tensor.reshape(1, -1) for tensor in (group.origin, group.experts[0]))
    # Room that all pieces share: made anew for each, it would be strewn over memory, and several times as large.
    room = torch.empty(2, min(_CHUNK, first.numel()))

    def pieces() -> Iterator[Sequence[Tensor]]:
        for parts in zip(torch.split(first, _CHUNK, dim=1), torch.split(second, _CHUNK, dim=1), strict=True):
            yield [place[None, : part.numel()].copy_(part) for place, part in zip(room, parts, strict=True)]

    lengths = [[torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in pair] for pair in pieces()]
    norms = [torch.linalg.vector_norm(torch.stack(side), dim=0) for side in zip(*lengths, strict=True)]
    norms = [torch.where(norm > _TIE, norm, 1) for norm in norms]
    dots = [a.div_(norms[0]).mul_(b.div_(norms[1])).sum(dim=1, keepdim=True) for a, b in pieces()]
    cosine = torch.stack(dots).sum(dim=0).clamp(-1, 1)
    is_straight = cosine.abs() > 0.9995
    angle = torch.acos(torch.where(is_straight, 0, cosine))
    place = torch.tensor([[t]], dtype=torch.float32)
    shares = [
        torch.where(is_straight, share, torch.sin(share * angle) / torch.sin(angle))
        for share in (1 - place, place)
    ]
    merged = torch.empty_like(first)
    for part, (a, b) in zip(torch.split(merged, _CHUNK, dim=1), pieces(), strict=True):
        part.copy_(a.mul_(shares[0]).add_(b.mul_(shares[1])))
    return merged.reshape(group.origin.shape)


def nuslerp(
    group: Group, *, weight: Sequence[float], nuslerp_row_wise: bool, nuslerp_flatten: bool
) -> Tensor:
    """On the great circle between two models, or between their steps from the base; as a whole, by row or by column."""
    total = sum(weight)
    t = 0.5 if abs(total) < 1e-6 else weight[1] / total
    given = [tensor if group.base is None else tensor - group.base for tensor in group.experts]
    shape = given[0].shape
    if nuslerp_flatten:
        given = [tensor.reshape(-1) for tensor in given]
    elif nuslerp_row_wise:
        given = [tensor.transpose(0, -1) for tensor in given]
    first, second = given
    units = [tensor / torch.norm(tensor, dim=-1, keepdim=True).clamp(min=1e-7) for tensor in given]
    cosine = torch.sum(units[0] * units[1], dim=-1, keepdim=True).clamp(-1, 1)
    is_straight = (1 - cosine.square()) <= _TIE**2
    angle = torch.acos(torch.where(is_straight, 0, cosine))
    bent = (torch.sin((1 - t) * angle) * first + torch.sin(t * angle) * second) / torch.sin(angle)
    merged = torch.where(is_straight, (1 - t) * first + t * second, bent)
    if nuslerp_row_wise and not nuslerp_flatten:
        merged = merged.transpose(0, -1)
    merged = merged.reshape(shape)
    return merged if group.base is None else group.base + merged


def multislerp(group: Group, *, weight: Sequence[float], normalize_weights: bool, eps: float) -> Tensor:
    """The weighted mean on a sphere around the origin or the base, in the plane that touches it at the mean direction.

    Raises:
        NumericsError: the weighted directions of three or more models cancel.
    """
    if len(group.experts) == 1:
        return group.experts[0]
    stacked = torch.stack(list(group.experts))
    if group.base is not None:
        stacked -= group.base
    shape, rows = stacked.shape[1:], stacked.reshape(len(stacked), -1)
    weights = torch.tensor(weight, dtype=rows.dtype)
    if normalize_weights:
        weights = weights / weights.sum()
    norms = torch.norm(rows, dim=-1, keepdim=True)
    units = rows / (norms + eps)
    mean = (units * weights.view(-1, 1)).sum(0)
    length = torch.norm(mean)
    if length >= eps:
        mean = mean / length
        tangents = units - (units * mean).sum(-1, keepdim=True) * mean
        step = (tangents * weights.view(-1, 1)).sum(0)
        angle = torch.norm(step) + eps
        merged = mean * torch.cos(angle) + step * (torch.sin(angle) / angle)
        merged = merged * (norms.squeeze(-1) * weights).sum()
    elif len(rows) == 2:
        merged = rows[0] * weights[0] + rows[1] * weights[1]
    else:
        raise NumericsError(
            f"{group.key}: the weighted directions of the models cancel, and multislerp has no direction to go to",
            hint="Give the models other weights.",
        )
    merged = merged.view(shape)
    return merged if group.base is None else merged + group.base


def karcher(group: Group, *, max_iter: int, tol: float) -> Tensor:
    """The Riemannian mean of all directions, by steps along the mean of their logarithms, times the mean norm."""
    tensors = list(group.models)
    if len(tensors) == 1:
        return tensors[0]
    share = 1.0 / len(tensors)
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors]
    units = [
        (tensor / norm).to(tensor.dtype) if float(norm) else torch.zeros_like(tensor)
        for tensor, norm in zip(tensors, norms, strict=True)
    ]
    valid = [unit for unit, norm in zip(units, norms, strict=True) if float(norm) > tol]
    if not valid:
        return sum((tensor * 0 for tensor in tensors), torch.zeros_like(tensors[0]))
    part = share / sum([share] * len(valid))
    mean = torch.zeros_like(valid[0])
    for unit in valid:
        mean += part * unit
    length = torch.linalg.vector_norm(mean.float())
    mean = valid[0].clone() if float(length) < tol else (mean / length).to(mean.dtype)
    for _ in range(max_iter):
        tangent = torch.zeros_like(mean)
        for unit in valid:
            cosine = torch.clamp(torch.dot(mean.flatten(), unit.flatten()), -1.0, 1.0)
            angle = torch.arccos(cosine)
            if float(angle) >= tol:
                tangent += part * (angle / torch.sin(angle)) * (unit - cosine * mean)
        length = torch.linalg.vector_norm(tangent.float())
        if float(length) < tol:
            break
        mean = (torch.cos(length) * mean + torch.sin(length) * (tangent / length)).to(mean.dtype)
        whole = torch.linalg.vector_norm(mean.float())
        if float(whole) > tol:
            mean = (mean / whole).to(mean.dtype)
    return sum(share * norm for norm in norms) * mean


def model_stock(group: Group, *, filter_wise: bool) -> Tensor:
    """base + t (mean - base), t = n c / (1 + (n - 1) c), c the mean cosine of the steps, of a tensor or of its rows."""
    base, experts = group.origin, list(group.experts)
    if not filter_wise:
        base, experts = base.reshape(-1), [tensor.reshape(-1) for tensor in experts]
    elif base.dim() == 1:
        base, experts = base.unsqueeze(0), [tensor.unsqueeze(0) for tensor in experts]
    steps = [tensor - base for tensor in experts]
    cosines = []
    for first, second in itertools.combinations(steps, 2):
        norms = torch.norm(first, dim=-1) * torch.norm(second, dim=-1)
        cosines.append(((first * second).sum(dim=-1) / norms.clamp(min=1e-6)).clamp(-1, 1))
    cosine, count = torch.stack(cosines).mean(dim=0).unsqueeze(-1), len(experts)
    below = 1 + (count - 1) * cosine
    cancels = below.abs() < 1e-6
    t = torch.where(
        cancels,
        torch.zeros_like(cosine),
        count * cosine / torch.where(cancels, torch.ones_like(below), below),
    )
    mean = sum(experts[1:], experts[0]) / count
    return (t * mean + (1 - t) * base).reshape(group.origin.shape)


def nearswap(group: Group, *, t: float) -> Tensor:
    """Each entry of the base moved to the other model's, fully where the two differ by less than t."""
    base, expert = group.origin, group.experts[0]
    share = (t / torch.abs(base - expert).clamp(min=1e-6)).clamp(min=0, max=1)
    return share * expert + (1 - share) * base


def arcee_fusion(group: Group) -> Tensor:
    """Entries whose change times their row's KL is beyond median + 1.5 interquartile ranges are the expert's."""
    base, expert = group.origin, group.experts[0]
    p, q = (torch.softmax(tensor, dim=-1) + _TIE for tensor in (expert, base))
    importance = (expert - base).abs() * torch.sum(p * torch.log(p / q), dim=-1, keepdim=True)
    flat = importance.reshape(-1)
    if flat.numel() > _SAMPLE:
        draws = torch.Generator().manual_seed(0)
        flat = flat[torch.randint(flat.numel(), (_SAMPLE,), generator=draws)]
    places = (torch.tensor([0.25, 0.5, 0.75]) * (flat.numel() - 1)).long()
    low, median, high = torch.sort(flat).values[places]
    return base + (expert - base) * (importance >= median + 1.5 * (high - low)).float()


def sce(group: Group, *, int8_mask: bool, select_topk: float) -> Tensor:
    """Steps at the entries of most variance over experts, those of the elected sign, weighted by their energy."""
    base = group.origin
    if not group.experts:
        return base
    steps = torch.stack([tensor - base for tensor in group.experts])
    if select_topk < 1:
        variance = torch.var(steps, dim=0, unbiased=False)
        count = int(torch.count_nonzero(variance) * max(0.0, select_topk))
        keep = torch.zeros_like(variance)
        if count:
            keep.view(-1)[torch.topk(variance.abs().view(-1), k=count).indices] = 1
        steps = steps * keep.unsqueeze(0)
    same = _elected(steps)
    energies = steps.square().reshape(len(steps), -1).mean(dim=1)
    total = float(torch.sum(energies))
    shares = energies / total if abs(total) >= 1e-6 else torch.ones_like(energies) / len(energies)
    shares = shares.view(-1, *(1 for _ in base.shape)) * same
    return base + (steps * shares).sum(dim=0) / torch.sum(shares, dim=0).clamp(min=1e-6)


def ram(group: Group, *, epsilon: float, r: float = 0.0, alpha: float = 0.0) -> Tensor:
    """Steps beyond epsilon: the mean where several experts moved an entry, the whole step where one did.

    RAM+ (r > 0) lengthens the latter by 1 + r min(alpha, entries moved together / entries moved alone), by expert.
    """
    base = group.origin
    if not group.experts:
        return base
    steps = torch.stack([tensor - base for tensor in group.experts]).view(len(group.experts), -1)
    moved = steps.abs() > epsilon
    counts = moved.sum(dim=0, keepdim=True)
    alone, together = counts == 1, counts > 1
    steps = steps * moved
    single = steps * alone
    if r:
        share = (moved & together).sum(dim=1) / (moved & alone).sum(dim=1).clamp(min=epsilon)
        single = single * (1 + r * share.clamp(min=0, max=alpha)).unsqueeze(-1)
    step = (single + steps * together / counts.clamp(min=1)).sum(dim=0, keepdim=True)
    return base + step.reshape_as(base)


def passthrough(group: Group, *, scale: Sequence[float | None]) -> Tensor:
    """The one model's tensor, scaled."""
    (tensor,) = group.models
    return tensor if scale[0] is None else tensor * scale[0]


def steps_from_base(
    group: Group,
    *,
    kind: str,
    elects: bool,
    weight: Sequence[float],
    normalize: bool,
    rescale: bool,
    int8_mask: bool,
    density: Sequence[float],
    gamma: Sequence[float] = (),
    epsilon: Sequence[float] = (),
    **shared: float,
) -> Tensor:
    """base + lambda * the weighted sum of what is left of the steps, or their mean by weight.

    Args:
        group: one tensor of all models.
        kind: how steps are thinned out: `magnitude`, `random`, `outliers`, `della`, or not at all.
        elects: whether only steps of the elected sign count.
        weight: of every expert, as `density`, `gamma` and `epsilon`.
        normalize: whether the sum is divided by the weights that count.
        rescale: whether a thinned step gets its sum of magnitudes back.
        int8_mask: how mergekit keeps signs; changes no number.
        density: share of entries that stay.
        gamma: share of the largest that go, of `outliers`.
        epsilon: how far chances to stay differ from the density, of `della`.
        shared: `lambda`, which is no name in Python.
    """
    base = group.origin
    if not group.experts:
        return base
    steps = base.new_empty((len(group.experts), base.numel()))
    for place in range(len(group.experts)):
        spread = epsilon[place] if kind == "della" else gamma[place] if kind == "outliers" else 0.0
        step = group.experts[place] - base
        keep = _kept(step, kind, density[place], spread, f"{group.key} {place}")
        steps[place] = _thinned(step, keep, rescale).flatten()
    weights = torch.tensor(weight, dtype=base.dtype)[:, None]
    steps.mul_(weights)
    merged = base.flatten().clone()
    # Entry by entry from here on: in pieces there is less in memory, and no number is another.
    for piece, part in zip(torch.split(merged, _CHUNK), torch.split(steps, _CHUNK, dim=1), strict=True):
        if elects:
            same = _elected(part)
            step, divisor = (part * same).sum(dim=0), (weights * same).sum(dim=0)
            divisor[divisor == 0] = 1
        else:
            step, divisor = part.sum(dim=0), weights.sum(dim=0)
            divisor[divisor.abs() < _TIE] = 1
        if normalize:
            step /= divisor
        if shared["lambda"] != 1:
            step *= shared["lambda"]
        piece.add_(step)
    return merged.view(base.shape)


def _elected(steps: Tensor) -> Tensor:
    """Where an entry has the sign of its sum over experts; a sum of zero elects the positive."""
    return steps.sign() == (steps.sum(dim=0) >= 0).to(steps.dtype) * 2 - 1


def _kept(step: Tensor, kind: str, density: float, spread: float, key: str) -> Tensor | None:
    """Ones where entries of a step stay; None is everywhere."""
    if density >= 1 or not kind:
        return None
    count = step.numel()
    if kind == "random":
        return keep_mask(torch.full(step.shape, density), 0, key, kind).to(step.dtype)
    if kind == "della":
        return _magnitude_chances(step, density, spread, key)
    if kind == "magnitude":
        # The order among equal magnitudes is this call's, with these arguments.
        places = _order(step, descending=True)[: max(1, int(density * count)) if density > 0 else 0]
    else:
        target = int(density * count)
        first = max(0, count - target - int(spread * count))
        places = _order(step, descending=False)[first : first + target]
    keep = torch.zeros(count, dtype=step.dtype)
    keep[places] = 1
    return keep.view(step.shape)


def _order(step: Tensor, *, descending: bool) -> Tensor:
    """The places of all entries by magnitude; sorted where the magnitudes lie, as a copy is the most of the memory."""
    sizes, order = step.float().abs().flatten(), torch.empty(0, dtype=torch.int64)
    torch.sort(sizes, descending=descending, out=(sizes, order))
    return order


def _magnitude_chances(step: Tensor, density: float, spread: float, key: str) -> Tensor:
    """DELLA's draw: chances from density - spread for a row's smallest entry to density + spread for its largest."""
    if density <= 0:
        return torch.zeros_like(step)
    rows = step if step.dim() > 1 else step.unsqueeze(0)
    ranks = rows.abs().argsort(dim=1).argsort(dim=1).float() + 1
    low, high = ranks.amin(dim=1, keepdim=True), ranks.amax(dim=1, keepdim=True)
    chances = density - spread + ((ranks - low) / (high - low)).clamp(0, 1) * 2 * spread
    return keep_mask(chances, 0, key, "della").to(step.dtype).reshape(step.shape)


def _thinned(step: Tensor, keep: Tensor | None, rescale: bool) -> Tensor:
    if keep is None:
        return step
    thinned = step * keep
    if not rescale:
        return thinned
    before, after = step.abs().sum(), thinned.abs().sum()
    return thinned if before < 1e-7 or after < 1e-7 else thinned * (before / after)


def by_entry(method: str, values: Mapping[str, Any]) -> bool:
    """Whether every entry of the result comes from the models' same entries alone, so that rows can be merged apart."""
    kernel = KERNELS[method]
    thins = (
        isinstance(kernel, functools.partial)
        and kernel.keywords["kind"]
        and min(values["density"], default=1) < 1
    )
    return kernel in (linear, nearswap, passthrough) or (isinstance(kernel, functools.partial) and not thins)


Kernel = Callable[..., Tensor]
"""A group and all parameters by name -> the merged tensor, in the group's dtype; of those that each model or expert has
one of, a list."""


def _of_steps(kind: str, *, elects: bool = False) -> Kernel:
    return functools.partial(steps_from_base, kind=kind, elects=elects)


KERNELS: Mapping[str, Kernel] = {
    **{"linear": linear, "slerp": slerp, "nuslerp": nuslerp, "multislerp": multislerp, "karcher": karcher},
    **{"model_stock": model_stock, "nearswap": nearswap, "arcee_fusion": arcee_fusion, "sce": sce},
    **{"ram": ram, "ramplus_tl": ram, "passthrough": passthrough, "task_arithmetic": _of_steps("")},
    "ties": _of_steps("magnitude", elects=True),
    "breadcrumbs": _of_steps("outliers"),
    "breadcrumbs_ties": _of_steps("outliers", elects=True),
    "dare_linear": _of_steps("random"),
    "dare_ties": _of_steps("random", elects=True),
    "della": _of_steps("della", elects=True),
    "della_linear": _of_steps("della"),
}
"""By mergekit's names; `driftlens.spec.mergekit` says what each takes."""
