"""What to calibrate with, chosen by how candidates do on samples that they have not seen.

Samples fall into folds; whole samples are held out, never tokens: those of one image are not independent. All
candidates are compared in pairs, each at Bonferroni's level for their number. The simplest stays that no other is
clearly better than; of candidates equally simple the last is taken that is within a standard error of the best.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftlens.utils.errors import DataError
from driftlens.utils.intervals import standard_error, student

NUM_FOLDS = 4
LEVEL = 0.95
"""Of the two-sided intervals of all deciding comparisons together that must leave out 0 (Bonferroni)."""


@dataclass(frozen=True)
class Scores:
    """How well a candidate does on held-out samples; lower is better.

    `by_task` has one value per sample; the same samples in the same order for every candidate.
    """

    by_task: Mapping[str, NDArray[np.float64]]

    @property
    def mean(self) -> float:
        """Mean over tasks of the mean over samples, so that every task counts alike."""
        return float(np.mean([values.mean() for values in self.by_task.values()]))

    def compared_with(self, other: Scores, *, among: int = 1) -> Comparison:
        """Whether the mean is lower than the other's by more than chance explains.

        Samples are paired, and tasks are strata with variances of their own: Student's t with the degrees of freedom of
        Welch and Satterthwaite. `among` so many comparisons the error that is allowed is shared. Samples of different
        parts were scored by different fits. Where these share samples (of four parts, two do at least half of them),
        scores are correlated, which the error doesn't know, so that the interval is slightly narrow.
        """
        pairs = [(other.by_task[task], values) for task, values in self.by_task.items()]
        if not all(np.isfinite(values).all() for pair in pairs for values in pair):
            return Comparison(other.mean - self.mean, math.inf, 0.0, math.nan, math.nan, is_clear=False)
        gaps = [before - after for before, after in pairs]
        error, freedom = standard_error([gap / len(gaps) for gap in gaps])
        advantage = float(np.mean([gap.mean() for gap in gaps]))
        reach = student(freedom, 1 - (1 - LEVEL) / among) * error
        return Comparison(
            advantage, error, freedom, advantage - reach, advantage + reach, is_clear=advantage > reach
        )


@dataclass(frozen=True)
class Comparison:
    """How one model's held-out scores compare with another's: by how much its mean is lower, and whether that is clear.

    The error is infinite where one of them can't be solved for; `low` and `high` are the ends of the advantage's
    interval after the correction for several comparisons.
    """

    advantage: float
    standard_error: float
    freedom: float
    low: float
    high: float
    is_clear: bool


@dataclass(frozen=True)
class Decision:
    """Which of several models to use: `name` is the simplest that no other is clearly better than.

    `over_merged` compares every other with the merged one, `among` so many share the error that is allowed. The base
    stands where its mean is as low as the decision's. `best` has the lowest mean of all but the merged one, if any.
    """

    name: str
    over_merged: Mapping[str, Comparison]
    among: int
    base_stands: bool
    best: str


def decide(
    scores: Mapping[str, Scores], alike: Sequence[Collection[str]] = (), *, among: int | None = None
) -> Decision:
    """The choice among models by their scores on the same samples, from the simplest to the least; one is `merged`.

    Names `alike` are equally simple; of each such set only one can be chosen: the last whose mean is within one
    standard error of the paired difference from the lowest (the one-standard-error rule of cross-validation; Breiman
    et al., 1984). Few samples decide between neighbours as a coin does, so they come in the order in which they are
    trusted beforehand. `among` so many comparisons the error is shared, those with what was left behind earlier
    included; None takes the others' number.
    """
    among = max(1, len(scores) - 1) if among is None else among

    def beats(one: str, other: str) -> bool:
        return scores[one].compared_with(scores[other], among=among).is_clear

    usable = [name for name in scores if math.isfinite(scores[name].mean)] or ["merged"]
    standing = usable
    for names in alike:
        there = [name for name in usable if name in names]
        lowest = min(there, key=lambda name: scores[name].mean, default="")
        behind = {name: scores[lowest].compared_with(scores[name]) for name in there}
        near = [name for name, by in behind.items() if name == lowest or by.advantage <= by.standard_error]
        standing = [name for name in standing if name in near[-1:] or name not in there]
    name = next(name for name in standing if not any(beats(other, name) for other in usable))
    others = [other for other in scores if other != "merged"]
    return Decision(
        name,
        {other: scores[other].compared_with(scores["merged"], among=among) for other in others},
        among,
        "base" in usable and scores["base"].mean <= scores[name].mean,
        min(others, key=lambda other: scores[other].mean, default=""),
    )


def folds_of(
    num_samples: int, task: str, what: str = "choosing settings", *, parts: int = NUM_FOLDS
) -> list[range]:
    """Positions of every part's samples of a task; parts are as equal as can be, and each gets its share of any order.

    `what` holds samples out, for the message where there are too few.
    """
    if num_samples < 2 * NUM_FOLDS:
        raise DataError(
            f"task {task} has {num_samples} calibration samples; {what} takes at least {2 * NUM_FOLDS}",
            hint="Bring more samples; settings of a preset and merges by name need none held out.",
        )
    return [range(part, num_samples, parts) for part in range(parts)]
