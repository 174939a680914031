"""Moments of the outputs that sites should give with the inputs they have, by the cheaper of two ways.

W is an expert's weight [O, k] and b its bias, x the input that the merged model feeds the site, u the one that the
expert feeds it, and wanted is W t of t = alpha * u + (1 - alpha) * x (FeatCal, arXiv:2605.13030, Eq. 10). The expert's
outputs y = W u + b are known, since it has run.

With T rows, W x of every row costs T O k operations and the product of W t with the input T O k more; the sum of t x'
alone costs T k^2, and O k^2 once at the end. Energies come for free in the first way and cost O k^2 / 2 in the second.
Products are taken in the dtype of the rows, at least in float32, sums in a dtype of choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from driftlens.base.errors import ShapeError
from driftlens.linalg.gram import GramSum, grown, single


class OutputSums(NamedTuple):
    """Sums over rows: of (W t) x', [O, k], of W t, [O], and of (W t)^2, [O], or None where nobody asked for it."""

    cross: Tensor
    target: Tensor
    energy: Tensor | None


class OutputCross:
    """Growing sums of wanted outputs with inputs, in the way that takes fewer operations.

    Through the inputs that is C, the sum of t x', and W once at the end. For the energies the expert's outputs make up
    for a Gram matrix of t: row by row w of W, with G the sum of x x',

        sum (w t)^2 = alpha^2 sum (y - b)^2 + (1 - alpha) w' (C + C' - (1 - alpha) G) w.

    Args:
        weight: W, [O, k].
        bias: b, [O].
        alpha: share of the expert in what is wanted.
        num_rows: about how many rows there will be.
        dtype: of the sums.
        energies: whether (W t)^2 is wanted.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        *,
        alpha: float,
        num_rows: int,
        dtype: torch.dtype,
        energies: bool,
    ) -> None:
        outputs, k = weight.shape
        through_inputs = num_rows * k**2 + outputs * k**2 + (outputs * k**2 // 2 if energies else 0)
        self.row_by_row = 2 * num_rows * outputs * k <= through_inputs
        self._weight = single(weight)
        self._bias = single(bias)
        self._alpha = alpha
        self._dtype = dtype
        self._energies = energies
        self._sums: OutputSums | None = None

    def add(
        self, rows: Tensor, expert_rows: Tensor, expert_outputs: Sequence[Tensor], weights: Tensor | None
    ) -> None:
        """Add rows x, [T, k], with the expert's own u, [T, k].

        `expert_outputs` are y, [T, o] of each site whose weight is stacked in W; `weights` [T] say how much each row
        counts, None counts each 1.
        """
        outputs, k = self._weight.shape
        counted = rows.shape[:1] if weights is None else weights.shape
        width = sum(part.shape[-1] for part in expert_outputs)
        if (
            rows.shape != expert_rows.shape
            or rows.shape[1:] != (k,)
            or width != outputs
            or any(len(part) != len(rows) for part in expert_outputs)
            or counted != rows.shape[:1]
        ):
            raise ShapeError(
                f"want inputs [T, {k}] of both models, outputs [T, {outputs}] in all and weights [T], got "
                f"{list(rows.shape)}, {list(expert_rows.shape)}, {[list(part.shape) for part in expert_outputs]} "
                f"and {list(counted)}"
            )
        of_these = self._of_outputs if self.row_by_row else self._of_inputs
        outputs_of_sites = [*map(single, expert_outputs)]
        more = of_these(
            single(rows), single(expert_rows), outputs_of_sites, None if weights is None else single(weights)
        )
        if self._sums is not None:
            held = self._sums
            more = OutputSums(
                grown(held.cross, more.cross, self._dtype),
                grown(held.target, more.target, self._dtype),
                None if more.energy is None else grown(held.energy, more.energy, self._dtype),
            )
        self._sums = more

    def _of_outputs(
        self, rows: Tensor, expert_rows: Tensor, expert_outputs: Sequence[Tensor], weights: Tensor | None
    ) -> OutputSums:
        wanted = rows @ self._weight.mT
        for part_wanted, part_expert in zip(_split(wanted, expert_outputs), expert_outputs, strict=True):
            part_wanted.lerp_(part_expert, self._alpha)
        wanted.sub_(self._bias, alpha=self._alpha)
        energy = _total(wanted.square(), weights) if self._energies else None
        counted = wanted if weights is None else wanted * weights[:, None]
        return OutputSums(counted.mT @ rows, counted.sum(dim=0), energy)

    def _of_inputs(
        self, rows: Tensor, expert_rows: Tensor, expert_outputs: Sequence[Tensor], weights: Tensor | None
    ) -> OutputSums:
        targets = torch.lerp(rows, expert_rows, self._alpha)
        if weights is not None:
            targets *= weights[:, None]
        energy = None
        if self._energies:
            parts = zip(expert_outputs, _split(self._bias, expert_outputs), strict=True)
            energy = torch.cat([_total((outputs - bias).square_(), weights) for outputs, bias in parts])
        return OutputSums(targets.mT @ rows, targets.sum(dim=0), energy)

    def sums(self, gram: GramSum) -> OutputSums:
        """What the rows add up to; `gram` is the sum of x x' over the same rows."""
        assert self._sums is not None
        if self.row_by_row:
            return self._sums
        cross, target, energy = self._sums
        weight, rest = self._weight, 1 - self._alpha
        cross = cross.to(weight)
        if energy is not None:
            quadratic = rest * gram.quadratic(weight, scale=-rest, more=cross)
            energy = self._alpha**2 * energy + quadratic.to(energy.device)
        return OutputSums(weight @ cross, weight @ target.to(weight), energy)


def _split(stacked: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Parts of the last axis, as wide as these."""
    return torch.split(stacked, [part.shape[-1] for part in like], dim=-1)


def _total(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.sum(dim=0) if weights is None else weights @ rows
