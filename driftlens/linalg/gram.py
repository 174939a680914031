"""Running sums of solves: Gram matrices by tiles, and products of target outputs with inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from driftlens.utils.devices import convert_moments_oom, moments_device, to_float64

_LEAF = 128  # rows or columns per product; smaller ones run slower
_ENTRIES = 2**18  # entries converted at a time, about the cache of a core
_LINE = 16  # numbers in a cache line, in float32
_Tile = tuple[slice, slice]


def add_scaled(total: Tensor, part: Tensor, scale: float | Tensor = 1.0) -> None:
    """Add `scale * part` to `total` in place.

    A mixed sum converts some rows of `part` at a time: a converted copy of a large matrix takes ten times longer.

    Args:
        total: the sum.
        part: of the same shape, possibly of a narrower dtype.
        scale: a number, or a tensor [], which is not read, so that nothing synchronizes with the device.
    """
    # Sums may be on the host if the device has no float64.
    part = part.to(total.device)
    rows = max(1, _ENTRIES // max(1, total[0].numel()))
    for start in range(0, len(total), rows):
        own_rows = total[start : start + rows]
        _add_scaled_in_place(own_rows, part[start : start + rows], scale)


def _add_scaled_in_place(total: Tensor, part: Tensor, scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        total.addcmul_(part, scale)
    else:
        total.add_(part, alpha=scale)


def add_to_running_sum(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total + part` in `dtype`; the first part is returned in its own dtype."""
    if total is None:
        return part
    # One part needs no float64, which takes twice the memory.
    if total.dtype != dtype:
        total = total.to(moments_device(dtype, total.device), dtype)
    add_scaled(total, part)
    return total


def half_to_float(rows: Tensor) -> Tensor:
    """Convert float16 and bfloat16 rows to float32, as products are rounded to the dtype of their factors."""
    return rows.float() if rows.dtype.itemsize < torch.float32.itemsize else rows


class GramSum:
    """A running Gram matrix X'X over rows, [k, k], of which only the lower triangle is computed.

    Products are computed in the dtype of the rows, at least in float32, sums in `dtype`: products of some thousand rows
    are accurate to about 1e-6, and summing them in float64 loses nothing more. The sum is on the rows' `device`, unless
    that has no such dtype or no room: then products are copied to the host, tile by tile.
    """

    def __init__(self, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k, self.dtype, self.device = k, dtype, moments_device(dtype, device)
        # Uninitialized until the first product overwrites it: touching this much memory twice is slow.
        with convert_moments_oom():
            self._lower = torch.empty(k, k, dtype=dtype, device=self.device)
        self._is_empty = True
        # The recursion is computed once, as every batch visits all tiles.
        self._tiles = list(_lower_triangle_tiles(0, k))

    def add_rows(self, rows: Tensor) -> None:
        """Add the Gram matrix X'X of rows X, [T, k]."""
        rows = half_to_float(rows)
        for tile in self._tiles:
            self._accumulate_tile(tile, rows[:, tile[0]].mT @ rows[:, tile[1]], 1.0)
        self._is_empty = False

    def add(self, other: GramSum, scale: float | Tensor) -> None:
        """Add another Gram sum, multiplied by `scale`, a number or a tensor []."""
        if other._is_empty:
            return
        for tile in self._tiles:
            self._accumulate_tile(tile, other._lower[tile], scale)
        self._is_empty = False

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the symmetric Gram matrix, in float64."""
        # Row by row: a float32 sum of all squares would be too small in the fourth digit.
        energies = [
            (1 if rows == columns else 2)
            * to_float64(torch.linalg.vector_norm(self._lower[rows, columns], dim=1)).square().sum()
            for rows, columns in self._tiles
        ]
        return torch.stack(energies).sum().sqrt()

    def quadratic_forms(self, vectors: Tensor) -> Tensor:
        """Return the quadratic form v' S v of this sum S for every row v of `vectors`, [o, k], as [o]."""
        forms = vectors.new_zeros(len(vectors))
        for rows, columns in self._tiles:
            # Tile by tile, without the upper half in memory.
            products = vectors[:, rows] @ self._lower[rows, columns].to(vectors)
            forms.add_(torch.linalg.vecdot(products, vectors[:, columns]), alpha=1 if rows == columns else 2)
        return forms

    def clear(self) -> None:
        """Reset the sum to zero, in the same memory."""
        self._is_empty = True

    def full_matrix(self) -> Tensor:
        """Return the Gram matrix with both triangles, [k, k], in the memory of this sum."""
        for rows, columns in self._tiles:
            tile = self._lower[rows, columns]
            if rows == columns:  # a product's two halves may differ in their last bits
                tile.copy_(tile.tril() + tile.tril(-1).mT)
            else:
                self._lower[columns, rows] = tile.mT
        return self._lower

    def _accumulate_tile(self, tile: _Tile, product: Tensor, scale: float | Tensor) -> None:
        product = product.to(self._lower.device)
        if self._is_empty:
            is_one = not isinstance(scale, Tensor) and scale == 1
            self._lower[tile] = product if is_one else product.to(self.dtype) * scale
        else:
            _add_scaled_in_place(self._lower[tile], product, scale)


def _lower_triangle_tiles(start: int, stop: int) -> Iterator[_Tile]:
    """Yield tiles that cover the lower triangle: squares on the diagonal, rectangles below it.

    Repeated halving keeps products nearly square, which run fastest.
    """
    if stop - start <= _LEAF:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    yield slice(middle, stop), slice(start, middle)
    yield from _lower_triangle_tiles(start, middle)
    yield from _lower_triangle_tiles(middle, stop)


class TargetOutputSums(NamedTuple):
    """Sums over rows of target outputs W t: times the inputs, [O, k], alone, [O], and squared, [O]."""

    cross: Tensor
    target: Tensor
    energy: Tensor | None


class CrossMomentSum:
    """Running cross moments of target outputs with inputs, computed by the cheaper of two ways.

    W is an expert's weight and b its bias, x the merged model's input of the site and u the expert's, and the target
    output is W t of t = alpha * u + (1 - alpha) * x (FeatCal, arXiv:2605.13030, Eq. 10). The expert's outputs y = W u
    + b are known. With T rows, W x of every row costs T O k operations and the product of W t with the input T O k
    more; the sum of t x' alone costs T k^2, and the product with W O k^2 once at the end.

    The second way sums C = t x' and multiplies by W at the end. For each row w of W, with G the sum of x x',

        sum (w t)^2 = alpha^2 sum (y - b)^2 + (1 - alpha) (2 w' C w - (1 - alpha) w' G w),

    where w' C is needed anyway.

    Args:
        weight: W, [O, k].
        bias: b, [O].
        alpha: share of the expert in the target.
        num_rows: approximate number of rows.
        dtype: the dtype of the sums.
        energies: True to sum (W t)^2.
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
        # Multiplications of each way; the cheaper one depends on rows, inputs and outputs.
        through_inputs = num_rows * k**2 + outputs * k**2 + (outputs * k**2 // 2 if energies else 0)
        self.row_by_row = 2 * num_rows * outputs * k <= through_inputs
        self._weight = half_to_float(weight)
        self._bias = half_to_float(bias)
        self._alpha = alpha
        self._dtype = dtype
        self._energies = energies
        self._sums: TargetOutputSums | None = None

    def add(
        self,
        rows: Tensor,
        expert_rows: Tensor,
        expert_outputs: Sequence[Tensor],
        weights: Tensor | None,
    ) -> None:
        """Add rows to the cross moments.

        Args:
            rows: inputs x of the merged model, [T, k].
            expert_rows: inputs u of the expert, [T, k].
            expert_outputs: outputs y of the expert, [T, o] for each site whose weight is stacked in W.
            weights: weights of the rows, [T]; None weighs each 1.
        """
        of_these = self._sums_from_outputs if self.row_by_row else self._sums_from_inputs
        outputs_of_sites = [*map(half_to_float, expert_outputs)]
        more = of_these(
            half_to_float(rows),
            half_to_float(expert_rows),
            outputs_of_sites,
            None if weights is None else half_to_float(weights),
        )
        if self._sums is not None:
            held = self._sums
            more = TargetOutputSums(
                add_to_running_sum(held.cross, more.cross, self._dtype),
                add_to_running_sum(held.target, more.target, self._dtype),
                None if more.energy is None else add_to_running_sum(held.energy, more.energy, self._dtype),
            )
        self._sums = more

    def _sums_from_outputs(
        self,
        rows: Tensor,
        expert_rows: Tensor,
        expert_outputs: Sequence[Tensor],
        weights: Tensor | None,
    ) -> TargetOutputSums:
        targets = rows @ self._weight.mT
        for part_target, part_expert in zip(_split_columns_like(targets, expert_outputs), expert_outputs, strict=True):
            part_target.lerp_(part_expert, self._alpha)
        # Only the expert's share of y holds its bias.
        targets.sub_(self._bias, alpha=self._alpha)
        energy = _weighted_row_sum(targets.square(), weights) if self._energies else None
        counted = targets if weights is None else targets * weights[:, None]
        return TargetOutputSums(counted.mT @ rows, counted.sum(dim=0), energy)

    def _sums_from_inputs(
        self,
        rows: Tensor,
        expert_rows: Tensor,
        expert_outputs: Sequence[Tensor],
        weights: Tensor | None,
    ) -> TargetOutputSums:
        targets = torch.lerp(rows, expert_rows, self._alpha)
        if weights is not None:
            targets *= weights[:, None]
        energy = None
        if self._energies:
            parts = zip(expert_outputs, _split_columns_like(self._bias, expert_outputs), strict=True)
            energy = torch.cat([_weighted_row_sum((outputs - bias).square_(), weights) for outputs, bias in parts])
        return TargetOutputSums(targets.mT @ rows, targets.sum(dim=0), energy)

    def sums(self, gram: GramSum) -> TargetOutputSums:
        """Return the cross moments; `gram` is the Gram sum of the inputs over the same rows."""
        assert self._sums is not None
        if self.row_by_row:
            return self._sums
        cross, target, energy = self._sums
        weight, rest = self._weight, 1 - self._alpha
        output_cross = weight @ cross.to(weight)
        if energy is not None:
            forms = 2 * torch.linalg.vecdot(output_cross, weight) - rest * gram.quadratic_forms(weight)
            energy = self._alpha**2 * energy + rest * forms.to(energy.device)
        return TargetOutputSums(output_cross, weight @ target.to(weight), energy)


def _split_columns_like(stacked: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the last axis into parts as wide as the last axes of `like`."""
    return torch.split(stacked, [part.shape[-1] for part in like], dim=-1)


def _weighted_row_sum(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.sum(dim=0) if weights is None else weights @ rows


@dataclass
class ResidualMoments:
    """Weighted moments of residual calibration: Gram matrix, local and upstream cross moments, energy.

    Attributes:
        gram: A, of x~ x~', [k, k].
        local: C0, of (y0 - W_m x - b_m) x~', [o, k].
        upstream: Cd, of (y1 - y0) x~', [o, k].
        energy: of |y1 - W_m x - b_m|^2, [].
    """

    gram: Tensor
    local: Tensor
    upstream: Tensor
    energy: Tensor

    def add(self, other: ResidualMoments) -> None:
        """Add other moments in place, of this dtype or a narrower one."""
        for name, value in vars(other).items():
            total = getattr(self, name)
            total.add_(value.to(total.device))

    def in_basis(self, basis: Tensor) -> ResidualMoments:
        """Return the moments with the inputs projected onto an orthonormal basis, [k, r]."""
        return ResidualMoments(basis.mT @ self.gram @ basis, self.local @ basis, self.upstream @ basis, self.energy)


class ResidualSums:
    """Running sums of `ResidualMoments`, in the memory and the dtype of a Gram sum."""

    @convert_moments_oom()
    def __init__(self, gram: GramSum, outputs: int) -> None:
        self.gram = gram
        # Rows of whole cache lines: products with rows of other widths take up to twice as long.
        width = -(-gram.k // _LINE) * _LINE
        self._cross = torch.zeros(2 * outputs, width, dtype=gram.dtype, device=gram.device)[:, : gram.k]
        self._energy = self._cross.new_zeros(())

    def clear(self) -> None:
        """Reset the sums to zero, in the same memory."""
        self.gram.clear()
        self._cross.zero_()
        self._energy.zero_()

    def add(self, x: Tensor, targets: Tensor) -> None:
        """Add rows x [T, k] with local and upstream targets side by side, [T, 2 o]."""
        x, targets = half_to_float(x), half_to_float(targets)
        self.gram.add_rows(x)
        if self._cross.device == x.device:
            self._cross.addmm_(targets.mT, x)
        else:
            add_scaled(self._cross, targets.mT @ x)
        local, upstream = targets.chunk(2, dim=1)
        self._energy += (local + upstream).square().sum().to(self._energy.device)

    def join(self, other: ResidualSums) -> None:
        """Add the sums of other rows."""
        self.gram.add(other.gram, 1.0)
        add_scaled(self._cross, other._cross)
        self._energy += other._energy.to(self._energy.device)

    def moments(self, scale: float) -> ResidualMoments:
        """Return the sums multiplied by `scale` as moments, in place."""
        # In place: these are the largest tensors of a calibration.
        sums = self.gram.full_matrix(), *self._cross.chunk(2), self._energy
        return ResidualMoments(*(value.mul_(scale) for value in sums))


def solve_bytes(outputs: int, inputs: int) -> int:
    """Return the approximate memory of the sums and the solve of a linear module in float64, in bytes."""
    return 8 * (3 * inputs**2 + 2 * outputs * inputs)
