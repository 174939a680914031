"""Gauss-Legendre nodes and weights on [0, 1]."""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def gauss_legendre(nodes: int) -> tuple[tuple[float, float], ...]:
    """(node, weight) pairs on [0, 1], exact for polynomials up to degree 2 * nodes - 1; the weights sum to 1.

    Raises:
        ValueError: `nodes` is below 1.
    """
    if nodes < 1:
        raise ValueError(f"a quadrature needs at least one node, got {nodes}")
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return tuple((float(t), float(w)) for t, w in zip((points + 1) / 2, weights / 2, strict=True))
