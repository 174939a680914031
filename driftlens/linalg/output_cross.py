"""Moments of outputs W t with inputs x, by the cheaper of two ways."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlens.errors import ShapeError
from driftlens.linalg.gram import GramSum
from driftlens.linalg.sums import grown


class OutputCross:
    """Growing sums over rows of (W t) x' and, if asked for, of (W t)^2, for target inputs t and actual inputs x.

    With T rows, O outputs and k inputs, computing the output of every row costs T O k operations and its product with
    the input T O k more; E[t x'] alone costs T k^2, and O k^2 once at the end. Energies come for free in the first
    way and cost (T + O) k^2 / 2 more in the second. Products are taken in the dtype of the rows, sums in `dtype`.

    Args:
        weight: W, [O, k].
        num_rows: about how many rows there will be.
        dtype: of the sums.
        energies: whether (W t)^2 is wanted.
    """

    def __init__(self, weight: Tensor, num_rows: int, dtype: torch.dtype, *, energies: bool) -> None:
        outputs, k = weight.shape
        self._weight = weight
        self._dtype = dtype
        self._energies = energies
        self._cross: Tensor | None = None
        self._energy: Tensor | None = None
        by_rows = 2 * num_rows * outputs * k
        by_inputs = num_rows * k**2 + outputs * k**2
        if energies:
            by_inputs += (num_rows + outputs) * k**2 // 2
        self._is_by_rows = by_rows <= by_inputs
        self._targets = GramSum(k, dtype, weight.device) if energies and not self._is_by_rows else None

    def add(self, rows: Tensor, targets: Tensor) -> None:
        """Add rows x and t, both [T, k].

        Raises:
            ShapeError: they are not of that shape.
        """
        if rows.shape != targets.shape or rows.dim() != 2 or rows.shape[1] != self._weight.shape[1]:
            raise ShapeError(
                f"want rows and targets [T, {self._weight.shape[1]}], "
                f"got {list(rows.shape)} and {list(targets.shape)}"
            )
        if not self._is_by_rows:
            self._cross = grown(self._cross, targets.mT @ rows, self._dtype)
            if self._targets is not None:
                self._targets.add_rows(targets)
            return
        outputs = targets @ self._weight.mT
        self._cross = grown(self._cross, outputs.mT @ rows, self._dtype)
        if self._energies:
            self._energy = grown(self._energy, outputs.square().sum(dim=0), self._dtype)

    def sums(self) -> tuple[Tensor, Tensor | None]:
        """Sum of (W t) x', [O, k], and of (W t)^2, [O], or None where it wasn't asked for."""
        assert self._cross is not None
        if self._is_by_rows:
            return self._cross, self._energy
        weight, energy = self._weight, None
        if self._targets is not None:
            energy = self._targets.quadratic(weight)
        return weight @ self._cross.to(weight), energy
