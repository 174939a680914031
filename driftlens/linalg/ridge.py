"""Ridge regression in closed form: Cholesky factors, linear maps with their biases, and scales and shifts of norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from driftlens.linalg.gram import ResidualMoments
from driftlens.utils.devices import (
    HOST,
    match_device_dtype,
    moments_device,
    to_factorizing_device,
    to_float64,
)
from driftlens.utils.errors import NumericsError, SingularGramError

_PANEL = 384
_NARROW = 192  # on CPUs, whose libraries solve slower than they multiply
_STEPS = 3
_STARTS = 2  # one may be orthogonal to the eigenvector
_SUSPICION = 8.0  # an estimate this close to the limit is replaced by exact eigenvalues


@dataclass(frozen=True)
class CholeskyFactor:
    """The Cholesky factor L of a symmetric positive definite matrix L L'.

    `lower` is uninitialized above the diagonal. The eigenvalues are estimates by power steps: the smallest is at least
    the true one, the largest at most.
    """

    lower: Tensor
    smallest_eigenvalue: float
    largest_eigenvalue: float

    @property
    def condition_number(self) -> float:
        """The estimated condition number; at most the true one."""
        return max(1.0, self.largest_eigenvalue / self.smallest_eigenvalue)

    def solve_rows(self, rows: Tensor) -> Tensor:
        """Solve X (L L') = rows for X, [o, k]; `rows` may be overwritten."""
        # X S = R with S symmetric means S X' = R'.
        half = _solve_triangular_rows(self.lower.mT, rows, upper=True)
        return _solve_triangular_rows(self.lower, half, upper=False)

    def energy(self, rows: Tensor) -> Tensor:
        """Return the quadratic form x' (L L') x for every row x, [o], in the dtype of `rows`, [o, k]."""
        total = rows.new_zeros(len(rows))
        for start, panel in _column_panels(self.lower):
            # |L' x|^2 panel by panel: a converted copy of all of L may not fit.
            total += (rows[:, start:] @ panel.to(rows)).square().sum(dim=1)
        return total


def cholesky_factor(matrix: Tensor, *, name: str, scale: float | Tensor = 1.0, shift: float = 0.0) -> CholeskyFactor:
    """Return the Cholesky factor of S = scale * matrix + shift * I, [k, k].

    An S whose smallest eigenvalue is at most k * machine epsilon * its largest is refused; nothing is damped instead.

    Args:
        matrix: symmetric, of which the lower triangle is read; it is not modified.
        name: the name of S in messages, for example "gram + 0.05 I".
        scale: positive.
        shift: added to the diagonal.

    Raises:
        NumericsError: an entry is NaN or infinite.
        SingularGramError: S is not positive definite to working precision; the smallest eigenvalue is in the message.
    """
    scale = float(scale)
    lower, failures = _blocked_cholesky(matrix, scale, shift)
    # All numbers are read in one copy: each read synchronizes with the device.
    powers = (
        _estimate_largest_eigenvalue(lambda v: _apply_factored_matrix(lower, v), matrix),
        _estimate_largest_eigenvalue(lambda v: _solve_with_factor(lower, v), matrix, _STARTS),
    )
    numbers = failures, torch.isfinite(matrix.sum()), *powers
    failed, is_finite, largest, inverse = torch.stack([number.to(matrix) for number in numbers]).tolist()
    if not is_finite and not bool(torch.isfinite(matrix).all()):
        raise NumericsError(
            f"{name} holds NaN or infinite entries",
            hint="Check the features and weights.",
        )
    if not failed:
        # Inverse power steps estimate the largest eigenvalue of the inverse.
        smallest = 1 / inverse
        if smallest > _SUSPICION * _singularity_threshold(matrix, largest):
            return CholeskyFactor(lower, smallest, largest)
    # Only in doubt, as eigenvalues cost far more than the factor.
    eigenvalues = scale * torch.linalg.eigvalsh(matrix) + shift
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if not failed and smallest > _singularity_threshold(matrix, largest):
        return CholeskyFactor(lower, smallest, largest)
    raise SingularGramError(
        f"{name} is singular to working precision: smallest eigenvalue {smallest:.2e}, largest {largest:.2e}",
        hint="Raise `lam`, which needs an anchor, or use more samples than the site has inputs.",
        smallest_eigenvalue=smallest,
        largest_eigenvalue=largest,
    )


def stationarity_error(solution: Tensor, image: Tensor, right: Tensor) -> float:
    """Return the relative residual of a solution X of X S = R along v: image is S v [k], right R v [o]."""
    gradient = solution @ image
    size = float(torch.linalg.vector_norm(gradient) + torch.linalg.vector_norm(right))
    return float(torch.linalg.vector_norm(gradient - right)) / size if size else 0.0


def random_direction(like: Tensor) -> Tensor:
    """Return a fixed random direction v, [k], the same for every system of k unknowns."""
    # Fixed, so that reports of equal runs are equal.
    generator = torch.Generator().manual_seed(1)
    return match_device_dtype(like, torch.randn(len(like), generator=generator, dtype=torch.float64))


def _blocked_cholesky(matrix: Tensor, scale: float, shift: float) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor L, and True if the matrix is not positive definite."""
    # Panels of columns: torch.linalg.cholesky takes half as long again, to copy and to write zeros.
    lower = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    failures = []
    panel = _NARROW if matrix.is_cpu else _PANEL
    for start in range(0, len(matrix), panel):
        stop = min(start + panel, len(matrix))
        own_columns = slice(start, stop)
        left = lower[:, :start]
        column = torch.addmm(matrix[start:, own_columns], left[start:], left[own_columns].mT, beta=scale, alpha=-1)
        column.diagonal().add_(shift)
        top, failed_minor = torch.linalg.cholesky_ex(column[: stop - start])
        failures.append(failed_minor)
        lower[own_columns, own_columns] = top
        lower[stop:, own_columns] = _solve_triangular_rows(top.mT, column[stop - start :], upper=True)
    return lower, torch.stack(failures).any()


def _column_panels(lower: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield panels of columns of the Cholesky factor L, from the diagonal downwards, with their start."""
    # Not wider than the panels of the factorisation: memory above the diagonal is uninitialized.
    for start in range(0, len(lower), _NARROW):
        yield start, lower[start:, start : start + _NARROW]


def _apply_factored_matrix(lower: Tensor, vector: Tensor) -> Tensor:
    """Return L L' v, [k, 1], without reading above the diagonal."""
    product = torch.zeros_like(vector)
    for start, panel in _column_panels(lower):
        product[start:] += panel @ (panel.mT @ vector[start:])
    return product


def _solve_triangular_rows(triangle: Tensor, rows: Tensor, *, upper: bool) -> Tensor:
    """Solve X T = rows for X; the solution overwrites `rows` unless gradients are required."""
    out = None if rows.requires_grad or triangle.requires_grad else rows
    return torch.linalg.solve_triangular(triangle, rows, upper=upper, left=False, out=out)


def _solve_with_factor(lower: Tensor, right: Tensor) -> Tensor:
    # For one right-hand side, thirty times faster than cholesky_solve, which copies the factor first.
    half = torch.linalg.solve_triangular(lower, right, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def _singularity_threshold(matrix: Tensor, largest: float) -> float:
    return len(matrix) * torch.finfo(matrix.dtype).eps * largest


def _estimate_largest_eigenvalue(multiply: Callable[[Tensor], Tensor], matrix: Tensor, starts: int = 1) -> Tensor:
    """Estimate the largest eigenvalue of a positive operator from below by power iteration."""
    generator = torch.Generator().manual_seed(0)
    vectors = match_device_dtype(matrix, torch.randn(len(matrix), starts, generator=generator, dtype=torch.float64))
    for _ in range(_STEPS):
        vectors = multiply(vectors / torch.linalg.vector_norm(vectors, dim=0))
    return torch.linalg.vector_norm(vectors, dim=0).max()


@dataclass(frozen=True)
class LinearMoments:
    """Weighted mean moments of inputs x, k wide, and bias-free target outputs y, o wide, of a linear map.

    Attributes:
        gram: E[x x'], [k, k], symmetric; G of FeatCal (arXiv:2605.13030), Eq. 13.
        output_cross: E[y x'], [o, k]; W_i C_i there, when y = W_i x_target.
        mean_in: E[x], [k].
        mean_target: E[y], [o].
        target_energy: E[y * y], [o]; None if not computed.
        weight_sum: the sum of the weights of all rows.
    """

    gram: Tensor
    output_cross: Tensor
    mean_in: Tensor
    mean_target: Tensor
    target_energy: Tensor | None
    weight_sum: Tensor

    def select_outputs(self, rows: slice) -> LinearMoments:
        """Return the moments of some of the outputs."""
        energy = None if self.target_energy is None else self.target_energy[rows]
        cross, target = self.output_cross[rows], self.mean_target[rows]
        return replace(self, output_cross=cross, mean_target=target, target_energy=energy)

    def misfit(self, weight: Tensor) -> Tensor:
        """Return the squared error weight_sum * E (weight x - y)^2 by output, [o]; `weight` is [o, k]."""
        assert self.target_energy is not None
        quadratic_forms = ((weight @ self.gram) * weight).sum(dim=1)
        mixed = (weight * self.output_cross).sum(dim=1)
        return self.weight_sum * (quadratic_forms - 2 * mixed + self.target_energy)


def ridge_factor(gram: Tensor, lam: float, *, scale: float | Tensor = 1.0) -> CholeskyFactor:
    """Return the Cholesky factor of scale * gram + lam * I.

    The authors of FeatCal also add their eps to the diagonal; it is left out here, so that Eq. 16 holds exactly.
    """
    return cholesky_factor(gram, name=f"gram + {lam:g} I" if lam else "gram", scale=scale, shift=lam)


def solve_bias(
    target: Tensor, output: Tensor, weight_sum: float | Tensor, anchor: Tensor | None, *, lam: float
) -> Tensor:
    """Solve for the bias with the weight fixed, pulled towards `anchor`.

    It minimises sum_i omega_i |W mu_i + b - t_i|^2 + lam * |b - anchor|^2, so it is

        (sum_i omega_i (t_i - W mu_i) + lam * anchor) / (sum_i omega_i + lam).

    Source: FeatCal (arXiv:2605.13030), Eq. 55. The sum of the task weights has the unit 1 / features^2 and lambda has
    none, so with large features the anchor determines the bias.

    Args:
        target: mean target output t with its bias, averaged over tasks with weights omega, [o].
        output: mean output W mu without bias, averaged likewise, [o].
        weight_sum: the sum of the task weights omega.
        anchor: [o]; None drops both terms with `lam`.
        lam: lambda >= 0.
    """
    missing = weight_sum * (target - output)
    return missing / weight_sum if anchor is None else (missing + lam * anchor) / (weight_sum + lam)


@dataclass(frozen=True)
class _RidgeSolution:
    """The ridge solution W, [o, k], of weight_sum * E |W x - y|^2 + lam * |W - anchor|_F^2.

    `objective` is by output, [o], or None if the moments lack the energy of y.
    """

    weight: Tensor
    factor: CholeskyFactor
    objective: Tensor | None

    def objective_increase(self, other: Tensor) -> Tensor:
        """Return by output how much larger the objective is at another weight, tr(D H D') with D the difference."""
        return self.factor.energy((other - self.weight).to(other.dtype))


def solve_ridge(
    moments: LinearMoments, anchor: Tensor | None, *, lam: float, factor: CholeskyFactor | None = None
) -> _RidgeSolution:
    """Solve for the weight that fits the target outputs best, pulled towards `anchor`.

    Minimises over W, with all tasks already summed into the moments,

        weight_sum * E |W x - y|^2 + lam * |W - anchor|_F^2,

    where x is the *merged* model's input of this site and y its target output. With G = weight_sum * E[x x'] and R =
    weight_sum * E[y x'], the minimiser is (R + lam * anchor) (G + lam * I)^-1.
    Source: FeatCal (arXiv:2605.13030), Eq. 17.

    Args:
        moments: of one site, or of several stacked ones. Use float64: at lam = 1e-5 float32 is accurate to 1e-3 only.
        anchor: [o, k], in the unit of the weight; None drops both terms with `lam`.
        lam: lambda >= 0, relative to a Gram matrix of Frobenius norm 1.
        factor: `ridge_factor(gram, lam, scale=weight_sum)` (lam 0 without an anchor), if known already.
    """
    cross = moments.output_cross * moments.weight_sum
    if factor is None:
        factor = ridge_factor(moments.gram, 0.0 if anchor is None else lam, scale=moments.weight_sum)
    weight = factor.solve_rows(cross.clone() if anchor is None else torch.add(cross, anchor, alpha=lam))
    if moments.target_energy is None:
        return _RidgeSolution(weight, factor, None)
    # At the solution W G = R, so the quadratic_forms form needs no product with G.
    objective = moments.weight_sum * moments.target_energy - torch.linalg.vecdot(cross, weight)
    if anchor is not None:
        objective = objective + lam * torch.linalg.vecdot(anchor, anchor - weight)
    return _RidgeSolution(weight, factor, objective)


@dataclass(frozen=True)
class NormMoments:
    """Weighted mean moments of normalised rows z and target outputs y, per coordinate, [k].

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
    def from_affine(
        cls, mean: Tensor, second: Tensor, scale: Tensor, shift: Tensor | None, weight_sum: Tensor
    ) -> NormMoments:
        """Return moments with target output y = scale * z + shift, from the means E[z] and E[z * z]."""
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
        """Return the squared error weight_sum * E |scale z + shift - y|^2, a number, from the moments."""
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
    """Solve for the scale and shift closest to the experts', on the merged model's normalised features.

    Minimises over gamma and beta, coordinate by coordinate and with weight 1 for every task,

        sum_i E (gamma z + beta - gamma_i z - beta_i)^2 + lam (gamma - anchor)^2 + lam (beta - anchor)^2,

    whose normal equations are two by two. Source: FeatCal (arXiv:2605.13030), Eq. 57-59.

    It is computed as a step from the merged model's parameters: if a coordinate hardly varies and `lam` is tiny, the
    determinant is mostly rounding, which then changes the length of the step only. The authors' code clamps the
    determinant instead, which can end above the objective it started from.

    Args:
        moments: of all tasks together, so that `weight_sum` is their number.
        scale: of the merged model, [k].
        shift: of the merged model, [k].
        anchor_scale: [k]; None drops the terms with `lam`.
        anchor_shift: [k]; None drops the terms with `lam`.
        lam: lambda >= 0.

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
    _require_nonsingular(determinant / (a11 + a22), 2 * torch.finfo(a11.dtype).eps * (a11 + a22))
    return (
        scale + (a22 * scale_side - a12 * shift_side) / determinant,
        shift + (a11 * shift_side - a12 * scale_side) / determinant,
    )


def solve_rms_norm(moments: NormMoments, anchor_scale: Tensor | None, *, lam: float) -> Tensor:
    """Solve for the scale closest to the experts' in a norm without shift, on the merged model's normalised features.

    The paper calibrates no RMSNorm; this is its LayerNorm update without a shift. Per coordinate,

        sum_i E (gamma z - gamma_i z)^2 + lam (gamma - anchor)^2
            = sum_i q_i (gamma - gamma_i)^2 + lam (gamma - anchor)^2,     q_i = E[z^2] on task i,

    is minimal at (sum_i q_i gamma_i + lam anchor) / (sum_i q_i + lam), an average of the experts' scales.

    Args:
        moments: of all tasks together, so that `weight_sum` is their number; z = x / rms(x).
        anchor_scale: [k]; None drops the terms with `lam`.
        lam: lambda >= 0.

    Raises:
        SingularGramError: a coordinate is zero in every task, and there is no anchor.
    """
    pulled = moments.weight_sum * moments.scale_target
    # Coordinates that no task excites have no equation of their own.
    excited = moments.weight_sum * moments.second
    if anchor_scale is not None:
        pulled, excited = pulled + lam * anchor_scale, excited + lam
    _require_nonsingular(excited, len(excited) * torch.finfo(excited.dtype).eps * excited.max())
    return pulled / excited


def _require_nonsingular(smallest: Tensor, limit: Tensor) -> None:
    """Raise if the smallest eigenvalue of a coordinate is at most the limit, both [k]; NaN passes."""
    is_singular = smallest <= limit
    if bool(is_singular.any()):
        worst = float(smallest.min())
        raise SingularGramError(
            f"the equations of {int(is_singular.sum())} of {len(smallest)} coordinates are singular to working "
            f"precision: smallest eigenvalue {worst:.2e}",
            hint="Raise `lam`, use more samples, or remove norms from `update`.",
            smallest_eigenvalue=worst,
        )


def multiply_by_pinv(gram: Tensor, rows: Tensor) -> Tensor:
    """Multiply rows [o, k] by the pseudoinverse of `gram` [k, k], both in float64.

    Eigenvalues of at most k * machine epsilon * the largest count as 0.
    """
    try:
        return cholesky_factor(gram, name="the sum of the tasks' Gram matrices").solve_rows(rows.clone())
    except SingularGramError:
        # The null space keeps no information on the maps, so it is left alone.
        values, vectors = torch.linalg.eigh(gram)
        is_kept = values > len(gram) * torch.finfo(gram.dtype).eps * values[-1].clamp_min(0)
        return (rows @ vectors[:, is_kept] / values[is_kept]) @ vectors[:, is_kept].mT


def truncated_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the SVD of a matrix [m, k] above the rounding of float32: U [m, r], s [r] and V' [r, k]."""
    # float64, so that singular values at the rounding of float32 are accurate.
    left, values, right = torch.linalg.svd(to_factorizing_device(to_float64(matrix)), full_matrices=False)
    rank = int((values > max(matrix.shape) * torch.finfo(torch.float32).eps * values[:1]).sum())
    return left[:, :rank], values[:rank], right[:rank]


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return B [m, r] and A [r, k] in float64 whose product is the best approximation of rank r of a matrix [m, k]."""
    wide = to_factorizing_device(to_float64(matrix))
    if len(wide) > wide.shape[1]:
        down, up = low_rank_factors(wide.mT, rank)
        return up.mT, down.mT
    # The eigenvectors of the smaller Gram matrix are singular vectors, several times faster than the SVD of a matrix.
    # Their product with the matrix is exact for any orthonormal vectors, so that full rank loses nothing.
    vectors = torch.linalg.eigh(wide @ wide.mT).eigenvectors[:, -rank:]
    return vectors, vectors.mT @ wide


def polar_factor(matrix: Tensor) -> Tensor:
    """Return the polar factor of a matrix [m, k]: its nonzero singular values become 1."""
    left, _, right = truncated_svd(matrix)
    return left @ right


BIAS_INPUT = math.sqrt(1000.0)
# Values of l0 and l1: 1e-4 to 1 by half decades, and 3.
GRID = (1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1, 10**-0.5, 1.0, 3.0)
# Largest number of inputs for an exact comparison of folds; beyond it, they are projected to this many directions.
WIDEST = 256
_CG_STEPS = 5


def sum_moments(parts: Sequence[ResidualMoments], dtype: torch.dtype | None = None) -> ResidualMoments:
    """Return the sum of several moments, in `dtype` or in their own."""
    dtype = dtype or parts[0].gram.dtype
    place = moments_device(dtype, parts[0].gram.device)
    summed = ResidualMoments(**{name: value.to(place, dtype, copy=True) for name, value in vars(parts[0]).items()})
    for part in parts[1:]:
        summed.add(part)
    return summed


class RidgeChoice(NamedTuple):
    """Ridges of the local and the upstream part, share t of the upstream part, and held-out error if known."""

    local: float
    upstream: float
    share: float
    held_out: float | None = None


def choose_ridges(
    folds: Sequence[ResidualMoments],
    *,
    most: float = 1.0,
    grid: Sequence[float] = GRID,
) -> RidgeChoice:
    """Select the ridges and the upstream share by cross-validation over folds.

    Misfits are against the residual target; with `most` 0 that is the local one. One eigendecomposition per fold
    serves the whole grid. With more than `WIDEST` inputs, maps are compared in the span of a random sketch of the
    Gram matrix; that affects the choice only, not the solve.

    Args:
        folds: moments of every fold.
        most: the largest share of upstream repair.
        grid: candidate ridges, ascending.
    """
    for fold in folds:
        _require_finite_moments(fold)
    if len(folds[0].gram) > WIDEST:
        # A sketch: eigendecompositions of wide layers for every fold would dominate the run.
        basis = _leading_subspace_basis(sum((fold.gram for fold in folds[1:]), folds[0].gram), WIDEST)
        folds = [fold.in_basis(basis) for fold in folds]
    # Small matrices: on a device each step would synchronize, and some devices have no eigh.
    folds = [ResidualMoments(**{name: value.to(HOST) for name, value in vars(fold).items()}) for fold in folds]
    everything = sum_moments(folds)
    ridges = everything.gram.new_tensor(grid)
    plain = everything.gram.new_zeros(len(grid))
    square = everything.gram.new_zeros(len(grid))
    mixed = everything.gram.new_zeros(len(grid), len(grid))
    for fold in folds:
        # Sums without the fold, by subtraction: no second pass over rows.
        values, vectors = torch.linalg.eigh(everything.gram - fold.gram)
        held_out = vectors.mT @ fold.gram @ vectors
        local = (everything.local - fold.local) @ vectors
        upstream = (everything.upstream - fold.upstream) @ vectors
        target = (fold.local + fold.upstream) @ vectors
        inverse = 1 / (values.clamp_min(0)[:, None] + ridges)  # [k, grid]
        by_local, by_upstream = (inverse.mT @ (part.mT @ part * held_out) for part in (local, upstream))
        plain += (by_local * inverse.mT).sum(1) - 2 * inverse.mT @ (local * target).sum(0)
        square += (by_upstream * inverse.mT).sum(1)
        linear = inverse.mT @ (upstream * target).sum(0)
        mixed += inverse.mT @ (local.mT @ upstream * held_out) @ inverse - linear
    # The misfit is a parabola in the share, so the best one needs no grid.
    best = torch.where(square > 0, -mixed / square, 0.0).clamp(0, most)
    scores = plain[:, None] + best * (2 * mixed + best * square)
    # Flipped, so that of equal scores the largest ridges win, which change least.
    flat = int(scores.flip(0, 1).argmin())
    chosen, beside = (len(grid) - 1 - place for place in divmod(flat, len(grid)))
    return RidgeChoice(
        grid[chosen],
        grid[beside],
        float(best[chosen, beside]),
        float(everything.energy + scores[chosen, beside]),
    )


def _leading_subspace_basis(gram: Tensor, width: int) -> Tensor:
    """Return an orthonormal basis [k, width] of approximately the leading eigenvectors of a Gram matrix."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(len(gram), width, generator=generator, dtype=torch.float64).to(gram)
    for _ in range(2):
        basis = torch.linalg.qr((gram @ basis).to(HOST)).Q.to(gram)
    return basis


class _ResidualSolution(NamedTuple):
    """The change D of weight and bias, [o, k], and its stationarity error (None for an iterative solve)."""

    change: Tensor
    error: float | None


def solve_residual(
    moments: ResidualMoments,
    ridges: RidgeChoice,
    *,
    tasks: Sequence[tuple[Tensor, ResidualMoments]] = (),
    is_two_sided: bool = False,
) -> _ResidualSolution:
    """Solve for the change D of weights and biases that fits the local and the upstream targets.

    With output metrics S_i, the system is sum_i S_i D A_i + l0 D0 + l1 D1 = sum_i S_i C_i, with D = D0 + D1 and C_i =
    C0_i + t Cd_i. A few preconditioned conjugate-gradient steps start at the solution without metric. Their change
    has the ridge l1 (l0 if t is 0), as most of it is upstream repair. The preconditioner is V (A + l I)^-1, or
    two-sided S^-1 V (A + l I)^-1 with S the mean of all S_i, which must be positive definite.

    Args:
        moments: of all folds.
        ridges: the ridges and the share t.
        tasks: output metric S_i and moments of every task, whose sum is `moments`; empty without metrics.
        is_two_sided: True for the two-sided preconditioner.
    """
    _require_finite_moments(moments)
    parts = [("local", ridges.local, 1.0), ("upstream", ridges.upstream, ridges.share)]
    change, factors = torch.zeros_like(moments.local), dict[float, CholeskyFactor]()
    penalty = torch.zeros_like(change)
    direction, error = random_direction(moments.gram), 0.0
    image = moments.gram @ direction
    for part, ridge, share in parts:
        if share == 0:
            continue
        if ridge not in factors:
            factors[ridge] = cholesky_factor(moments.gram, name=f"gram + {ridge:g} I", shift=ridge)
        target: Tensor = getattr(moments, part)
        solution = factors[ridge].solve_rows(target.clone())
        change += share * solution
        if not tasks:
            error = max(error, stationarity_error(solution, image + ridge * direction, target @ direction))
        penalty += share * ridge * solution
    if not tasks:
        return _ResidualSolution(change, error)
    # One ridge for the steps, see above.
    ridge = ridges.upstream if ridges.share else ridges.local
    left = -penalty
    for metric, sums in tasks:
        target = (sums.local + ridges.share * sums.upstream).to(left)
        left += metric.to(left) @ (target - change @ sums.gram.to(left))
    outputs = None
    if is_two_sided:
        mean = sum((metric for metric, _ in tasks[1:]), tasks[0][0]) / len(tasks)
        outputs = cholesky_factor(mean.to(change), name="the mean output metric")
    return _ResidualSolution(change + _solve_conjugate_gradient(left, factors[ridge], ridge, tasks, outputs), None)


def _solve_conjugate_gradient(
    left: Tensor,
    inputs: CholeskyFactor,
    ridge: float,
    tasks: Sequence[tuple[Tensor, ResidualMoments]],
    outputs: CholeskyFactor | None,
) -> Tensor:
    """Solve sum_i S_i E A_i + l E = left for E, [o, k], approximately, by conjugate gradients from 0."""
    solution, towards, before = torch.zeros_like(left), torch.zeros_like(left), left.new_tensor(math.inf)
    for _ in range(_CG_STEPS):
        better = inputs.solve_rows(left.clone())
        if outputs is not None:
            better = outputs.solve_rows(better.mT.clone()).mT
        size = (left * better).sum()
        # The residual is zero, or rounding made the preconditioner indefinite.
        if not bool(size > 0):
            break
        towards, before = better + size / before * towards, size
        pushed = ridge * towards
        for metric, sums in tasks:
            pushed += metric.to(left) @ (towards @ sums.gram.to(left))
        step = size / (towards * pushed).sum()
        solution, left = solution + step * towards, left - step * pushed
    return solution


def _require_finite_moments(moments: ResidualMoments) -> None:
    ends = [end for value in vars(moments).values() for end in value.aminmax()]
    if not bool(torch.isfinite(torch.stack(ends)).all()):
        raise NumericsError(
            "the moments hold NaN or infinite entries",
            hint="Check the features and weights.",
        )
