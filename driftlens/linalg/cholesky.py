"""Cholesky factors that say how close to singular their matrix is, and are refused where it can't be told apart; and
closed forms that stay defined where a matrix is singular: by leaving its null space alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.utils.devices import beside, near_factors, wide
from driftlens.utils.errors import NumericsError, SingularGramError

_PANEL = 384
_NARROW = 192  # for a processor, whose matrix library solves slower than it multiplies
_STEPS = 3
_STARTS = 2  # one may lie across the direction that is looked for, and tell of another
_SUSPICION = 8.0  # an estimate this close to the limit is replaced by exact eigenvalues


@dataclass(frozen=True)
class Factor:
    """L with L L' = a symmetric positive definite matrix.

    Attributes:
        lower: L, [k, k], below and on the diagonal; what stands above it means nothing.
        smallest_eigenvalue: of the matrix, estimated by inverse-power steps on L, so at least the true one.
        largest_eigenvalue: of the matrix, estimated by power steps on L, so at most the true one.
    """

    lower: Tensor
    smallest_eigenvalue: float
    largest_eigenvalue: float

    @property
    def condition(self) -> float:
        """Largest over smallest eigenvalue, estimated; at most the true condition number."""
        return max(1.0, self.largest_eigenvalue / self.smallest_eigenvalue)

    def solve_rows(self, rows: Tensor) -> Tensor:
        """X with X (L L') = rows, [o, k], which may be overwritten; one factor serves every row."""
        # X S = R with S symmetric means S X' = R'.
        half = _solve_rows(self.lower.mT, rows, upper=True)
        return _solve_rows(self.lower, half, upper=False)

    def energy(self, rows: Tensor) -> Tensor:
        """x' (L L') x for every row x, [o], computed in the dtype of `rows`, [o, k]."""
        total = rows.new_zeros(len(rows))
        for start, panel in _panels(self.lower):
            total += (rows[:, start:] @ panel.to(rows)).square().sum(dim=1)
        return total


def factorize(matrix: Tensor, *, what: str, scale: float | Tensor = 1.0, shift: float = 0.0) -> Factor:
    """Cholesky factor of S = scale * matrix + shift * I, [k, k], of which the lower triangle is read.

    Refused is an S whose smallest eigenvalue is at most k * machine epsilon * its largest: a factorisation that
    went through is no proof of full rank. Nothing is damped, clipped or pseudo-inverted instead.

    Args:
        matrix: symmetric; it is not modified.
        what: what messages call S, for example "gram + 0.05 I".
        scale: positive.
        shift: what is added on the diagonal.

    Raises:
        NumericsError: an entry is NaN or infinite.
        SingularGramError: S is not positive definite to working precision; the smallest eigenvalue is in the message.
    """
    scale = float(scale)
    lower, failures = _lower_factor(matrix, scale, shift)
    # Read at once, as a device is waited for whenever it is; without a factor the eigenvalues mean nothing.
    powers = _power(lambda v: _square(lower, v), matrix), _power(lambda v: _solve(lower, v), matrix, _STARTS)
    numbers = failures, torch.isfinite(matrix.sum()), *powers
    failed, is_finite, largest, inverse = torch.stack([number.to(matrix) for number in numbers]).tolist()
    if not is_finite and not bool(torch.isfinite(matrix).all()):
        raise NumericsError(
            f"{what} holds NaN or infinite entries",
            hint="Look at the features and weights that it was computed from.",
        )
    if not failed:
        smallest = 1 / inverse
        if smallest > _SUSPICION * _limit(matrix, largest):
            return Factor(lower, smallest, largest)
    eigenvalues = scale * torch.linalg.eigvalsh(matrix) + shift
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if not failed and smallest > _limit(matrix, largest):
        return Factor(lower, smallest, largest)
    raise SingularGramError(
        f"{what} is singular to working precision: its smallest eigenvalue is {smallest:.2e}, its largest "
        f"{largest:.2e}",
        hint="Raise `lam` (it needs an anchor to pull towards), or calibrate on more samples than the site has input "
        "features.",
        smallest_eigenvalue=smallest,
        largest_eigenvalue=largest,
    )


def stationarity_error(solution: Tensor, image: Tensor, wanted: Tensor) -> float:
    """How far X [o, k] is from solving X S = R, as |X S v - R v| / (|X S v| + |R v|) along one direction v.

    `image` is S v, [k], of `probe(k)`, and `wanted` R v, [o].
    """
    gradient = solution @ image
    size = float(torch.linalg.vector_norm(gradient) + torch.linalg.vector_norm(wanted))
    return float(torch.linalg.vector_norm(gradient - wanted)) / size if size else 0.0


def probe(like: Tensor) -> Tensor:
    """A direction v, [k], that no system knows of: random, and the same for every system of k unknowns."""
    generator = torch.Generator().manual_seed(1)
    return beside(like, torch.randn(len(like), generator=generator, dtype=torch.float64))


def _lower_factor(matrix: Tensor, scale: float, shift: float) -> tuple[Tensor, Tensor]:
    """Return L, and whether the matrix is not positive definite."""
    # Panel by panel of columns: torch's own factorisation takes half as long again, to copy and to write zeros.
    lower = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    failures = []
    panel = _NARROW if matrix.is_cpu else _PANEL
    for start in range(0, len(matrix), panel):
        stop = min(start + panel, len(matrix))
        own_columns = slice(start, stop)
        left = lower[:, :start]
        column = torch.addmm(
            matrix[start:, own_columns], left[start:], left[own_columns].mT, beta=scale, alpha=-1
        )
        column.diagonal().add_(shift)
        top, failed_minor = torch.linalg.cholesky_ex(column[: stop - start])
        failures.append(failed_minor)
        lower[own_columns, own_columns] = top
        lower[stop:, own_columns] = _solve_rows(top.mT, column[stop - start :], upper=True)
    return lower, torch.stack(failures).any()


def _panels(lower: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield columns of L from their diagonal downwards, some at a time, and where they start."""
    # No wider than those that it was made in: above the diagonal its memory is uninitialized.
    for start in range(0, len(lower), _NARROW):
        yield start, lower[start:, start : start + _NARROW]


def _square(lower: Tensor, vector: Tensor) -> Tensor:
    """L L' v, [k, 1], of which the zeros above the diagonal aren't read."""
    product = torch.zeros_like(vector)
    for start, panel in _panels(lower):
        product[start:] += panel @ (panel.mT @ vector[start:])
    return product


def _solve_rows(triangle: Tensor, rows: Tensor, *, upper: bool) -> Tensor:
    """X with X T = rows; in the memory of `rows`, which takes half the time, unless gradients are wanted."""
    out = None if rows.requires_grad or triangle.requires_grad else rows
    return torch.linalg.solve_triangular(triangle, rows, upper=upper, left=False, out=out)


def _solve(lower: Tensor, right: Tensor) -> Tensor:
    # For one right-hand side, thirty times faster than cholesky_solve, which copies the factor first.
    half = torch.linalg.solve_triangular(lower, right, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def _limit(matrix: Tensor, largest: float) -> float:
    return len(matrix) * torch.finfo(matrix.dtype).eps * largest


def _power(multiply: Callable[[Tensor], Tensor], matrix: Tensor, starts: int = 1) -> Tensor:
    """Largest eigenvalue of a positive operator, estimated from below by a few power steps."""
    generator = torch.Generator().manual_seed(0)
    vectors = beside(matrix, torch.randn(len(matrix), starts, generator=generator, dtype=torch.float64))
    for _ in range(_STEPS):
        vectors = multiply(vectors / torch.linalg.vector_norm(vectors, dim=0))
    return torch.linalg.vector_norm(vectors, dim=0).max()


SINGLE = torch.finfo(torch.float32).eps
"""Below this share of the largest singular value, and that by width, float32 entries hold nothing but rounding."""


def solve_in_range(gram: Tensor, rows: Tensor) -> Tensor:
    """rows [o, k] times the pseudoinverse of `gram` [k, k], both in float64; by Cholesky where it is regular.

    Eigenvalues of at most k * machine epsilon * the largest count as 0.
    """
    try:
        return factorize(gram, what="the sum of the tasks' Gram matrices").solve_rows(rows.clone())
    except SingularGramError:
        values, vectors = torch.linalg.eigh(gram)
        kept = values > len(gram) * torch.finfo(gram.dtype).eps * values[-1].clamp_min(0)
        return (rows @ vectors[:, kept] / values[kept]) @ vectors[:, kept].mT


def singular_parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, r], s [r] and V' [r, k] of the part of a matrix [m, k] that is more than the rounding of float32.

    Computed in float64. None are left of a matrix of zeros.
    """
    left, values, right = torch.linalg.svd(near_factors(wide(matrix)), full_matrices=False)
    rank = int((values > max(matrix.shape) * SINGLE * values[:1]).sum())
    return left[:, :rank], values[:rank], right[:rank]


def polar(matrix: Tensor) -> Tensor:
    """The partial isometry closest to a matrix [m, k]: with all singular values 1, or 0 where they are none."""
    left, _, right = singular_parts(matrix)
    return left @ right
