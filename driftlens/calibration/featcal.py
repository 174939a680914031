"""FeatCal (arXiv:2605.13030): Algorithm 1 as one function, and `FeatCal`, the same solves for the streamed engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.calibration.calibrator import ClosedFormBase, calibrators
from driftlens.engine.calibrating import (
    LinearProblem,
    NormProblem,
    Problem,
    SiteReport,
    SiteUpdate,
    TargetSpec,
)
from driftlens.linalg.ridge import (
    random_direction,
    ridge_factor,
    solve_bias,
    solve_layer_norm,
    solve_ridge,
    solve_rms_norm,
    stationarity_error,
)
from driftlens.models.chain import Parameters, Site
from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Bounds, Label
from driftlens.utils.variants import EMBEDDINGS


@torch.no_grad()
def featcal_blocks(
    merged: nn.Module,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    inputs: Mapping[str, Mapping[str, Tensor]],
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    *,
    lam: float = 0.05,
    rho: float = 2.0,
    alpha: float = 0.3,
    eps: float = 1e-8,
) -> nn.Module:
    """Calibrate a copy of a merged model by FeatCal (Algorithm 1 of arXiv:2605.13030), in one function.

    Every `nn.Linear` and `nn.LayerNorm` inside the blocks is solved for. `FeatCal` below solves the same systems, but
    streams batches, runs every block once and reports what each solve did. Tests hold one against the other.

    Args:
        merged: the merged model. All models are in eval mode.
        base: the model that the experts were fine-tuned from.
        experts: task -> expert.
        inputs: task -> keyword arguments of a forward call on its calibration samples, [n, ...] each, without padding.
        blocks_of: model -> its blocks in forward order.
        lam: ridge lambda > 0 of the pull towards the anchor (Eq. 15).
        rho: position of the anchor on the line from the base to the merged model (Eq. 11).
        alpha: share in [0, 1] of the expert's features in the target (Eq. 10).
        eps: least Frobenius norm of a Gram matrix (Eq. 14).

    Returns:
        The copy, with weights (Eq. 17), biases (Eq. 55) and LayerNorms (Eq. 59) of its blocks replaced.
    """
    calibrated = copy.deepcopy(merged)
    for index, block in enumerate(blocks_of(calibrated)):
        # One snapshot per block. The calibrated model's features come from blocks that are calibrated already.
        snapshot = [
            (
                blocks_of(expert)[index],
                module_inputs(calibrated, block, inputs[task]),
                module_inputs(expert, blocks_of(expert)[index], inputs[task]),
            )
            for task, expert in experts.items()
        ]
        solved = {}
        for name, module in block.named_modules():
            if not isinstance(module, nn.Linear | nn.LayerNorm):
                continue
            of_base = blocks_of(base)[index].get_submodule(name)
            anchor = {  # Eq. 11 and 51; until the block is loaded, `module` holds the merged parameters
                key: torch.lerp(of_base.get_parameter(key).double(), value.double(), rho)
                for key, value in module.named_parameters()
            }
            tasks = [(expert.get_submodule(name), x[name], x_expert[name]) for expert, x, x_expert in snapshot]
            if isinstance(module, nn.Linear):
                solved[name] = _linear_closed_form(tasks, anchor, lam, alpha, eps)
            else:
                solved[name] = _layer_norm_closed_form(tasks, anchor, lam)
        for name, parameters in solved.items():
            block.get_submodule(name).load_state_dict(parameters)
    return calibrated


# The expert's module with its inputs [n, d] in the calibrated model and in the expert.
_Task = tuple[Any, Tensor, Tensor]


def _linear_closed_form(
    tasks: Sequence[_Task], anchor: Mapping[str, Tensor], lam: float, alpha: float, eps: float
) -> dict[str, Tensor]:
    """Solve for the weight [m, d] (Eq. 17), then for the bias [m] with that weight fixed (Eq. 55)."""
    left = lam * torch.eye(anchor["weight"].shape[1]).to(anchor["weight"])
    right = lam * anchor["weight"]
    moments = []
    for expert, x, x_expert in tasks:
        target = alpha * x_expert + (1 - alpha) * x  # Eq. 10
        gram, cross = x.mT @ x / len(x), target.mT @ x / len(x)  # Eq. 13
        omega = 1 / gram.norm().clamp_min(eps)  # Eq. 14
        left = left + omega * gram
        right = right + omega * expert.weight.double() @ cross
        moments.append((expert, omega, x.mean(dim=0), target.mean(dim=0)))  # Eq. 52
    solved = {"weight": torch.linalg.solve(left, right, left=False)}  # Eq. 17
    if "bias" in anchor:
        total = lam * anchor["bias"]
        for expert, omega, mean, mean_target in moments:
            target_out = expert.bias.double() + expert.weight.double() @ mean_target
            total = total + omega * (target_out - solved["weight"] @ mean)
        solved["bias"] = total / (lam + sum(omega for _, omega, *_ in moments))  # Eq. 55
    return solved


def _layer_norm_closed_form(tasks: Sequence[_Task], anchor: Mapping[str, Tensor], lam: float) -> dict[str, Tensor]:
    """Solve for scale and shift [d] of a layer norm, towards the experts' affine maps (Eq. 57)."""
    zero, a22 = torch.zeros_like(anchor["weight"]), len(tasks) + lam
    a11, a12 = zero + lam, zero  # Eq. 58
    r_scale, r_shift = lam * anchor["weight"], lam * anchor["bias"]
    for expert, x, _ in tasks:
        z = F.layer_norm(x, expert.normalized_shape, eps=expert.eps)
        mean, square = z.mean(dim=0), z.square().mean(dim=0)  # Eq. 56
        scale, shift = expert.weight.double(), expert.bias.double()
        a11, a12 = a11 + square, a12 + mean
        r_scale = r_scale + square * scale + mean * shift
        r_shift = r_shift + mean * scale + shift
    determinant = a22 * a11 - a12 * a12
    return {  # Eq. 59
        "weight": (a22 * r_scale - a12 * r_shift) / determinant,
        "bias": (a11 * r_shift - a12 * r_scale) / determinant,
    }


def module_inputs(model: nn.Module, block: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a model; return the inputs of each module of a block, [n, d] in float64, one row per token.

    Args:
        model: the model, in eval mode.
        block: one of its blocks.
        inputs: keyword arguments of the forward call.
    """
    rows: dict[str, Tensor] = {}

    def record_input(name: str, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            rows[name] = args[0].flatten(0, -2).double()

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: record_input(name, args))
        for name, module in block.named_modules()
    ]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def _solve_linear_sites(
    problem: LinearProblem, anchor: Mapping[str, Tensor] | None, *, lam: float, update: Collection[str]
) -> list[SiteUpdate]:
    """Solve for weight (Eq. 17) and bias (Eq. 55) of linear modules that share one Cholesky factor.

    `anchor` is by parameter name, in the dtype of the moments; None drops the terms with `lam`.
    """
    # Without an anchor the ridge would pull towards zero.
    pull, moments = 0.0 if anchor is None else lam, problem.moments
    solves = "linear" in update
    factor = ridge_factor(moments.gram, pull, scale=moments.weight_sum) if solves else None
    # One product checks the solution of all sites along a random direction.
    direction = random_direction(moments.gram)
    image = moments.weight_sum * (moments.gram @ direction) + pull * direction
    weight_sum = float(moments.weight_sum)
    updates, start = [], 0
    # One by one, or several copies of all weights would be in memory.
    for site in problem.sites:
        name, bias_name = f"{site.name}.weight", f"{site.name}.bias"
        merged, pulled = problem.merged[name], None if anchor is None else anchor[name]
        of_site = moments.select_outputs(slice(start, start + len(merged)))
        start += len(merged)
        parameters: dict[str, Tensor] = {}
        error = None
        if factor is None:
            weight = merged.to(moments.gram)
            before = after = None if moments.target_energy is None else of_site.misfit(weight)
            # Only the bias moves, so the objective of the weight stays.
            if after is not None and pulled is not None:
                before = after = after + lam * (weight - pulled).square().sum(dim=1)
        else:
            solution = solve_ridge(of_site, pulled, lam=pull, factor=factor)
            weight, after = solution.weight, solution.objective
            before = None if after is None else after + solution.objective_increase(merged)
            parameters[name] = weight
            right = of_site.weight_sum * (of_site.output_cross @ direction)
            if pulled is not None:
                right = right + pull * (pulled @ direction)
            error = stationarity_error(weight, image, right)
        if "bias" in update and site.name in problem.expert_bias:
            parameters[bias_name] = solve_bias(
                of_site.mean_target + problem.expert_bias[site.name],
                weight @ of_site.mean_in,
                of_site.weight_sum,
                None if anchor is None else anchor[bias_name],
                lam=lam,
            )
        report = SiteReport(
            site=site.name,
            kind=site.kind,
            lam=pull,
            objective_before=None if before is None else float(before.sum()),
            objective_after=None if after is None else float(after.sum()),
            weight_change=relative_change(weight, merged),
            condition_estimate=None if factor is None else factor.condition_number,
            smallest_eigenvalue=None if factor is None else factor.smallest_eigenvalue,
            task_weight_sum=weight_sum,
            task_weight_share=weight_sum / (weight_sum + pull) if site.name in problem.expert_bias else None,
            stationarity_error=error,
        )
        updates.append(SiteUpdate(parameters, report))
    return updates


def relative_change(new: Tensor, old: Tensor) -> float | None:
    """Return the relative change |new - old|_F / |old|_F; None if `old` is zero."""
    size = float(torch.linalg.vector_norm(old))
    return float(torch.linalg.vector_norm(new.to(old) - old)) / size if size else None


def _solve_norm_site(problem: NormProblem, anchor: Mapping[str, Tensor] | None, *, lam: float) -> SiteUpdate:
    """Solve for the scale and, if it has one, the shift of a norm layer (Eq. 59)."""
    moments, pull = problem.moments, anchor or {}
    (site,) = problem.sites
    scale_name, shift_name = f"{site.name}.weight", f"{site.name}.bias"
    # Steps are solved in the dtype of the moments.
    merged = {name: value.to(moments.mean) for name, value in problem.merged.items()}
    if shift_name in merged:
        start, pulls = (merged[scale_name], merged[shift_name]), (pull.get(scale_name), pull.get(shift_name))
        scale, shift = solve_layer_norm(moments, *start, *pulls, lam=lam)
        parameters = {scale_name: scale, shift_name: shift}
    else:
        parameters = {scale_name: solve_rms_norm(moments, pull.get(scale_name), lam=lam)}
    report = SiteReport(
        site=site.name,
        kind=site.kind,
        lam=lam if anchor is not None else 0.0,
        objective_before=_norm_objective(problem, merged, anchor, lam),
        objective_after=_norm_objective(problem, parameters, anchor, lam),
        weight_change=relative_change(torch.cat([*parameters.values()]), torch.cat([*merged.values()])),
        task_weight_sum=float(moments.weight_sum),
    )
    return SiteUpdate(parameters, report)


def _norm_objective(
    problem: NormProblem, parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor] | None, lam: float
) -> float:
    """Compute the objective of a norm layer (Eq. 57) from its moments."""
    name = problem.sites[0].name
    total = problem.moments.misfit(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
    for key, value in (anchor or {}).items():
        total = total + lam * (parameters[key] - value).square().sum()
    return float(total)


Update = Literal["linear", "bias", "norm"]
UPDATES: tuple[Update, ...] = ("linear", "bias", "norm")

# Parameters of `FeatCal` by preset, as published but for the last one; missing ones keep their defaults.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The paper's text, all CLIP suites; also the defaults of `FeatCal`.
        "paper-clip": {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "update": ("linear", "bias", "norm")},
        # The authors' script for eight ViT-B/32 tasks; in the last block only the class token has full weight.
        "demo-clip": {
            "lam": 0.05,
            "rho": 2.2,
            "alpha": 0.25,
            "update": ("linear", "bias", "norm"),
            "last_block_tokens": "cls_emphasis",
        },
        # The paper's text for language models; norms are left alone, T5 has no biases.
        "flan-t5": {"lam": 1e-5, "rho": 2.0, "alpha": 0.6, "update": ("linear", "bias")},
        "llama-3b": {"lam": 1e-5, "rho": 0.5, "alpha": 0.15, "update": ("linear",)},
        "llama-8b": {"lam": 3.0, "rho": 0.5, "alpha": 0.15, "update": ("linear",)},
        # Found on MiniLM's experts and checked on MPNet's (docs/studies.md).
        "embeddings": {"lam": 0.05, "rho": 3.0, "alpha": 0.5},
    }
)


@calibrators.register("featcal")
class FeatCal(ClosedFormBase):
    """Closed-form feature calibration of a merged model (FeatCal, arXiv:2605.13030).

    The defaults follow the paper's text for CLIP; `PRESETS` has the others.

    Args:
        lam: ridge lambda >= 0, relative to a Gram matrix of Frobenius norm 1 (Eq. 15).
        rho: >= 0; the anchor is rho * merged + (1 - rho) * base (Eq. 11); above 1 it extrapolates away from the base.
        alpha: share in [0, 1] of the expert's features in the target (Eq. 10).
        eps: least Gram norm (Eq. 14). The authors' code also adds it to the inverted matrix and keeps LayerNorm
            determinants above it; here it doesn't, so that Eq. 16 and 59 hold exactly.
        update: kinds of parameters to solve for: `linear` weights, `bias` of linear modules, `norm` scale and shift.
        anchor: `merged` for Eq. 11, `none` to drop the pull towards the anchor.
        last_block_tokens: token-weight rule of the last block's sites, except keys and values; the authors' script has
            `cls_emphasis` here, the paper's text weighs every token alike.
        solve_dtype: `float64` or `float32`, for sums and solves; at lam = 1e-5 float32 is accurate to about 1e-3.
        inputs: the features that a layer reads while it is fitted: `deployed` from the calibrated layers before it,
            as in the paper, or `merged` or `expert` from that model, for ablations.
    """

    title = "FeatCal"
    source = "arXiv:2605.13030"
    presets = PRESETS
    suited: ClassVar[Mapping[str, str]] = {
        "": "paper-clip",
        EMBEDDINGS: "embeddings",
        **dict.fromkeys(("hf-t5", "hf-seq2seq"), "flan-t5"),
        **dict.fromkeys(("hf-decoder", "hf-vlm"), "llama-3b"),
    }
    # Of 27 settings around the preset among the best by test accuracy on two image suites (docs/benchmarks.md).
    candidates: ClassVar[Sequence[Mapping[str, Any]]] = ({"rho": 3.0, "alpha": 0.5},)
    swept: ClassVar[Mapping[str, Sequence[float]]] = {
        **{"lam": (0.04, 0.2, 1, 5, 25), "rho": (0.25, 0.5, 1, 1.5), "alpha": (0, 0.5, 1, 2, 3)}
    }
    of_base = ("rho",)

    def __init__(
        self,
        lam: Annotated[
            float, Bounds(low=0), Label("Ridge λ"), "pull towards the anchor, relative to Gram norm 1"
        ] = 0.05,
        rho: Annotated[float, Bounds(low=0), Label("Anchor ρ"), "the anchor is rho * merged + (1 - rho) * base"] = 2.0,
        alpha: Annotated[float, Bounds(low=0, high=1), Label("Target α"), "share of the expert in the target"] = 0.3,
        eps: Annotated[float, Bounds(low=0), Label("Least ε"), "least Gram norm"] = 1e-8,
        update: Annotated[
            Sequence[Update],
            Label("Parameters to solve for"),
            "linear weights, linear biases, scale and shift of norms",
        ] = UPDATES,
        anchor: Annotated[
            Literal["merged", "none"], Label("Anchor"), "`none` drops the pull towards the anchor"
        ] = "merged",
        last_block_tokens: Annotated[
            str | None, Label("Token weights of the last block"), "rule of token weights"
        ] = None,
        solve_dtype: Annotated[Literal["float64", "float32"], Label("Precision"), "of sums and solves"] = "float64",
        inputs: Annotated[
            Literal["deployed", "merged", "expert"],
            Label("Features fed"),
            "features that a layer reads during the fit",
        ] = "deployed",
    ) -> None:
        self.lam = lam
        self.rho = rho
        self.alpha = alpha
        self.eps = eps
        self.update = update
        self.anchor = anchor
        self.last_block_tokens = last_block_tokens
        self.solve_dtype = solve_dtype
        self.inputs = inputs

    def check(self, *, has_base: bool = True) -> None:
        """Raise a `SpecError` if a setting is invalid."""
        super().check(has_base=has_base)
        if not has_base and self.anchor == "merged" and self.rho != 1:
            raise SpecError(
                f"rho is {self.rho:g}, which needs a base, but there is no base",
                hint="Set rho to 1, name the base, or set anchor to none.",
            )

    @property
    def anchor_rho(self) -> float:
        """The position rho of the anchor (Eq. 11); 1 without an anchor."""
        return 1.0 if self.anchor == "none" else self.rho

    @property
    def anchor_ridge(self) -> float:
        """The ridge that Eq. 17 adds to the diagonal; 0 without an anchor."""
        return 0.0 if self.anchor == "none" else self.lam

    def target_spec(self, site: Site, *, in_last_block: bool) -> TargetSpec:
        """Return a target with share `alpha` of the expert's features, and the token weights of the site."""
        # Attention mixes keys and values of all tokens into the class token.
        emphasised = self.last_block_tokens if in_last_block and not site.mixes_tokens else None
        return TargetSpec(self.alpha, emphasised or site.token_weights)

    def task_weight(self, gram_norm: Tensor) -> Tensor:
        """Return the task weight omega = 1 / max(|G|_F, eps) (Eq. 14), given the norm of its Gram matrix."""
        return 1 / gram_norm.clamp_min(self.eps)

    def min_rows_to_solve(self, width: int) -> int:
        """Return the least number of rows with a unique solution: 1 with a ridge, else the number of inputs."""
        return 1 if self.anchor_ridge else width

    def anchor_parameters(self, merged: Parameters, base: Parameters | None) -> dict[str, Tensor] | None:
        """Return the anchor parameters (Eq. 11) in `solve_dtype`; None without an anchor."""
        if self.anchor == "none":
            return None
        dtype: torch.dtype = getattr(torch, self.solve_dtype)
        # Without a base, `check` has required that rho is 1.
        if base is None:
            return {name: value.to(dtype) for name, value in merged.items()}
        return {name: torch.lerp(base[name].to(dtype), value.to(dtype), self.rho) for name, value in merged.items()}

    def solve(self, problem: Problem) -> list[SiteUpdate]:
        """Solve one regression problem: Eq. 17 and 55 for linear modules, Eq. 59 for norms."""
        anchor = self.anchor_parameters(problem.merged, problem.base)
        if isinstance(problem, LinearProblem):
            return _solve_linear_sites(problem, anchor, lam=self.lam, update=self.update)
        return [_solve_norm_site(problem, anchor, lam=self.lam)]
