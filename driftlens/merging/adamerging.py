"""AdaMerging: coefficients of task vectors learned by descent on the entropy of the merged model's answers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from driftlens.base.errors import NumericsError
from driftlens.base.settings import Bounds
from driftlens.merging.averages import MOST_STEPS
from driftlens.merging.method import StateDict, merge_methods

Rows = tuple[int, int] | None


@merge_methods.method(
    "adamerging",
    title="AdaMerging",
    source="arXiv:2310.02575",
    laws={"expert_order_free"},
    reads="samples",
    scores=True,
    held=lambda experts: experts + 3,
    runs=lambda settings, samples, classes: settings["steps"] * min(settings["batch_size"], samples),
)
def adamerging(
    base: StateDict,
    experts: Mapping[str, StateDict],
    study: Any,
    *,
    granularity: Annotated[
        Literal["layer", "task"],
        "whether every parameter tensor has a coefficient per task, or the whole model",
    ] = "layer",
    initial: Annotated[float, Bounds(-100, 100), "the coefficients that it starts with"] = 0.3,
    steps: Annotated[int, Bounds(0, MOST_STEPS), "of the descent, each on one batch of every task"] = 1000,
    learning_rate: Annotated[float, Bounds(0, low_open=True), "of Adam"] = 1e-3,
    batch_size: Annotated[int, Bounds(1), "calibration samples per task and step"] = 16,
    seed: Annotated[int, Bounds(0), "of the order of samples"] = 0,
) -> Iterator[tuple[str, Tensor]]:
    """base + task vectors, times coefficients for which the merged model's answers are least in doubt.

    The sum over tasks of the mean entropy of the scores is minimised on calibration samples, without labels; the
    authors' code takes the test samples. Tensors that scores don't depend on keep the initial coefficients.
    """
    asked = {task: study.asked(task) for task in experts}
    first = next(iter(asked.values()))
    keys = tuple(dict.fromkeys(key for each in asked.values() for key in each.keys))
    start = {key: first.placed(base[key]) for key in keys}
    vectors = {
        task: {key: first.placed(expert[key]) - start[key] for key in keys}
        for task, expert in experts.items()
    }
    parts = tuple(dict.fromkeys(part for each in asked.values() for part in each.parts))
    wide = len(parts) if granularity == "layer" else 1
    coefficients = torch.full((len(experts), wide), initial, device=start[keys[0]].device).requires_grad_()
    adam = torch.optim.Adam([coefficients], lr=learning_rate)
    order = {task: _shuffled(len(asked[task]), batch_size, seed, task) for task in asked}
    for _ in range(steps):
        weights = _merged(start, vectors, coefficients, parts)
        coefficients.grad = torch.zeros_like(coefficients)
        for task, each in asked.items():
            logs = each.log_probabilities(next(order[task]), weights)
            loss = -(logs.exp() * logs).sum(dim=-1).mean()
            slopes = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            by_key = dict(zip(weights, slopes, strict=True))
            for place, (key, rows) in enumerate(parts):
                if (slope := by_key[key]) is not None:
                    for row, mine in enumerate(vectors.values()):
                        along = (_at(slope, rows) * _at(mine[key], rows)).sum()
                        coefficients.grad[row, place % wide] += along
        if not bool(torch.isfinite(coefficients.grad).all()):
            raise NumericsError(
                "AdaMerging's objective has no finite slope",
                hint="Start with smaller coefficients, or learn with a smaller rate.",
            )
        adam.step()
    weights = _merged(start, vectors, coefficients, parts)
    for key in base:
        value = weights.pop(key, None)
        if value is None:
            value = base[key] + initial * sum(expert[key] - base[key] for expert in experts.values())
        yield key, value


def _at(value: Tensor, rows: Rows) -> Tensor:
    return value if rows is None else value[slice(*rows)]


@torch.no_grad()
def _merged(
    start: Mapping[str, Tensor],
    vectors: Mapping[str, Mapping[str, Tensor]],
    coefficients: Tensor,
    parts: Sequence[tuple[str, Rows]],
) -> dict[str, Tensor]:
    """The merged weights, as leaves whose gradients are wanted."""
    weights = {key: value.clone() for key, value in start.items()}
    for place, (key, rows) in enumerate(parts):
        for row, mine in zip(coefficients, vectors.values(), strict=True):
            _at(weights[key], rows).add_(row[place % len(row)] * _at(mine[key], rows))
    return {key: value.requires_grad_() for key, value in weights.items()}


def _shuffled(count: int, size: int, seed: int, task: str) -> Iterator[list[int]]:
    """Batches without end: all samples in one random order after the other."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(task.encode()))
    size = min(size, count)
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[first : first + size] for first in range(0, count - size + 1, size))
