"""Closed forms that stay defined where a matrix is singular: by leaving its null space alone."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlens.base.errors import SingularGramError
from driftlens.linalg.cholesky import factorize

SINGLE = torch.finfo(torch.float32).eps
"""Below this share of the largest singular value, and that by width, float32 entries hold nothing but rounding."""


def svd_operations(count: int, rows: int, columns: int) -> float:
    """Roughly what so many decompositions of a matrix take; far from a product's rate, so each counts tenfold."""
    return count * 220.0 * rows * columns * min(rows, columns)


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


def singular_parts(matrix: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, r], s [r] and V' [r, k] of the part of a matrix [m, k] that is more than the rounding of float32.

    Computed in float64. None are left of a matrix of zeros, nor of one that is rounding beside the `whole` that it was
    taken from.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    size = values[:1] if whole is None else torch.linalg.matrix_norm(whole.double())
    rank = int((values > max(matrix.shape) * SINGLE * size).sum())
    return left[:, :rank], values[:rank], right[:rank]


def polar(matrix: Tensor) -> Tensor:
    """The partial isometry closest to a matrix [m, k]: with all singular values 1, or 0 where they are none."""
    left, _, right = singular_parts(matrix)
    return left @ right
