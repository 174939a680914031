"""Means, sums and interpolation of experts' parameters and task vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch import Tensor

from driftlens.merging.method import StateDict, merge_methods
from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Bounds

StepScaling = Annotated[float, Bounds(-100, 100), "factor on the merged step"]
SumScaling = Annotated[float, Bounds(-100, 100), "factor on the sum of task vectors"]
# Largest number of steps of a descent: a mistyped one is refused instead of run for days.
MOST_STEPS = 1_000_000
# Name of a linear module's matrix; no other tensor has this name.
MATRIX = "weight"
# Above this cosine SLERP takes a straight line, as is usual: the angle's sine is too small to divide by.
PARALLEL = 0.9995


def _vectors_of(base: StateDict, experts: Mapping[str, StateDict], name: str) -> list[Tensor]:
    """Return the task vectors of one tensor."""
    start = base[name]
    return [expert[name] - start for expert in experts.values()]


def stepped(
    base: StateDict,
    experts: Mapping[str, StateDict],
    scaling: float,
    of_matrices: Callable[[list[Tensor]], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return base + scaling * step. The step is the mean task vector, or `of_matrices(task vectors)` for a matrix.

    Args:
        base: the base's tensors.
        experts: the experts' tensors by task.
        scaling: factor of the step.
        of_matrices: combines the task vectors of one matrix.
    """
    merged = {}
    for name, start in base.items():
        vectors = _vectors_of(base, experts, name)
        if of_matrices is not None and name == MATRIX and start.dim() == 2:
            step = of_matrices(vectors)
        else:
            step = torch.stack(vectors).mean(dim=0)
        merged[name] = start + scaling * step.to(start)
    return merged


@merge_methods.method(
    "average",
    title="Simple Averaging",
    source="arXiv:2203.05482",
    laws={"expert_order_free", "equal_experts_are_fixed"},
    needs_base=False,
)
def average(base: StateDict, experts: Mapping[str, StateDict]) -> dict[str, Tensor]:
    """Average the experts' parameters."""
    return {
        name: sum((expert[name] for expert in experts.values()), start=0 * base[name]) / len(experts)
        for name in base
    }


@merge_methods.method(
    "task_arithmetic",
    title="Task Arithmetic",
    source="arXiv:2212.04089",
    laws={
        "expert_order_free",
        "zero_scaling_is_base",
        "affine_in_scaling",
        "one_expert_at_scaling_one",
        "homogeneous",
    },
)
def task_arithmetic(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: SumScaling = 0.3
) -> dict[str, Tensor]:
    """Return base + scaling * sum over tasks of (expert - base).

    Args:
        base: the base's tensors.
        experts: the experts' tensors by task.
        scaling: factor of the sum.
    """
    return {
        name: start + scaling * sum((expert[name] - start for expert in experts.values()), start=0 * start)
        for name, start in base.items()
    }


@merge_methods.method(
    "model_stock",
    title="Model Stock",
    source="arXiv:2403.19522",
    laws={
        "expert_order_free",
        "equal_experts_are_fixed",
        "one_expert_is_fixed",
        "homogeneous",
        "experts_at_base",
    },
    reads="tensor",
)
def model_stock(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    filter_wise: Annotated[bool, "one ratio per row, not per tensor"] = False,
) -> dict[str, Tensor]:
    """Return base + t * the mean task vector, t = n c / (1 + (n - 1) c), with the cosine c between task vectors.

    The paper has one angle between n experts; c is the mean over pairs, as in mergekit.

    Args:
        base: the base's tensors.
        experts: the experts' tensors by task.
        filter_wise: True for one ratio per row instead of one per tensor.
    """
    return {
        name: start + _stock_step(_vectors_of(base, experts, name), filter_wise)
        for name, start in base.items()
    }


def _stock_step(vectors: list[Tensor], filter_wise: bool) -> Tensor:
    count, example = len(vectors), vectors[0]
    if count == 1:
        return example
    rows = torch.stack(vectors).double()
    rows = rows.reshape(count, *((-1, example.shape[-1]) if filter_wise and example.dim() > 1 else (1, -1)))
    # A zero vector has no direction; its unit vector becomes 0, which is orthogonal to all others.
    units = rows / rows.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    # All ordered pairs, less each vector with itself.
    pairs = units.sum(dim=0).square().sum(dim=-1) - units.square().sum(dim=(0, -1))
    cosine = pairs / (count * (count - 1))
    below = 1 + (count - 1) * cosine
    # Where task vectors cancel there is no step, whatever its length.
    ratio = torch.where(below > 1e-12, count * cosine / below, 0.0)
    return (ratio[:, None] * rows.mean(dim=0)).view_as(example).to(example)


@merge_methods.method(
    "slerp",
    title="SLERP",
    source="doi:10.1145/325334.325242",
    laws={"expert_order_free", "equal_experts_are_fixed", "experts_at_base"},
    reads="tensor",
    needs_base=False,
)
def slerp(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    t: Annotated[float, Bounds(0, 1), "0 is the first expert by task name, 1 the second"] = 0.5,
) -> dict[str, Tensor]:
    """Interpolate each tensor of two experts on the great circle between them.

    Args:
        base: its names select the tensors; its values are not read.
        experts: the tensors of two experts.
        t: position between the first expert (0) and the second (1), sorted by task name.
    """
    if len(experts) != 2:
        raise SpecError(
            f"merge method 'slerp' needs exactly 2 experts, found {len(experts)}",
            hint="Keep two experts in the spec, or use `average`.",
        )
    start, end = experts.values()
    return {name: between(start[name], end[name], t) for name in base}


def between(start: Tensor, end: Tensor, t: float) -> Tensor:
    """Return (sin((1-t) a) start + sin(t a) end) / sin(a), with the angle a between the two vectors."""
    a, b = start.double().flatten(), end.double().flatten()
    # A zero tensor has no direction; its cosine becomes 0, so that the result stays finite.
    cosine = a @ b / (a.norm() * b.norm()).clamp(min=torch.finfo(a.dtype).tiny)
    if abs(cosine) > PARALLEL:
        return (1 - t) * start + t * end
    angle = cosine.arccos()
    parts = [(share * angle).sin() / angle.sin() for share in (1 - t, t)]
    return (parts[0] * start + parts[1] * end).to(start)
