"""Fisher merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from driftlens.base.devices import wide
from driftlens.base.errors import SpecError
from driftlens.base.settings import Bounds
from driftlens.merging.averages import average
from driftlens.merging.method import StateDict, merge_methods

MOST_CLASSES = 2048
"""Exact information takes a backward pass for each class of each sample: a vocabulary is refused, ImageNet is not."""


@merge_methods.method(
    "fisher",
    title="Fisher Merging",
    source="arXiv:2111.09832",
    laws={"expert_order_free", "equal_experts_are_fixed", "one_expert_is_fixed"},
    reads="samples",
    needs_base=False,
    scores=True,
    held=lambda experts: 5,
    runs=lambda settings, samples, classes: _runs(settings, samples, classes),
)
def fisher(
    base: StateDict,
    experts: Mapping[str, StateDict],
    study: Any,
    *,
    estimator: Annotated[
        Literal["exact", "batch_sqrt"],
        "the exact diagonal, or what published code takes for it: squared gradients of whole batches",
    ] = "exact",
    batch_size: Annotated[
        int, Bounds(1), "samples whose gradients batch_sqrt adds up before it squares them"
    ] = 32,
    normalize: Annotated[
        bool, "whether every expert's Fisher information counts by its direction alone"
    ] = True,
    eps: Annotated[float, Bounds(0, low_open=True), "added to every entry of the Fisher information"] = 1e-6,
) -> Iterator[tuple[str, Tensor]]:
    """The mean of the experts' parameters, each entry weighted by its expert's diagonal Fisher information.

    The information is that of the scores on the task's calibration samples, under the expert's own distribution over
    classes; labels aren't read. Entries that no expert's scores depend on take the mean.
    """
    above: dict[str, Tensor] = {}
    below: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for task, expert in experts.items():
        asked = study.asked(task)
        weights = {key: asked.placed(expert[key]).detach().clone().requires_grad_() for key in asked.keys}
        size = None if estimator == "exact" else batch_size
        found = diagonal(asked, weights, size)
        norm = torch.stack([torch.linalg.vector_norm(value) for value in found.values()]).norm()
        share = 1 / (norm + eps) if normalize else torch.ones_like(norm)
        for key, value in found.items():
            weight = share * (value + eps)
            above[key] = above.get(key, 0) + weight * weights[key].detach()
            below[key] = below.get(key, 0) + weight
            seen[key] = seen.get(key, False) | (value > 0)
    for key in base:
        mean = average({key: base[key]}, {task: {key: expert[key]} for task, expert in experts.items()})[key]
        if key in seen:
            mean = torch.where(seen.pop(key).cpu(), (above.pop(key) / below.pop(key)).to(mean), mean)
        yield key, mean


def _runs(settings: Mapping[str, Any], samples: int, classes: int) -> int:
    if settings["estimator"] != "exact":
        return samples
    if classes > MOST_CLASSES:
        raise SpecError(
            f"the exact Fisher information of {classes:,} classes would take {samples * classes:,} backward passes",
            hint="Set estimator=batch_sqrt, or name the classes in the data's entry: `classes: true`.",
        )
    return samples * classes


def diagonal(asked: Any, weights: Mapping[str, Tensor], batch_size: int | None) -> dict[str, Tensor]:
    """E over samples and classes of (d log p / d weight)^2; with a batch size what published code takes for it."""
    total = {key: torch.zeros_like(value) for key, value in weights.items()}
    leaves, count = list(weights.values()), len(asked)

    def add(value: Tensor, share: float) -> None:
        slopes = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        for sum_so_far, slope in zip(total.values(), slopes, strict=True):
            if slope is not None:
                sum_so_far.addcmul_(slope, slope, value=share / count)

    if batch_size is not None:
        for first in range(0, count, batch_size):
            logs = asked.log_probabilities(range(first, min(first + batch_size, count)), weights)
            add(((logs.detach() / 2).exp() * logs).sum(), 1.0)
        return total
    for row in range(count):
        logs = asked.log_probabilities([row], weights)[0]
        chances = wide(logs.detach()).exp()
        # It is the variance of slopes over classes: one as good as impossible beside the second best adds nothing.
        rest = chances.sort().values[:-1].sum() if len(chances) > 1 else chances.sum()
        for value, chance in zip(logs, chances, strict=True):
            if chance > torch.finfo(torch.float32).eps * rest:
                add(value, float(chance))
    return total
