"""Methods that merge linear modules: RegMean, RegMean++, WUDI (regression), Iso-C, TSV-Merge (singular vectors)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from driftlens.linalg.ridge import multiply_by_pinv, polar_factor, truncated_svd
from driftlens.merging.method import (
    MATRIX,
    MOST_STEPS,
    StateDict,
    StepScaling,
    add_scaled_step,
    average_experts,
    merge_methods,
)
from driftlens.utils.registry import Bounds

# WUDI's learning rate for task vectors with a root mean square of 1; entries move at most 15 in 300 steps. The
# published absolute rate, 1e-5, is too small for larger task vectors: the merge hardly leaves the sum of the task
# vectors and is farther from the experts than the base, by held-out KL .75 against .60 nat on four real experts
# (entries of .006) and .59 against .26 on eight sampled ones (.002). Rates of 1/60 to 1/12 gave .37 to .40 on the
# four, rates of 1/23 to 1/5 gave .16 to .15 on the eight.
_RATE = 1 / 20

LAWS = {"expert_order_free", "equal_experts_are_fixed", "one_expert_is_fixed"}


@merge_methods.method(
    "regmean", title="RegMean", source="arXiv:2212.09849", laws=LAWS, reads="moments", needs_base=False
)
@merge_methods.method(
    "regmean_pp", title="RegMean++", source="arXiv:2508.03121", laws=LAWS, reads="prefix", needs_base=False
)
def _merge_regmean(
    base: StateDict,
    experts: Mapping[str, StateDict],
    moments: Mapping[str, Tensor],
    *,
    off_diagonal: Annotated[float, Bounds(0, 1), "factor on off-diagonal Gram entries"] = 0.95,
) -> dict[str, Tensor]:
    """Solve for the weight whose outputs are closest to every expert's, on that expert's inputs (RegMean).

    This is (sum W_i G_i) (sum G_i)^-1, with G_i shrunk towards its diagonal. In directions without inputs, and in all
    other parameters, it is the mean. In RegMean++ an expert's inputs are those after the layers merged before.
    """
    merged = average_experts({name: value for name, value in base.items() if name != MATRIX}, experts)
    weights = {task: experts[task][MATRIX].double() for task in moments}
    mean = _sum_one_by_one(weights.values()) / len(weights)
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
    return {**merged, MATRIX: mean + multiply_by_pinv(total, missing)}


def _sum_one_by_one(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors of one shape one by one, which needs less memory than a stack."""
    rest = iter(parts)
    total = next(rest).clone()
    for part in rest:
        total += part
    return total


@merge_methods.method(
    "wudi",
    title="WUDI-Merging",
    source="arXiv:2503.08099",
    laws={"expert_order_free", "one_expert_is_fixed"},
    reads="site",
    others="wudi",
)
def _merge_wudi(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    steps: Annotated[int, Bounds(0, MOST_STEPS), "number of steps"] = 300,
    learning_rate: Annotated[float, Bounds(0), "published: 1e-5 for CLIP; 0 scales it with the task vectors"] = 0.0,
) -> dict[str, Tensor]:
    """Return base + step t that minimizes sum_i |(t - t_i) t_i'|^2 / |t_i|^2 over task vectors t_i (WUDI).

    The published descent stops long before the minimum, by design: no entry moves by more than about
    steps * learning_rate. An absolute rate suits task vectors of one size only; with 0 the rate is a twentieth of the
    root mean square of a matrix's task vectors. Other parameters than matrices of linear modules take the mean task
    vector.
    """
    return add_scaled_step(base, experts, 1.0, partial(_descend_wudi_loss, steps=steps, rate=learning_rate))


def _wudi_gradient_terms(vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return S [k, k] and R [o, k] of the WUDI gradient 2 (t S - R); experts equal to the base are left out."""
    width = vectors[0].shape[1]
    curvature, right = vectors[0].new_zeros(width, width), torch.zeros_like(vectors[0])
    for vector in vectors:
        size = vector.square().sum()
        if size > 0:
            part = vector.mT @ vector / size
            curvature += part
            right += vector @ part
    return curvature, right


def _descend_wudi_loss(vectors: list[Tensor], *, steps: int, rate: float, eps: float = 1e-8) -> Tensor:
    if not rate and (moved := [vector for vector in vectors if vector.any()]):
        size = torch.stack(moved).square().mean().sqrt()
        # The larger eps keeps rounding errors of unconstrained entries from being taken for a slope.
        return size * _descend_wudi_loss([vector / size for vector in vectors], steps=steps, rate=_RATE, eps=1e-6)
    # With S and R computed once, a step takes one product, however many experts there are.
    curvature, right = _wudi_gradient_terms(vectors)
    step = _sum_one_by_one(vectors).requires_grad_()
    adam = torch.optim.Adam([step], lr=rate, eps=eps)
    for _ in range(steps):
        step.grad = 2 * (step.detach() @ curvature - right)
        adam.step()
    return step.detach()


@merge_methods.method(
    "iso_c",
    title="Iso-C",
    source="arXiv:2502.04959",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling"},
    reads="site",
    others="iso_c",
)
def _merge_iso_c(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: StepScaling = 1.0
) -> dict[str, Tensor]:
    """Return base + scaling * sum of task vectors, its singular values replaced by their mean (Iso-C).

    Singular directions with value zero are left out, also of the mean. Other parameters than matrices of linear
    modules take the mean task vector.
    """
    return add_scaled_step(base, experts, scaling, _iso_c_step)


def _iso_c_step(vectors: list[Tensor]) -> Tensor:
    left, values, right = truncated_svd(torch.stack(vectors).sum(dim=0))
    return values.sum() / max(1, len(values)) * left @ right


@merge_methods.method(
    "tsv_m",
    title="TSV-Merge",
    source="arXiv:2412.00081",
    laws={"expert_order_free", "zero_scaling_is_base", "affine_in_scaling", "one_expert_at_scaling_one"},
    reads="site",
    others="tsv_m",
)
def _merge_tsv_m(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: StepScaling = 1.0
) -> dict[str, Tensor]:
    """Return base + scaling * U S V' from every expert's leading singular vectors, decorrelated by polar factors.

    Each of N experts contributes 1/N of a matrix's rank, at least one vector. Other parameters than matrices of linear
    modules take the mean task vector.
    """
    return add_scaled_step(base, experts, scaling, _tsv_m_step)


def _tsv_m_step(vectors: list[Tensor]) -> Tensor:
    rank = max(1, min(vectors[0].shape) // len(vectors))
    parts = [truncated_svd(vector) for vector in vectors]
    left = torch.cat([part[0][:, :rank] for part in parts], dim=1)
    values = torch.cat([part[1][:rank] for part in parts])
    right = torch.cat([part[2][:rank] for part in parts])
    # A vector that several experts share counts once: N equal experts give the leading 1/N of their common step.
    return polar_factor(left) * values @ polar_factor(right)
