"""Linear maps and norms: what ridge regression needs to know of the rows, and its closed forms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from driftlens.linalg.cholesky import Factor, factorize
from driftlens.utils.errors import SingularGramError


@dataclass(frozen=True)
class Moments:
    """Weighted averages over rows x of a linear map's input and y of its wanted output (without bias).

    Letters: k inputs, o outputs.

    Attributes:
        gram: E[x x'], [k, k], symmetric; G of FeatCal (arXiv:2605.13030), Eq. 13.
        output_cross: E[y x'], [o, k]; W_i C_i there, when y = W_i x_target.
        mean_in: E[x], [k].
        mean_target: E[y], [o].
        target_energy: E[y * y], [o]; None where nobody asked for it, and then there is no misfit.
        weight_sum: how much all rows count together, a number. What a row counts is up to the caller.
    """

    gram: Tensor
    output_cross: Tensor
    mean_in: Tensor
    mean_target: Tensor
    target_energy: Tensor | None
    weight_sum: Tensor

    def of_outputs(self, rows: slice) -> Moments:
        """Those of some outputs alone."""
        energy = None if self.target_energy is None else self.target_energy[rows]
        cross, target = self.output_cross[rows], self.mean_target[rows]
        return replace(self, output_cross=cross, mean_target=target, target_energy=energy)

    def misfit(self, weight: Tensor) -> Tensor:
        """weight_sum * E (weight x - y)^2 by output, [o], from the moments alone; `weight` is [o, k]."""
        assert self.target_energy is not None
        quadratic = ((weight @ self.gram) * weight).sum(dim=1)
        mixed = (weight * self.output_cross).sum(dim=1)
        return self.weight_sum * (quadratic - 2 * mixed + self.target_energy)


def ridge_factor(gram: Tensor, lam: float, *, scale: float | Tensor = 1.0) -> Factor:
    """Cholesky factor of scale * gram + lam * I, which serves every site with this Gram matrix; see `factorize`.

    The authors of FeatCal also add their eps to the diagonal; it is left out here, so that Eq. 16 holds exactly.
    """
    return factorize(gram, what=f"gram + {lam:g} I" if lam else "gram", scale=scale, shift=lam)


def solve_bias(
    target: Tensor, output: Tensor, weight_sum: float | Tensor, anchor: Tensor | None, *, lam: float
) -> Tensor:
    """Bias that makes the site's mean output right once its weight is fixed, pulled towards `anchor`.

    The minimiser of sum_i omega_i |W mu_i + b - t_i|^2 + lam * |b - anchor|^2, which is

        (sum_i omega_i (t_i - W mu_i) + lam * anchor) / (sum_i omega_i + lam).

    Source: FeatCal (arXiv:2605.13030), Eq. 55. The sum of the task weights has the unit of 1 / features^2 and lambda
    has none, so large features leave the bias to its anchor; compare the two before reading much into a bias.

    Args:
        target: mean wanted output t with its bias, averaged over tasks with weights omega, [o].
        output: mean output W mu without bias, averaged likewise, [o].
        weight_sum: the sum of the task weights omega.
        anchor: [o]; None drops both terms with `lam`.
        lam: lambda >= 0.

    Returns:
        [o], in the dtype of `target`.
    """
    missing = weight_sum * (target - output)
    return missing / weight_sum if anchor is None else (missing + lam * anchor) / (weight_sum + lam)


@dataclass(frozen=True)
class _RidgeSolution:
    """The weight [o, k] that minimises weight_sum * E |W x - y|^2 + lam * |W - anchor|_F^2.

    `factor` is of the matrix that was inverted, weight_sum * E[x x'] + lam * I. The objective is by output, [o]:
    outputs don't interact, so sums over some are those sites'; None where the moments lack the energy of y.
    """

    weight: Tensor
    factor: Factor
    objective: Tensor | None

    def excess(self, other: Tensor) -> Tensor:
        """How much higher the objective is at another weight, by output, [o], in the dtype of `other`.

        Exactly tr(D H D') with D the difference of the weights and H the matrix that was inverted.
        """
        return self.factor.energy((other - self.weight).to(other.dtype))


def solve_ridge(
    moments: Moments, anchor: Tensor | None, *, lam: float, factor: Factor | None = None
) -> _RidgeSolution:
    """Return the weight closest to the outputs experts would give, pulled towards `anchor`, and its objective.

    Minimises over W, with all tasks already summed into the moments,

        weight_sum * E |W x - y|^2 + lam * |W - anchor|_F^2,

    where x is what the *merged* model feeds this site and y the output wanted from it. With G = weight_sum * E[x x']
    and R = weight_sum * E[y x'], the minimiser is (R + lam * anchor) (G + lam * I)^-1.
    Source: FeatCal (arXiv:2605.13030), Eq. 17.

    Args:
        moments: of one site, or of several that are stacked; `weight_sum` is the sum of the task weights. Use float64:
            a half-precision Cholesky factor is noise, and at lam = 1e-5 float32 is good to about 1e-3 only.
        anchor: [o, k], in the unit of the weight; None drops both terms with `lam`.
        lam: lambda >= 0, relative to a Gram matrix of Frobenius norm 1.
        factor: `ridge_factor(gram, lam, scale=weight_sum)` (lam 0 without an anchor), where it is known already.

    Raises:
        NumericsError: a moment holds NaN or infinite entries.
        SingularGramError: not positive definite. Nothing is damped or pseudo-inverted instead.
    """
    cross = moments.output_cross * moments.weight_sum
    if factor is None:
        factor = ridge_factor(moments.gram, 0.0 if anchor is None else lam, scale=moments.weight_sum)
    weight = factor.solve_rows(cross.clone() if anchor is None else torch.add(cross, anchor, alpha=lam))
    if moments.target_energy is None:
        return _RidgeSolution(weight, factor, None)
    # At the solution W G = R, so that W's quadratic form needs no product with G.
    objective = moments.weight_sum * moments.target_energy - torch.linalg.vecdot(cross, weight)
    if anchor is not None:
        objective = objective + lam * torch.linalg.vecdot(anchor, anchor - weight)
    return _RidgeSolution(weight, factor, objective)


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
        averages = {
            name: left * value + right * getattr(other, name)
            for name, value in vars(self).items()
            if name != "weight_sum"
        }
        return NormMoments(**averages, weight_sum=total)

    def misfit(self, scale: Tensor, shift: Tensor | None) -> Tensor:
        """weight_sum * E |scale z + shift - y|^2, a number, from the moments alone."""
        error = scale**2 * self.second - 2 * scale * self.scale_target + self.target_energy
        if shift is not None:
            error = error + 2 * scale * shift * self.mean + shift**2 - 2 * shift * self.shift_target
        return self.weight_sum * error.sum()


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
