"""Cholesky factors that say how close to singular their matrix is, and are refused where it can't be told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.errors import NumericsError, SingularGramError

_PANEL = 256
_STEPS = 3
_SUSPICION = 8.0  # an estimate this close to the limit is replaced by exact eigenvalues


@dataclass(frozen=True)
class Factor:
    """L with L L' = a symmetric positive definite matrix.

    Attributes:
        lower: L, [k, k], zero above the diagonal.
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
        """X with X (L L') = rows, [o, k]; one factor serves every row."""
        # X S = R with S symmetric means S X' = R'.
        half = torch.linalg.solve_triangular(self.lower.mT, rows, upper=True, left=False)
        return torch.linalg.solve_triangular(self.lower, half, upper=False, left=False)

    def energy(self, rows: Tensor) -> Tensor:
        """x' (L L') x for every row x, [o], computed in the dtype of `rows`, [o, k]."""
        total = rows.new_zeros(len(rows))
        for start in range(0, len(self.lower), _PANEL):
            panel = self.lower[start:, start : start + _PANEL].to(rows)
            total += (rows[:, start:] @ panel).square().sum(dim=1)
        return total


def factorize(matrix: Tensor, *, what: str) -> Factor:
    """Cholesky factor of a symmetric positive definite matrix, [k, k], of which the lower triangle is read.

    Refused is a matrix whose smallest eigenvalue is at most k * machine epsilon * its largest: a factorisation that
    went through is no proof of full rank. Nothing is damped, clipped or pseudo-inverted instead.

    Args:
        matrix: the matrix; it is not modified.
        what: what messages call it, for example "gram + 0.05 I".

    Raises:
        NumericsError: an entry is NaN or infinite.
        SingularGramError: not positive definite to working precision; the smallest eigenvalue is in the message.
    """
    if not bool(torch.isfinite(matrix.sum())) and not bool(torch.isfinite(matrix).all()):
        raise NumericsError(
            f"{what} holds NaN or infinite entries",
            hint="Look at the features and weights that it was computed from.",
        )
    lower, failed_minor = torch.linalg.cholesky_ex(matrix)
    if int(failed_minor) == 0:
        largest = _power(lambda v: lower @ (lower.mT @ v), matrix)
        smallest = 1 / _power(lambda v: _solve(lower, v), matrix)
        if smallest > _SUSPICION * _limit(matrix, largest):
            return Factor(lower, smallest, largest)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if int(failed_minor) == 0 and smallest > _limit(matrix, largest):
        return Factor(lower, smallest, largest)
    raise SingularGramError(
        f"{what} is singular to working precision: its smallest eigenvalue is {smallest:.2e}, its largest "
        f"{largest:.2e}",
        hint="Raise `lam` (it needs an anchor to pull towards), or calibrate on more samples than the site has input "
        "features.",
        smallest_eigenvalue=smallest,
        largest_eigenvalue=largest,
    )


def _solve(lower: Tensor, right: Tensor) -> Tensor:
    # For one right-hand side, thirty times faster than cholesky_solve, which copies the factor first.
    half = torch.linalg.solve_triangular(lower, right, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def _limit(matrix: Tensor, largest: float) -> float:
    return len(matrix) * torch.finfo(matrix.dtype).eps * largest


def _power(multiply: Callable[[Tensor], Tensor], matrix: Tensor) -> float:
    """Largest eigenvalue of a positive operator, estimated from below by a few power steps."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(matrix), 1, generator=generator, dtype=torch.float64).to(matrix)
    for _ in range(_STEPS):
        vector = multiply(vector / torch.linalg.vector_norm(vector))
    return float(torch.linalg.vector_norm(vector))
