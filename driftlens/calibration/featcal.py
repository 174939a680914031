"""FeatCal: closed-form calibration of linear modules and norms."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.checks import require_number, require_one_of
from driftlens.calibration.linear_solve import solve_linear
from driftlens.calibration.norm_solve import solve_norm
from driftlens.engine.problems import LinearProblem, Problem, SiteUpdate
from driftlens.errors import SpecError
from driftlens.models.chain import Parameters

UPDATES = ("linear", "bias", "norm")


@calibrators.register("featcal")
class FeatCal:
    """Closed-form feature calibration of a merged model (arXiv:2605.13030): its settings and its solves.

    The defaults follow the paper's text for CLIP; `driftlens.calibration.presets` has the others. Arguments are stored
    as they are and checked when they are used.

    Args:
        lam: ridge lambda >= 0, relative to a Gram matrix of Frobenius norm 1 (Eq. 15).
        rho: the anchor is rho * merged + (1 - rho) * base (Eq. 11); above 1 it extrapolates away from the base.
        alpha: share in [0, 1] of the expert's features in the target (Eq. 10).
        eps: least Gram norm (Eq. 14) and least LayerNorm determinant. The authors' code also adds it to the matrix
            that is inverted; here it isn't, so that Eq. 16 holds exactly.
        update: what is solved for: `linear` weights, `bias` of linear modules, `norm` scale and shift.
        anchor: `merged` for Eq. 11, `none` to drop the pull towards the anchor.
        last_block_tokens: token-weight rule of the last block's sites, keys and values excepted, instead of the
            adapter's own; the authors' script has `cls_emphasis` here, the paper's text counts every token alike.
        solve_dtype: `float64` or `float32`, for sums and solves; at lam = 1e-5 float32 is good to about 1e-3 only.
    """

    def __init__(
        self,
        lam: float = 0.05,
        rho: float = 2.0,
        alpha: float = 0.3,
        eps: float = 1e-8,
        update: Sequence[str] = UPDATES,
        anchor: str = "merged",
        last_block_tokens: str | None = None,
        solve_dtype: str = "float64",
    ) -> None:
        self.lam = lam
        self.rho = rho
        self.alpha = alpha
        self.eps = eps
        self.update = update
        self.anchor = anchor
        self.last_block_tokens = last_block_tokens
        self.solve_dtype = solve_dtype

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor and their values; `deep` changes nothing, as nothing is nested."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **parameters: Any) -> Self:
        """The calibrator itself, some of its settings changed.

        Raises:
            SpecError: there is no such setting.
        """
        known = self.get_params()
        for name, value in parameters.items():
            if name not in known:
                raise SpecError(
                    f"{type(self).__name__} has no parameter {name!r}", hint=f"It has {', '.join(known)}."
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value != defaults[name].default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, *, has_base: bool = True) -> None:
        """Refuse settings that make no sense.

        Raises:
            SpecError: names the setting, its value and what was expected.
        """
        require_number("lam", self.lam, at_least=0)
        require_number("rho", self.rho)
        require_number("alpha", self.alpha, at_least=0, at_most=1)
        require_number("eps", self.eps, at_least=0)
        require_one_of("anchor", self.anchor, ("merged", "none"))
        require_one_of("solve_dtype", self.solve_dtype, ("float32", "float64"))
        if isinstance(self.update, str) or not self.update:
            raise SpecError(
                f"update is {self.update!r}; expected a list of {', '.join(UPDATES)}",
                hint="For example ['linear', 'bias']; on the command line: --set 'update=[linear, bias]'.",
            )
        for part in self.update:
            require_one_of("update", part, UPDATES)
        if not has_base and self.anchor == "merged" and self.rho != 1:
            raise SpecError(
                f"rho is {self.rho:g}, which blends the merged model with the base, and there is no base",
                hint="Set rho to 1, name the base, or set anchor to none.",
            )

    def task_weight(self, gram_norm: Tensor) -> Tensor:
        """omega = 1 / max(|G|_F, eps) (Eq. 14): every task counts alike, however large its features are."""
        return 1 / gram_norm.clamp_min(self.eps)

    def anchor_of(self, merged: Parameters, base: Parameters | None) -> dict[str, Tensor] | None:
        """The parameters towards which solves are pulled (Eq. 11), in `solve_dtype`; None where nothing pulls."""
        if self.anchor == "none":
            return None
        dtype: torch.dtype = getattr(torch, self.solve_dtype)
        if base is None:  # then rho is 1
            return {name: value.to(dtype) for name, value in merged.items()}
        return {
            name: torch.lerp(base[name].to(dtype), value.to(dtype), self.rho)
            for name, value in merged.items()
        }

    def solve(self, problem: Problem) -> list[SiteUpdate]:
        """New parameters of the problem's sites: Eq. 17 and 55 for linear ones, Eq. 59 for norms.

        Raises:
            NumericsError: the moments hold NaN or infinite entries.
            SingularGramError: gram + lam * I is singular to working precision.
        """
        anchor = self.anchor_of(problem.merged, problem.base)
        if isinstance(problem, LinearProblem):
            return solve_linear(problem, anchor, lam=self.lam, update=self.update)
        return [solve_norm(problem, anchor, lam=self.lam, eps=self.eps)]
