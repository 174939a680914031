"""Element-wise merge methods in plain loops over numbers, from their papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

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


def slerp(first: np.ndarray, second: np.ndarray, t: float) -> np.ndarray:
    """Shoemake's formula."""
    angle = math.acos(float(first @ second) / math.sqrt(float(first @ first) * float(second @ second)))
    return (math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)


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
