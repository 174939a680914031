"""Similarity measures: debiased linear CKA of features, similarities of embeddings, and retrieval scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cka(left: Tensor, right: Tensor) -> Tensor:
    """Return the debiased linear CKA of two sets of features of the same samples.

    It is 1 for features equal up to rotation and scale, 0 on average for unrelated ones. With K = left left' and M =
    right right', both with zero diagonals, it is HSIC(K, M) / sqrt(HSIC(K, K) HSIC(M, M)), where HSIC is the unbiased
    estimator [tr(K M) + 1'K1 1'M1 / ((n-1)(n-2)) - 2 1'K M 1 / (n-2)] / (n (n-3)).

    Source: Kornblith et al. (arXiv:1905.00414), with the HSIC estimator of Song et al. (JMLR 2012).

    Args:
        left: [n, d].
        right: [n, k]; the widths may differ.

    Returns:
        A number, at most 1 up to rounding and possibly slightly negative; NaN when n < 4 or one side does not vary.
    """
    if len(left) < 4:
        return left.new_tensor(float("nan"))
    gram_left, gram_right = _gram(left), _gram(right)
    # Unbiased estimates can be negative, which gives NaN: similarity is undefined then.
    energy = _hsic(gram_left, gram_left) * _hsic(gram_right, gram_right)
    return _hsic(gram_left, gram_right) / energy.sqrt()


def _gram(features: Tensor) -> Tensor:
    # The estimator is translation invariant; centring keeps it accurate.
    centred = features - features.mean(dim=0)
    gram = centred @ centred.mT
    return gram.fill_diagonal_(0)


def _hsic(left: Tensor, right: Tensor) -> Tensor:
    n = len(left)
    total = left.sum() * right.sum() / ((n - 1) * (n - 2))
    mixed = torch.dot(left.sum(dim=0), right.sum(dim=0)) * 2 / (n - 2)
    return ((left * right).sum() + total - mixed) / (n * (n - 3))


def similarities(queries: Tensor, others: Tensor, how: str = "cosine", *, paired: bool = False) -> Tensor:
    """Return similarities of embeddings by the names of sentence-transformers; larger is more similar.

    Args:
        queries: [n, d].
        others: [m, d].
        how: cosine, dot, euclidean or manhattan.
        paired: True to compare row with row.

    Returns:
        [n, m], or [n] of pairs.
    """
    if how in ("euclidean", "manhattan"):
        order = 2.0 if how == "euclidean" else 1.0
        return (
            -torch.linalg.vector_norm(queries - others, ord=order, dim=1)
            if paired
            else -torch.cdist(queries, others, p=order)
        )
    if how == "cosine":
        queries, others = (F.normalize(side, dim=1) for side in (queries, others))
    return (queries * others).sum(dim=1) if paired else queries @ others.mT


DEEPEST = 10
"""Number of ranks that are scored."""


def _ndcg(hits: Sequence[bool], relevant: int) -> float:
    """Return binary NDCG: the sum of 1 / log2(rank + 1) over hits, relative to an ideal ranking."""
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(relevant, DEEPEST) + 1))
    return sum(hit / math.log2(rank + 1) for rank, hit in enumerate(hits, 1)) / best if best else 0.0


RANKINGS: dict[str, Callable[[Sequence[bool], int], float]] = {
    "ndcg@10": _ndcg,
    "accuracy@1": lambda hits, relevant: float(any(hits[:1])),
    "precision@5": lambda hits, relevant: sum(hits[:5]) / 5,
    "mrr@10": lambda hits, relevant: next((1 / rank for rank, hit in enumerate(hits, 1) if hit), 0.0),
}
"""Metric -> (hits by rank, number of relevant passages) -> the score of one query."""
