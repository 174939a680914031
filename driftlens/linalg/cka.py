"""Linear centred kernel alignment (CKA), debiased.

Source: Kornblith et al., "Similarity of Neural Network Representations Revisited" (arXiv:1905.00414), with the unbiased
HSIC estimator of Song et al. (JMLR 2012), as used by Nguyen et al. (arXiv:2010.15327).
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftlens.base.errors import ShapeError


def linear_cka(left: Tensor, right: Tensor) -> Tensor:
    """How alike two sets of features of the same samples are.

    1 for features equal up to rotation and scale, 0 on average for unrelated ones. With K = left left' and M = right
    right', both with zero diagonals, it is HSIC(K, M) / sqrt(HSIC(K, K) HSIC(M, M)), where HSIC is the unbiased
    estimator [tr(K M) + 1'K1 1'M1 / ((n-1)(n-2)) - 2 1'K M 1 / (n-2)] / (n (n-3)).

    Rotations, scale, shifts and a common order of the samples leave it unchanged; other linear maps of the features do
    not.

    Args:
        left: [n, d].
        right: [n, k]; the widths may differ.

    Returns:
        A number, at most 1 up to rounding and possibly slightly negative; NaN when n < 4 or one side does not vary.

    Raises:
        ShapeError: the numbers of samples differ.
    """
    if left.dim() != 2 or right.dim() != 2 or len(left) != len(right):
        raise ShapeError(
            f"want [n, d] and [n, k] of the same n, got {list(left.shape)} and {list(right.shape)}"
        )
    if len(left) < 4:
        return left.new_tensor(float("nan"))
    gram_left, gram_right = _gram(left), _gram(right)
    energy = _hsic(gram_left, gram_left) * _hsic(gram_right, gram_right)
    return _hsic(gram_left, gram_right) / energy.sqrt()


def _gram(features: Tensor) -> Tensor:
    centred = features - features.mean(
        dim=0
    )  # the estimator is translation invariant; centring keeps it accurate
    gram = centred @ centred.mT
    return gram.fill_diagonal_(0)


def _hsic(left: Tensor, right: Tensor) -> Tensor:
    n = len(left)
    total = left.sum() * right.sum() / ((n - 1) * (n - 2))
    mixed = torch.dot(left.sum(dim=0), right.sum(dim=0)) * 2 / (n - 2)
    return ((left * right).sum() + total - mixed) / (n * (n - 3))
