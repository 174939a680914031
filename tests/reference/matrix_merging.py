"""Merge methods on one matrix at a time, slowly, in NumPy, as their papers and published code write them down.

Weights are [out, in]; a module maps x to W x. `deltas` are task vectors. Nothing is shared with the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def tsv_m(deltas: Sequence[Array]) -> Array:
    """TSV-Merge (arXiv:2412.00081): truncate, put side by side, orthogonalise by Procrustes."""
    keep = min(deltas[0].shape) // len(deltas)
    lefts, sizes, rights = [], [], []
    for delta in deltas:
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        for rank in range(keep):
            lefts.append(u[:, rank])
            sizes.append(s[rank])
            rights.append(vt[rank])
    return procrustes(np.array(lefts).T) @ np.diag(sizes) @ procrustes(np.array(rights).T).T


def procrustes(columns: Array) -> Array:
    p, _, q = np.linalg.svd(columns, full_matrices=False)
    return p @ q


def iso_c(deltas: Sequence[Array]) -> Array:
    """Iso-C (arXiv:2502.04959)."""
    u, s, vt = np.linalg.svd(np.sum(deltas, axis=0), full_matrices=False)
    return u @ np.diag([s.mean()] * len(s)) @ vt


def iso_cts(deltas: Sequence[Array], fraction: float) -> Array:
    """Iso-CTS (arXiv:2502.04959), with the published code's rounding of the two subspaces."""
    rank, tasks = min(deltas[0].shape), len(deltas)
    common = int(rank * fraction)
    specific = round((rank - common) / tasks) * tasks
    common = rank - specific
    u, s, vt = np.linalg.svd(np.sum(deltas, axis=0), full_matrices=False)
    lefts, sizes, rights = [], [], []
    for delta in deltas:
        ut, st, vtt = np.linalg.svd(delta - u[:, :common] @ u[:, :common].T @ delta, full_matrices=False)
        lefts.append(ut[:, : specific // tasks])
        sizes.append(st[: specific // tasks])
        rights.append(vtt[: specific // tasks].T)
    lefts.append(u[:, :common])
    sizes.append(s[:common])
    rights.append(vt[:common].T)
    size = np.concatenate(sizes).mean()
    return size * procrustes(np.hstack(lefts)) @ procrustes(np.hstack(rights)).T
