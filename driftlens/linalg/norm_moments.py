"""What fitting the scale and shift of a norm needs to know of its normalised rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
