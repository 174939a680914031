"""Merging by least interference with what experts' own steps respond to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.linalg.partial import solve_in_range
from driftlens.merging.method import StateDict, merge_methods
from driftlens.merging.steps import MOST_STEPS, stepped


@merge_methods.method(
    "wudi",
    title="WUDI-Merging",
    source="arXiv:2503.08099",
    laws={"expert_order_free", "one_expert_is_fixed"},
    reads="site",
    others="wudi",
    work=lambda settings, experts, rows, columns: 2 * (settings["steps"] + 2 * experts) * rows * columns**2,
)
def wudi(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    solver: Annotated[
        Literal["adam", "closed_form"], "the published descent, or where it would end (unpublished)"
    ] = "adam",
    steps: Annotated[int, Bounds(0, MOST_STEPS), "of the descent"] = 300,
    learning_rate: Annotated[float, Bounds(0, low_open=True), "of the descent"] = 1e-5,
    ridge: Annotated[
        float,
        Bounds(0),
        "how much the closed form is pulled to where the descent starts, beside the mean curvature",
    ] = 0.01,
) -> dict[str, Tensor]:
    """base + the step t with the least sum_i |(t - t_i) t_i'|^2 / |t_i|^2, from the sum of the task vectors t_i.

    The published descent ends long before the least is reached, by design: no entry moves by more than about
    steps * learning_rate. What is no matrix of a linear module takes the mean task vector.
    """
    solve = partial(_descended, steps=steps, rate=learning_rate)
    return stepped(base, experts, 1.0, solve if solver == "adam" else partial(_solved, ridge=ridge))


def _curvature(vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """S [k, k] and R [o, k], of which 2 (t S - R) is the slope at t; experts that didn't move have no say."""
    width = vectors[0].shape[1]
    curvature, wanted = vectors[0].new_zeros(width, width), torch.zeros_like(vectors[0])
    for vector in vectors:
        size = vector.square().sum()
        if size > 0:
            mine = vector.mT @ vector / size
            curvature += mine
            wanted += vector @ mine
    return curvature, wanted


def _descended(vectors: list[Tensor], *, steps: int, rate: float) -> Tensor:
    curvature, wanted = _curvature(vectors)
    step = torch.stack(vectors).sum(dim=0).requires_grad_()
    adam = torch.optim.Adam([step], lr=rate)
    for _ in range(steps):
        step.grad = 2 * (step.detach() @ curvature - wanted)
        adam.step()
    return step.detach()


def _solved(vectors: list[Tensor], *, ridge: float) -> Tensor:
    vectors = [vector.double() for vector in vectors]
    curvature, wanted = _curvature(vectors)
    start = torch.stack(vectors).sum(dim=0)
    missing = wanted - start @ curvature
    curvature.diagonal().add_(ridge * curvature.trace() / len(curvature))
    return start + solve_in_range(curvature, missing)
