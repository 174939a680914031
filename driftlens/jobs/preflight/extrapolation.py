"""From what short studies took to what a whole one takes: a sum of products of blocks, tasks, samples and rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

QUADRATIC = "explain"
"""What carries a vector of every layer before through each one behind, so that it grows with the square of the depth;
all else that a job does is done once for each layer."""


@dataclass(frozen=True)
class Extent:
    """How much there is to do.

    Attributes:
        blocks: that the chain has between stem and head.
        samples: of all tasks at hand.
        tasks: at hand.
        rounds: how often something that is trained goes through a batch.
    """

    blocks: float
    samples: float
    tasks: float = 1
    rounds: float = 0


@dataclass(frozen=True)
class Measured:
    """What so much took: seconds, or bytes."""

    extent: Extent
    amount: float


def extrapolated(what: str, measured: Sequence[Measured], extent: Extent) -> float:
    """What this extent takes, from what others took.

    It is a sum of products with factors that fit best and are not negative: more work gives nothing back. Relative
    errors count, and of what was measured more than once the least: noise only adds.
    """
    from scipy.optimize import nnls

    least: dict[Extent, float] = {}
    for at in measured:
        least[at.extent] = min(at.amount, least.get(at.extent, math.inf))
    terms = _varying(what, [*least])
    rows = np.array([[product(at) for product in terms.values()] for at in least])
    amounts = np.array([max(amount, _SHORTEST) for amount in least.values()])
    scale = rows.max(axis=0)
    factors, _ = nnls(rows / scale / amounts[:, None], np.ones(len(rows)))
    return float(np.array([product(extent) for product in terms.values()]) @ (factors / scale))


_SHORTEST = 1e-6
"""Of an amount that others are compared with; a phase that does nothing takes as long."""

_PRODUCTS = {
    "": lambda at: 1.0,
    "blocks": lambda at: at.blocks,
    "samples": lambda at: at.samples,
    "blocks samples": lambda at: at.blocks * at.samples,
    "blocks tasks": lambda at: at.blocks * at.tasks,
    "rounds": lambda at: at.rounds * at.tasks,
    "rounds blocks": lambda at: at.rounds * at.tasks * at.blocks,
}
"""Done once; by block (weights are read, sites solved for); by sample (stem and head); by both (the walk); by block and
task (an expert is read); by round and task."""


def _varying(what: str, extents: Sequence[Extent]) -> Mapping[str, Any]:
    """The products that can be told apart: whatever didn't vary is part of the others."""
    terms = dict(_PRODUCTS)
    if len({at.tasks for at in extents}) > 1:
        del terms[
            "samples"
        ]  # of several tasks together: stem and head hardly count beside what there is by task
    else:
        del terms["blocks tasks"]
    if len({at.rounds for at in extents}) == 1:
        del terms["rounds"], terms["rounds blocks"]
    if what == QUADRATIC:
        terms["blocks^2 samples"] = lambda at: at.blocks**2 * at.samples
    return terms
