"""States: dicts of tensors whose first axis is the sample, treated as one long vector per sample; cosines of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlens.errors import ShapeError

State = dict[str, Tensor]


def floating(state: State) -> State:
    """The leaves that can drift: those of a floating dtype."""
    return {name: leaf for name, leaf in state.items() if leaf.is_floating_point()}


def subtract(left: State, right: State) -> State:
    """left - right over floating leaves; the others carry no drift and are left out."""
    return {name: leaf - right[name] for name, leaf in left.items() if leaf.is_floating_point()}


def inner(left: State, right: State) -> Tensor:
    """Inner product per sample over all leaves and tokens, [n]."""
    products = [(leaf * right[name]).flatten(1).sum(dim=1) for name, leaf in left.items()]
    return torch.stack(products).sum(dim=0)


def norm(state: State) -> Tensor:
    """Euclidean norm per sample over all leaves and tokens, [n]."""
    norms = [torch.linalg.vector_norm(leaf.flatten(1), dim=1) for leaf in state.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)


def relative_error(found: State, exact: State) -> Tensor:
    """Sum over samples of |found - exact| over the sum of |exact|, a number; NaN where the latter is zero."""
    size = norm(exact).sum()
    error = norm(subtract(found, exact)).sum()
    return torch.where(size > 0, error / size, torch.nan)


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
