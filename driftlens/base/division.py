"""Which piece of a work is whose, of several processes, and done when: arithmetic that all of them do alike."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

_UNEVEN = 1.15
"""How much longer the slowest process may take with whole items than with batches divided evenly."""


def balanced(costs: Sequence[float], size: int) -> tuple[list[int], float]:
    """A process of `size` for each of some pieces of work, and what the busiest has to do.

    The largest piece goes first, each to whom has least.
    """
    loads, ranks = [(0.0, rank) for rank in range(min(size, max(1, len(costs))))], [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, ranks[piece] = loads[0]
        heapq.heapreplace(loads, (load + costs[piece], ranks[piece]))
    return ranks, max(loads)[0]


def in_runs(items: Iterable[T], sizes: Iterable[int], most: int) -> list[list[T]]:
    """Items in their order, in runs of at most this size together, or of one item; what has size 0 begins none."""
    runs: list[list[T]] = [[]]
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if size and total and total + size > most:
            runs.append([])
            total = 0
        runs[-1].append(item)
        total += size
    return runs


def shared(counts: Mapping[str, int], size: int) -> dict[str, list[tuple[int, int, int]]]:
    """Who takes which of some batches: by item the ranks, each with its first batch and the one behind its last.

    Items are whole where that leaves hardly anybody idle; else all batches, item behind item, are cut into as many
    equal runs as there are processes.
    """
    owners, most = balanced([*counts.values()], size)
    total, start = sum(counts.values()), 0
    if not all(counts.values()) or most * size <= _UNEVEN * total:
        return {item: [(owner, 0, counts[item])] for item, owner in zip(counts, owners, strict=True)}
    cuts = [round(total * rank / size) for rank in range(size + 1)]
    runs_of: dict[str, list[tuple[int, int, int]]] = {}
    for item, count in counts.items():
        runs = (
            (rank, max(cuts[rank] - start, 0), min(cuts[rank + 1] - start, count)) for rank in range(size)
        )
        runs_of[item] = [run for run in runs if run[1] < run[2]]
        start += count
    return runs_of
