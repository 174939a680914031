"""Element-wise merge methods in plain loops over numbers, from their papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

Vectors = Mapping[str, np.ndarray]
"""By task, all entries of one tensor, or of all tensors one after the other."""


def ties_step(vectors: Vectors, density: float, merge_func: str) -> np.ndarray:
    """Trim every vector as a whole, elect, merge."""
    trimmed = {}
    for task, given in vectors.items():
        vector = given.tolist()
        sizes = sorted(abs(entry) for entry in vector)
        place = len(sizes) - int(density * len(sizes))
        limit = sizes[place - 1] if place else 0.0
        trimmed[task] = [entry if abs(entry) >= limit else 0.0 for entry in vector]
    step = []
    for entries in zip(*trimmed.values(), strict=True):
        total = sum(entries)
        wanted = (total > 0) - (total < 0)
        same = [entry for entry in entries if entry * wanted > 0]
        if not same:
            step.append(0.0)
        elif merge_func == "max":
            step.append(wanted * max(map(abs, same)))
        else:
            step.append(sum(same) / (len(same) if merge_func == "mean" else 1))
    return np.array(step)


def breadcrumbs_step(vectors: Vectors, outliers: float, density: float) -> np.ndarray:
    """The sum of vectors without their largest entries, and of the rest without the small ones."""
    total = np.zeros(len(next(iter(vectors.values()))))
    for vector in vectors.values():
        order = sorted(range(len(vector)), key=lambda at: -abs(vector[at]))
        rest = order[int(outliers * len(vector)) :]
        for at in rest[: int(density * len(rest))]:
            total[at] += vector[at]
    return total


def consensus_step(vectors: Vectors, mask_threshold: float, min_tasks: int) -> np.ndarray:
    """The sum of vectors where enough tasks' masks are set."""
    step = []
    for entries in zip(*vectors.values(), strict=True):
        total = sum(entries)
        votes = sum(abs(own) >= mask_threshold * abs(total - own) for own in entries)
        step.append(total if votes >= min_tasks else 0.0)
    return np.array(step)


def magprune_chances(row: np.ndarray, drop_rate: float, window: float) -> list[float]:
    """The chance of every entry of a row to be dropped: the largest least."""
    chances = []
    for own in row:
        larger = sum(abs(entry) > abs(own) for entry in row)
        chances.append(drop_rate - window / 2 + window * larger / (len(row) - 1))
    return chances


def slerp(first: np.ndarray, second: np.ndarray, t: float) -> np.ndarray:
    """Shoemake's formula."""
    angle = math.acos(float(first @ second) / math.sqrt(float(first @ first) * float(second @ second)))
    return (math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)


def karcher_step(mean: np.ndarray, vectors: Vectors) -> np.ndarray:
    """The sum of the logarithms at a mean of the vectors' directions: zero where it is the mean."""
    total = np.zeros(len(mean))
    for vector in vectors.values():
        unit, pole = vector / math.sqrt(float(vector @ vector)), mean / math.sqrt(float(mean @ mean))
        angle = math.acos(min(1.0, float(unit @ pole)))
        total += angle / math.sin(angle) * (unit - math.cos(angle) * pole)
    return total


def stock_ratio(vectors: Vectors) -> float:
    """Model Stock's t, of the mean cosine over all pairs."""
    given = list(vectors.values())
    cosines = [
        float(one @ two) / math.sqrt(float(one @ one) * float(two @ two))
        for at, one in enumerate(given)
        for two in given[:at]
    ]
    cosine = sum(cosines) / len(cosines)
    return len(given) * cosine / (1 + (len(given) - 1) * cosine)


def by_rows(
    step: Callable[..., np.ndarray], vectors: Mapping[str, torch.Tensor], *more: float
) -> torch.Tensor:
    """What a step on vectors makes of matrices, row by row."""
    first = next(iter(vectors.values()))
    flat = {task: vector.reshape(-1, first.shape[-1]).numpy() for task, vector in vectors.items()}
    rows = [
        step({task: flat[task][at] for task in flat}, *more) for at in range(first.numel() // first.shape[-1])
    ]
    return torch.from_numpy(np.stack(rows)).reshape(first.shape)
