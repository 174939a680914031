"""How alike embeddings are, and how good a ranking of passages is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def similarities(queries: Tensor, others: Tensor, how: str = "cosine", *, paired: bool = False) -> Tensor:
    """How alike embeddings are, by the words of sentence-transformers; larger is more alike.

    Args:
        queries: [n, d].
        others: [m, d].
        how: cosine, dot, euclidean or manhattan.
        paired: whether every query has one of its own.

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
"""How far down a ranking is looked at."""


def _ndcg(hits: Sequence[bool], wanted: int) -> float:
    """Binary relevance: the sum of 1 / log2(rank + 1) of what answers, by that of an ideal ranking."""
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(wanted, DEEPEST) + 1))
    return sum(hit / math.log2(rank + 1) for rank, hit in enumerate(hits, 1)) / best if best else 0.0


RANKINGS: dict[str, Callable[[Sequence[bool], int], float]] = {
    "ndcg@10": _ndcg,
    "accuracy@1": lambda hits, wanted: float(any(hits[:1])),
    "precision@5": lambda hits, wanted: sum(hits[:5]) / 5,
    "mrr@10": lambda hits, wanted: next((1 / rank for rank, hit in enumerate(hits, 1) if hit), 0.0),
}
"""By metric: whether each of the first passages answers a query, and how many of all do -> the query's share in it."""
