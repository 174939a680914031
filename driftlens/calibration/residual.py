"""Residual calibration: linear modules also correct the errors of the modules before them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.calibration.featcal import module_inputs, relative_change
from driftlens.engine.calibrating import SiteReport, SiteUpdate, StepwiseProblem
from driftlens.engine.sequential import StepwiseCalibrator
from driftlens.linalg.ridge import BIAS_INPUT, RidgeChoice, choose_ridges, solve_residual, sum_moments
from driftlens.utils.errors import SingularGramError, SpecError
from driftlens.utils.registry import Bounds, Label
from driftlens.utils.variants import ADAPTERS, EMBEDDINGS


@torch.no_grad()
def residual_blocks(
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    inputs: Mapping[str, Mapping[str, Tensor]],
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    steps: Sequence[Sequence[str]],
    adds_to: Mapping[str, str],
    *,
    ridge: float = 0.03,
    share: float = 1.0,
) -> nn.Module:
    """Calibrate a copy of a merged model by residual calibration, in one function over its blocks.

    Every token counts alike, and ridge and share are given. `ResidualCal` below solves the same systems, but weighs
    tokens by gradients of the experts, chooses ridges and share by cross-validation, and streams batches.

    Args:
        merged: the merged model. All models are in eval mode.
        experts: task -> expert.
        inputs: task -> keyword arguments of a forward call on its calibration samples, [n, ...] each, without padding.
        blocks_of: model -> its blocks in forward order.
        steps: names of a block's linear modules in the order in which it runs them; those of one step read one tensor.
        adds_to: linear module -> module that reads the residual stream to which the output of the first is added.
        ridge: pull towards the merged parameters, for inputs whose mean Gram matrix has norm 1.
        share: share in [0, 1] of the repair of what earlier modules left.

    Returns:
        The copy, with weights and biases of these modules replaced.
    """
    calibrated = copy.deepcopy(merged)
    for index, block in enumerate(blocks_of(calibrated)):
        of_experts = {task: blocks_of(expert)[index] for task, expert in experts.items()}
        reads = {task: module_inputs(experts[task], of_experts[task], inputs[task]) for task in experts}
        for step in steps:
            # Inputs are collected again after every step: with one snapshot the next step repairs the same error twice.
            own = {task: module_inputs(calibrated, block, inputs[task]) for task in experts}
            solved = {}
            for name in step:
                tasks = []
                for task, expert in of_experts.items():
                    x, x_expert = own[task], reads[task]
                    target = _apply_linear_in_float64(expert.get_submodule(name), x_expert[name])
                    if stream := adds_to.get(name):
                        target = target + x_expert[stream] - x[stream]
                    tasks.append((x[name], _apply_linear_in_float64(expert.get_submodule(name), x[name]), target))
                solved[name] = _solve_weight_and_bias(block.get_submodule(name), tasks, ridge, share)
            for name, parameters in solved.items():
                block.get_submodule(name).load_state_dict(parameters)
    return calibrated


def _solve_weight_and_bias(
    merged: nn.Module, tasks: Sequence[tuple[Tensor, Tensor, Tensor]], ridge: float, share: float
) -> dict[str, Tensor]:
    """Solve for weight [m, d] and bias [m] together, by ridge regression around the merged ones.

    `tasks` has the inputs [n, d], and the local and the residual targets [n, m] of every task.
    """
    weight, bias = merged.get_parameter("weight").double(), merged.state_dict().get("bias")
    grams, crosses, norms = [], [], []
    for x, local, residual in tasks:
        gap = local - _apply_linear_in_float64(merged, x) + share * (residual - local)
        norms.append(torch.linalg.matrix_norm(x.mT @ x) / len(x))
        # The constant input is large, so that the ridge hardly penalises the bias.
        if bias is not None:
            x = torch.cat([x, x.new_full((len(x), 1), BIAS_INPUT)], dim=1)
        grams.append(x.mT @ x / len(x))
        crosses.append(gap.mT @ x / len(x))
    # Brings the mean Gram matrix to norm 1, so that ridges have one meaning in all layers.
    scale = len(norms) / sum(norms)
    gram, cross = scale * sum(grams), scale * sum(crosses)
    change = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), cross, left=False)
    solved = {"weight": weight + change[:, : weight.shape[1]]}
    if bias is not None:
        solved["bias"] = bias.double() + BIAS_INPUT * change[:, -1]
    return solved


def _apply_linear_in_float64(module: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: value.double() for name, value in module.named_parameters()}
    return F.linear(x, **parameters)


@calibrators.register("residual")
class ResidualCal(StepwiseCalibrator, Calibrator):
    """Closed-form calibration towards the experts' outputs and residual streams, with cross-validated ridges.

    Weights and biases of linear modules are solved for, step by step in the order in which a block runs them; norms,
    stem and projection stay as merged. `mu` is worth trying where samples are ample.

    Args:
        order: `steps` collects inputs again after every step inside a block; `block` solves from one snapshot.
        residual: the largest share of upstream repair; 0 repairs what each module itself gets wrong, and no more.
        weights: how tokens and tasks count: by random backward passes of the experts, or `uniform`.
        cv: whether ridges and share are chosen on held-out folds; otherwise they are `ridge` and `residual`.
        folds: of the samples, by their content.
        ridge: both ridges where nothing is chosen, relative to a mean Gram matrix of norm 1.
        mu: share in [0, 1] of the gradients' second moment in the output metric; it holds every task's Gram matrix.
        seed: of the random backward passes.
    """

    title = "Residual calibration"
    # Found on MiniLM's experts and checked on MPNet's (docs/studies.md).
    presets = MappingProxyType({"views": MappingProxyType({"mu": 0.9})})
    preset_views = MappingProxyType({"views": 3})
    suited = MappingProxyType({EMBEDDINGS: "views", f"hf-decoder, {ADAPTERS}": "views"})
    candidates = ({}, {"mu": 0.9})
    with_views = MappingProxyType({"mu": 0.9})
    effort = 3.4
    update: Sequence[str] = ("linear", "bias")

    def __init__(
        self,
        order: Annotated[
            Literal["steps", "block"], Label("Order"), "inputs collected per step, or per block"
        ] = "steps",
        residual: Annotated[
            float, Bounds(low=0, high=1), Label("Upstream repair"), "largest share of it; 0 is off"
        ] = 1.0,
        weights: Annotated[
            Literal["gradient", "uniform"],
            Label("Token weights"),
            "by the experts' gradients, or all alike",
        ] = "gradient",
        cv: Annotated[
            Literal["on", "off"], Label("Cross-validation"), "chooses ridges and share of every module"
        ] = "on",
        folds: Annotated[int, Bounds(low=2), Label("Folds"), "parts of the samples"] = 4,
        ridge: Annotated[
            float, Bounds(low=0, low_open=True), Label("Ridge λ"), "where cross-validation is off"
        ] = 0.03,
        mu: Annotated[
            float, Bounds(low=0, high=1), Label("Output metric μ"), "share of the gradients' second moment"
        ] = 0.0,
        seed: Annotated[int, Bounds(low=0), Label("Seed"), "of the random backward passes"] = 0,
    ) -> None:
        self.order = order
        self.residual = residual
        self.weights = weights
        self.cv = cv
        self.folds = folds
        self.ridge = ridge
        self.mu = mu
        self.seed = seed

    def check(self, *, has_base: bool = True) -> None:
        """Raise a `SpecError` if a setting is invalid."""
        super().check(has_base=has_base)
        if self.mu and self.weights == "uniform":
            raise SpecError(
                f"mu is {self.mu:g}, which needs gradients, but weights is uniform",
                hint="Set weights to gradient, or mu to 0.",
            )

    @property
    def num_folds(self) -> int:
        """The number of cross-validation folds of the samples; 1 without held-out samples."""
        return self.folds if self.cv == "on" else 1

    def solve(self, problem: StepwiseProblem) -> list[SiteUpdate]:
        """Choose ridges and upstream share, then solve for weights and biases that share a Gram matrix."""
        if self.cv == "on":
            ridges = choose_ridges(problem.folds, most=self.residual)
        else:
            ridges = RidgeChoice(self.ridge, self.ridge, self.residual)
        moments = sum_moments(problem.folds, getattr(torch, self.solve_dtype))
        try:
            # Views give enough rows for an accurate metric, so a preconditioner with it converges in few steps.
            is_two_sided = problem.has_views and self.mu < 1
            change, gap = solve_residual(moments, ridges, tasks=problem.tasks, is_two_sided=is_two_sided)
        except SingularGramError as error:
            error.hint = "Raise `ridge`, or let cross-validation choose it (cv=on)."
            raise
        merged, updates = problem.merged, []
        # The energy is summed over all outputs of the group, so each site gets its share.
        share = float(moments.energy) / len(change)
        weights = [merged[f"{site.name}.weight"] for site in problem.sites]
        changes = torch.split(change, [*map(len, weights)])
        for site, weight, of_site in zip(problem.sites, weights, changes, strict=True):
            parameters = {f"{site.name}.weight": weight.to(change) + of_site[:, : weight.shape[1]]}
            if problem.has_bias:
                bias = merged[f"{site.name}.bias"].to(change)
                parameters[f"{site.name}.bias"] = bias + BIAS_INPUT * of_site[:, -1]
            part = len(of_site) / len(change)
            updates.append(
                SiteUpdate(
                    parameters,
                    SiteReport(
                        site=site.name,
                        kind=site.kind,
                        lam=ridges.local,
                        objective_before=share * len(of_site),
                        objective_after=None if ridges.held_out is None else ridges.held_out * part,
                        weight_change=relative_change(parameters[f"{site.name}.weight"], weight),
                        task_weight_sum=problem.task_weight_sum,
                        upstream_ridge=ridges.upstream if self.residual else None,
                        upstream_share=ridges.share if self.residual else None,
                        stationarity_error=gap,
                    ),
                )
            )
        return updates
