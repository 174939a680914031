"""Sums of X'X, of which only the half below the diagonal is computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from driftlens.errors import ShapeError

_NARROW = 128  # rows or columns per product: the least that keeps a matrix library busy


class GramSum:
    """A growing sum of rows' outer products, [k, k], lower triangle only.

    Products are taken in the dtype of the rows, sums in `dtype`: float32 products of some thousand rows are good to
    about 1e-6, and summing many of them in float64 loses nothing more.

    Args:
        k: width of the rows.
        dtype: of the sum.
        device: of rows and sum.
    """

    def __init__(self, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        # Empty until the first product, which overwrites it: touching this much memory once is what costs.
        self._lower = torch.empty(k, k, dtype=dtype, device=device)
        self._is_empty = True

    def add_rows(self, rows: Tensor) -> None:
        """Add rows' outer products, rows' rows; `rows` is [T, k].

        Raises:
            ShapeError: `rows` has another width.
        """
        if rows.dim() != 2 or rows.shape[1] != len(self._lower):
            raise ShapeError(f"want rows [T, {len(self._lower)}], got {list(rows.shape)}")
        for part in self._panels():
            self._put(part, rows[:, part[0]].mT @ rows[:, part[1]], 1.0)
        self._is_empty = False

    def add(self, other: GramSum, scale: float) -> None:
        """Add another sum, multiplied by `scale`."""
        for part in self._panels():
            self._put(part, other._lower[part], scale)
        self._is_empty = False

    def norm(self) -> Tensor:
        """Frobenius norm of the whole symmetric sum, a number in float64."""
        energies = [self._energy(part) for part in self._panels()]
        return torch.stack(energies).sum().sqrt()

    def quadratic(self, vectors: Tensor) -> Tensor:
        """v' S v of this sum S for every row v of `vectors`, [o, k], in their dtype: [o]. Half of S is read."""
        found = vectors.new_zeros(len(vectors))
        for start in range(0, len(self._lower), _NARROW):
            mine = slice(start, start + _NARROW)
            below = self._lower[start:, mine].to(vectors, copy=True)
            # Halved on the diagonal, the lower triangle and its mirror image add up to S.
            below[: below.shape[1]].tril_().diagonal().mul_(0.5)
            found += torch.linalg.vecdot(vectors[:, start:] @ below, vectors[:, mine])
        return 2 * found

    def clear(self) -> None:
        """Start again at zero, in the same memory."""
        self._is_empty = True

    def full(self) -> Tensor:
        """The symmetric sum with both halves, [k, k], in the memory of this sum."""
        for rows, columns in self._panels():
            inner = slice(rows.start, rows.stop)
            square = self._lower[inner, inner]
            square.copy_(square.tril() + square.tril(-1).mT)
            self._lower[columns.start : inner.start, inner] = self._lower[inner, : inner.start].mT
        return self._lower

    def _put(self, part: tuple[slice, slice], product: Tensor, scale: float) -> None:
        if self._is_empty:
            self._lower[part] = product if scale == 1 else product.to(self._lower.dtype) * scale
        else:
            self._lower[part].add_(product, alpha=scale)

    def _energy(self, part: tuple[slice, slice]) -> Tensor:
        rows, _ = part
        panel = self._lower[part]
        # A float32 sum of this many squares would be too small in the fourth digit.
        whole = torch.linalg.vector_norm(panel, dtype=torch.float64).square()
        square = torch.linalg.vector_norm(panel[:, rows.start :], dtype=torch.float64).square()
        return 2 * whole - square

    def _panels(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each panel: [i, j) times [0, j)."""
        k = len(self._lower)
        rows = max(_NARROW, k // 8)  # narrow panels waste little above the diagonal, wide ones run faster
        for start in range(0, k, rows):
            stop = min(start + rows, k)
            yield slice(start, stop), slice(0, stop)
