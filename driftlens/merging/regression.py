"""Linear modules merged by regression of their outputs: RegMean, RegMean++, LOT, WUDI, ACE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from driftlens.base.settings import Bounds
from driftlens.linalg.cholesky import singular_parts, solve_in_range, svd_operations
from driftlens.merging.averages import MATRIX, MOST_STEPS, StepScaling, average, stepped
from driftlens.merging.method import StateDict, merge_methods

_RATE = 1 / 20
"""Of WUDI's descent, for task vectors whose entries have a root mean square of 1: 300 steps go as far as 15 of them.

The published rate, 1e-5, is an absolute one, for the experts it was published with. Where entries are so large that 300
steps of it hardly leave the sum of the task vectors, the merge is farther from the experts than the base: by held-out
KL .75 against .60 nat on four real experts (entries of .006), .59 against .26 on eight drawn ones (.002). With rates of
1/60 to 1/12 of the entries it was .37 to .40 there, with 1/23 to 1/5 of them .16 to .15 here.
"""

LAWS = {"expert_order_free", "equal_experts_are_fixed", "one_expert_is_fixed"}


@merge_methods.method(
    "regmean", title="RegMean", source="arXiv:2212.09849", laws=LAWS, reads="moments", needs_base=False
)
@merge_methods.method(
    "regmean_pp", title="RegMean++", source="arXiv:2508.03121", laws=LAWS, reads="prefix", needs_base=False
)
def regmean(
    base: StateDict,
    experts: Mapping[str, StateDict],
    moments: Mapping[str, Tensor],
    *,
    off_diagonal: Annotated[
        float, Bounds(0, 1), "factor on what is beside the diagonal of the experts' Gram matrices"
    ] = 0.95,
) -> dict[str, Tensor]:
    """The weight whose outputs come closest to every expert's own, on the inputs that this expert feeds the module.

    (sum W_i G_i) (sum G_i)^-1, with G_i shrunk towards its diagonal. Where no expert's inputs ever reach, the weight is
    the mean, as is everything else. In RegMean++ every expert's layer reads what the layers merged before it make of
    the task's samples.
    """
    merged = average({name: value for name, value in base.items() if name != MATRIX}, experts)
    weights = {task: experts[task][MATRIX].double() for task in moments}
    mean = _sum(weights.values()) / len(weights)
    # Deviations from the mean sum to zero, so that the last expert's product, a large one, needn't be taken.
    *others, last = moments
    total, missing = moments[last].clone(), torch.zeros_like(mean)
    difference = torch.empty_like(total)
    # The shrunk matrices are never formed: each would be as large as a Gram matrix in float64.
    for task in others:
        total += moments[task]
        torch.sub(moments[task], moments[last], out=difference)
        deviation = weights[task] - mean
        missing.addmm_(deviation, difference, alpha=off_diagonal)
        missing.addcmul_(deviation, difference.diagonal(), value=1 - off_diagonal)
    diagonal = total.diagonal().clone()
    total.mul_(off_diagonal).diagonal().copy_(diagonal)
    return {**merged, MATRIX: mean + solve_in_range(total, missing)}


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """Of tensors of one shape; they needn't be there at the same time, as for a stack."""
    rest = iter(parts)
    total = next(rest).clone()
    for part in rest:
        total += part
    return total


@merge_methods.method(
    "lot",
    title="LOT Merging",
    source="arXiv:2505.23859",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="moments",
    others="lot",
    norms=True,
    work=lambda settings, experts, rows, columns: columns**2 * (2 * experts * rows + 20 * columns),
)
def lot(
    base: StateDict,
    experts: Mapping[str, StateDict],
    moments: Mapping[str, Tensor],
    *,
    scaling: Annotated[
        float, Bounds(-100, 100), "factor on the merged step; published: 1.2 for ViT-B/32, 1.5 for ViT-L/14"
    ] = 1.2,
) -> dict[str, Tensor]:
    """base + scaling * the step that changes outputs as close to every expert's as possible, on that expert's inputs.

    Of linear modules (sum T_i G_i) times the pseudoinverse of sum G_i, with task vectors T_i: where no expert's inputs
    reach, the base stays. Of norms' scales the mean weighted by the squared normalised inputs. Every task counts alike,
    however many tokens it has. All else takes the mean task vector.
    """
    merged = stepped(base, experts, scaling)
    if MATRIX in base and moments:
        vectors = {task: (experts[task][MATRIX] - base[MATRIX]).double() for task in moments}
        total = _sum(moments.values())
        if total.dim() == 2:
            wanted = _sum(vectors[task] @ gram for task, gram in moments.items())
            step = solve_in_range(total, wanted)
        else:
            shares = [gram / total for gram in moments.values()]
            mean = torch.stack(list(vectors.values())).mean(dim=0)
            weighted = torch.stack([share * vectors[t] for share, t in zip(shares, moments, strict=True)])
            step = torch.where(total > 0, weighted.sum(dim=0), mean)
        merged[MATRIX] = base[MATRIX] + scaling * step.to(base[MATRIX])
    return merged


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
    learning_rate: Annotated[
        float, Bounds(0), "of the descent; published: 1e-5 for CLIP; 0: by the size of the task vectors"
    ] = 0.0,
    ridge: Annotated[
        float,
        Bounds(0),
        "how much the closed form is pulled to where the descent starts, beside the mean curvature",
    ] = 0.01,
) -> dict[str, Tensor]:
    """base + the step t with the least sum_i |(t - t_i) t_i'|^2 / |t_i|^2, from the sum of the task vectors t_i.

    The published descent ends long before the least is reached, by design: no entry moves by more than about
    steps * learning_rate. An absolute rate suits task vectors of one size only; at 0 it is a twentieth of the root mean
    square of a matrix's task vectors, so that twice as long ones give a step twice as long. What is no matrix of a
    linear module takes the mean task vector.
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


def _descended(vectors: list[Tensor], *, steps: int, rate: float, eps: float = 1e-8) -> Tensor:
    if not rate and (moved := [vector for vector in vectors if vector.any()]):
        size = torch.stack(moved).square().mean().sqrt()
        # The larger eps keeps what is rounding alone, where no expert has a say, from being taken for a slope.
        return size * _descended([vector / size for vector in vectors], steps=steps, rate=_RATE, eps=1e-6)
    curvature, wanted = _curvature(vectors)
    step = _sum(vectors).requires_grad_()
    adam = torch.optim.Adam([step], lr=rate, eps=eps)
    for _ in range(steps):
        step.grad = 2 * (step.detach() @ curvature - wanted)
        adam.step()
    return step.detach()


def _solved(vectors: list[Tensor], *, ridge: float) -> Tensor:
    vectors = [vector.double() for vector in vectors]
    curvature, wanted = _curvature(vectors)
    start = _sum(vectors)
    missing = wanted - start @ curvature
    curvature.diagonal().add_(ridge * curvature.trace() / len(curvature))
    return start + solve_in_range(curvature, missing)


@merge_methods.method(
    "ace",
    title="ACE-Merging",
    source="arXiv:2603.02945",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="site",
    others="ace",
    work=lambda settings, experts, rows, columns: (
        4 * experts * rows * columns**2 + svd_operations(1, rows, columns)
    ),
)
def ace(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    scaling: StepScaling = 1.0,
    ridge: Annotated[
        float, Bounds(0, low_open=True), "added to every covariance; absolute, as published"
    ] = 0.01,
    unlike: Annotated[
        float, Bounds(0), "relative variance of log sizes of task vectors beyond which they count as unlike"
    ] = 0.3,
    refined: Annotated[float, Bounds(0, 1), "share of the rank that is refined where they are unlike"] = 0.3,
) -> dict[str, Tensor]:
    """base + scaling * the regression of task vectors on covariances of inputs that are estimated from themselves.

    (sum T_i S_i) (sum S_i + C)^-1, where S_i = T_i' T_i + ridge I, the rows of T_i centred, and each row of C is the
    mean row of the covariances' sum. Of task vectors of unlike size covariances are divided by their traces, and the
    leading directions of what this leaves are added with their mean singular value (the authors' code, which decides
    where the paper leaves it open). An expert that didn't move has no say. What is no matrix of a linear module takes
    the mean task vector.
    """
    return stepped(base, experts, scaling, partial(_adaptive, ridge=ridge, unlike=unlike, refined=refined))


def _adaptive(vectors: list[Tensor], *, ridge: float, unlike: float, refined: float) -> Tensor:
    moved = [vector.double() for vector in vectors if vector.any()]
    if not moved:
        return torch.zeros_like(vectors[0])
    sizes = torch.stack([vector.square().sum() for vector in moved])
    logs = sizes.log()
    # Of one alone the variance between several is none.
    spread = logs.var() / logs.mean().square().clamp_min(1e-12) if len(moved) > 1 else logs.new_zeros(())
    is_unlike = bool(spread > unlike)
    centred = [vector - vector.mean(dim=0) for vector in moved]
    covariances = [vector.mT @ vector for vector in centred]
    scales = [float(matrix.trace().clamp_min(1e-12)) if is_unlike else 1.0 for matrix in covariances]
    covariances = [matrix.div_(scale) for matrix, scale in zip(covariances, scales, strict=True)]
    ridges = [ridge / scale for scale in scales]
    total = _sum(covariances)
    common = total.mean(dim=0)
    common = common / sizes.mean() if is_unlike else common
    total.diagonal().add_(sum(ridges))
    terms = zip(centred, covariances, ridges, strict=True)
    wanted = _sum(vector @ matrix + lift * vector for vector, matrix, lift in terms)
    step = torch.linalg.solve(total + common, wanted, left=False)
    if is_unlike:
        mean = total / len(moved)
        left = (vector @ (matrix - mean) for vector, matrix in zip(centred, covariances, strict=True))
        basis, values, directions = singular_parts(step + _sum(left))
        if count := min(int(min(step.shape) * refined), len(values)):
            step = step + values[:count].mean() * basis[:, :count] @ directions[:count]
    return step
