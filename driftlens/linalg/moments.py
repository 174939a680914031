"""What ridge regression needs to know of the rows of a linear map, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from driftlens.errors import ShapeError


@dataclass(frozen=True)
class Moments:
    """Weighted averages over rows x of a linear map's input and y of its wanted output (without bias).

    `a + b` are the moments of both sets of rows together. Letters: k inputs, o outputs.

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

    @classmethod
    def of(cls, rows: Tensor, targets: Tensor, weights: Tensor | None = None) -> Moments:
        """Moments of some rows.

        Args:
            rows: inputs, [T, k].
            targets: outputs wanted, [T, o].
            weights: how much each row counts, [T], at least 0 and not all 0; None counts each 1.

        Raises:
            ShapeError: the numbers of rows differ.
        """
        counts = rows.new_ones(len(rows)) if weights is None else weights
        if rows.dim() != 2 or targets.dim() != 2 or not len(rows) == len(targets) == len(counts):
            raise ShapeError(
                "want rows [T, k], targets [T, o] and weights [T], "
                f"got {list(rows.shape)}, {list(targets.shape)} and {list(counts.shape)}"
            )
        total = counts.sum()
        weighted = rows * (counts / total)[:, None]
        share = counts / total
        return cls(
            gram=weighted.mT @ rows,
            output_cross=targets.mT @ weighted,
            mean_in=share @ rows,
            mean_target=share @ targets,
            target_energy=share @ targets.square(),
            weight_sum=total,
        )

    def __add__(self, other: Moments) -> Moments:
        total = self.weight_sum + other.weight_sum
        left, right = self.weight_sum / total, other.weight_sum / total
        known = self.target_energy is not None and other.target_energy is not None
        names = [name for name in _AVERAGES if known or name != "target_energy"]
        averages = {name: left * getattr(self, name) + right * getattr(other, name) for name in names}
        return Moments(**{"target_energy": None, **averages}, weight_sum=total)

    def counted(self, weight_sum: float | Tensor) -> Moments:
        """The same averages, counting `weight_sum` in sums with others; tasks are balanced this way."""
        return replace(
            self,
            weight_sum=torch.as_tensor(
                weight_sum, dtype=self.weight_sum.dtype, device=self.weight_sum.device
            ),
        )

    def outputs(self, start: int, stop: int) -> Moments:
        """Moments of outputs [start, stop) alone, for sites that read the same rows."""
        return replace(
            self,
            output_cross=self.output_cross[start:stop],
            mean_target=self.mean_target[start:stop],
            target_energy=None if self.target_energy is None else self.target_energy[start:stop],
        )

    def misfit(self, weight: Tensor) -> Tensor:
        """weight_sum * E (weight x - y)^2 by output, [o], from the moments alone; `weight` is [o, k]."""
        assert self.target_energy is not None
        quadratic = ((weight @ self.gram) * weight).sum(dim=1)
        mixed = (weight * self.output_cross).sum(dim=1)
        return self.weight_sum * (quadratic - 2 * mixed + self.target_energy)


_AVERAGES = ("gram", "output_cross", "mean_in", "mean_target", "target_energy")
