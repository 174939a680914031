"""Cosines of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlens.errors import ShapeError


def expert_cosine(left: Tensor, right: Tensor) -> Tensor:
    """Cosine of the angle between matching rows; NaN where a row is zero, since it has no direction.

    Args:
        left: [n, d].
        right: [n, d].

    Returns:
        [n], between -1 and 1, in the dtype of the rows.

    Raises:
        ShapeError: the shapes differ or are not two-dimensional.
    """
    if left.dim() != 2 or left.shape != right.shape:
        raise ShapeError(f"want two matrices of one shape, got {list(left.shape)} and {list(right.shape)}")
    # Unit rows first: the product of two norms would leave float32's range for features near 1e19.
    return (_unit(left) * _unit(right)).sum(dim=1).clamp(-1, 1)


def _unit(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(dim=1, keepdim=True)
    scaled = rows / scale
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
