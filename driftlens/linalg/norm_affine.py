"""Scale and shift of a norm: what fitting them needs to know of the normalised rows, and their closed forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.base.errors import SingularGramError


@dataclass(frozen=True)
class NormMoments:
    """Weighted averages over normalised rows z and wanted outputs y, coordinate by coordinate; all [k] but the last.

    `a + b` are the moments of both sets of rows together. In the letters of FeatCal (arXiv:2605.13030), Eq. 57-58:
    `mean` is z-bar, `second` is q, `scale_target` is q gamma_i + z-bar beta_i, `shift_target` z-bar gamma_i + beta_i.

    Attributes:
        mean: E[z].
        second: E[z * z].
        scale_target: E[z * y].
        shift_target: E[y].
        target_energy: E[y * y].
        weight_sum: how much all rows count together, a number.
    """

    mean: Tensor
    second: Tensor
    scale_target: Tensor
    shift_target: Tensor
    target_energy: Tensor
    weight_sum: Tensor

    @classmethod
    def of_affine(
        cls, mean: Tensor, second: Tensor, scale: Tensor, shift: Tensor | None, weight_sum: Tensor
    ) -> NormMoments:
        """Moments whose wanted output is y = scale * z + shift; no shift means 0."""
        if shift is None:
            shift = scale.new_zeros(scale.shape)
        return cls(
            mean=mean,
            second=second,
            scale_target=second * scale + mean * shift,
            shift_target=mean * scale + shift,
            target_energy=second * scale**2 + 2 * mean * scale * shift + shift**2,
            weight_sum=weight_sum,
        )

    def __add__(self, other: NormMoments) -> NormMoments:
        total = self.weight_sum + other.weight_sum
        left, right = self.weight_sum / total, other.weight_sum / total
        averages = {name: left * getattr(self, name) + right * getattr(other, name) for name in _AVERAGES}
        return NormMoments(**averages, weight_sum=total)

    def misfit(self, scale: Tensor, shift: Tensor | None) -> Tensor:
        """weight_sum * E |scale z + shift - y|^2, a number, from the moments alone."""
        error = scale**2 * self.second - 2 * scale * self.scale_target + self.target_energy
        if shift is not None:
            error = error + 2 * scale * shift * self.mean + shift**2 - 2 * shift * self.shift_target
        return self.weight_sum * error.sum()


_AVERAGES = ("mean", "second", "scale_target", "shift_target", "target_energy")


def solve_layer_norm(
    moments: NormMoments,
    scale: Tensor,
    shift: Tensor,
    anchor_scale: Tensor | None,
    anchor_shift: Tensor | None,
    *,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Scale and shift that come closest to the experts' own, on the merged model's normalised features.

    Minimises over gamma and beta, coordinate by coordinate and with every task counting 1,

        sum_i E (gamma z + beta - gamma_i z - beta_i)^2 + lam (gamma - anchor)^2 + lam (beta - anchor)^2,

    whose normal equations are two by two.  Source: FeatCal (arXiv:2605.13030), Eq. 57-59.

    The closed form is taken as a step from the merged model's own parameters. Where a coordinate hardly varies and
    `lam` is tiny, the determinant is mostly rounding, which then makes the step a little too short or too long; the
    parameters themselves it would scale away. The authors' code clamps the determinant instead, which leaves the
    minimiser of Eq. 57 and can end above the objective it started from.

    Args:
        moments: of all tasks together, so that `weight_sum` is their number.
        scale: of the merged model, [k].
        shift: of the merged model, [k].
        anchor_scale: [k]; None drops the terms with `lam`.
        anchor_shift: [k]; None drops the terms with `lam`.
        lam: lambda >= 0.

    Returns:
        scale and shift, each [k].

    Raises:
        SingularGramError: a coordinate's equations are singular to working precision.
    """
    count = moments.weight_sum
    ridge = 0.0 if anchor_scale is None else lam
    a11 = count * moments.second + ridge
    a12 = count * moments.mean
    a22 = count + ridge
    scale_side = count * (moments.scale_target - moments.second * scale - moments.mean * shift)
    shift_side = count * (moments.shift_target - moments.mean * scale - shift)
    if anchor_scale is not None and anchor_shift is not None:
        scale_side = scale_side + lam * (anchor_scale - scale)
        shift_side = shift_side + lam * (anchor_shift - shift)
    determinant = a22 * a11 - a12**2
    # Smallest and largest eigenvalue of two by two: about determinant / trace, and at most the trace.
    _require_regular(determinant / (a11 + a22), 2 * torch.finfo(a11.dtype).eps * (a11 + a22))
    return (
        scale + (a22 * scale_side - a12 * shift_side) / determinant,
        shift + (a11 * shift_side - a12 * scale_side) / determinant,
    )


def solve_rms_norm(moments: NormMoments, anchor_scale: Tensor | None, *, lam: float) -> Tensor:
    """Scale that comes closest to the experts' own where there is no shift, on the merged model's normalised features.

    The paper calibrates no RMSNorm; this is its LayerNorm update without a shift. Per coordinate,

        sum_i E (gamma z - gamma_i z)^2 + lam (gamma - anchor)^2
            = sum_i q_i (gamma - gamma_i)^2 + lam (gamma - anchor)^2,     q_i = E[z^2] on task i,

    is a parabola whose derivative vanishes at (sum_i q_i gamma_i + lam anchor) / (sum_i q_i + lam): an average of the
    experts' scales, each counting as much as its task excites that coordinate. An average needs no least denominator.

    Args:
        moments: of all tasks together, so that `weight_sum` is their number; z = x / rms(x).
        anchor_scale: [k]; None drops the terms with `lam`.
        lam: lambda >= 0.

    Returns:
        The scale, [k].

    Raises:
        SingularGramError: no task excites a coordinate, and nothing pulls it either.
    """
    pulled = moments.weight_sum * moments.scale_target
    excited = moments.weight_sum * moments.second
    if anchor_scale is not None:
        pulled, excited = pulled + lam * anchor_scale, excited + lam
    _require_regular(excited, len(excited) * torch.finfo(excited.dtype).eps * excited.max())
    return pulled / excited


def _require_regular(smallest: Tensor, limit: Tensor) -> None:
    """Refuse coordinates whose smallest eigenvalue is at most the limit, both [k]; NaN passes, as it is no zero."""
    is_singular = smallest <= limit
    if bool(is_singular.any()):
        worst = float(smallest.min())
        raise SingularGramError(
            f"the equations of {int(is_singular.sum())} of {len(smallest)} coordinates are singular to working "
            f"precision: their smallest eigenvalue is {worst:.2e}",
            hint="Raise `lam`, calibrate on more samples, or leave norms out of `update`.",
            smallest_eigenvalue=worst,
        )
