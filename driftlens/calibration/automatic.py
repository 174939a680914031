"""Choice of a model by its scores on held-out samples. Entry point: `choose_model`.

The result is the last candidate, in the order of prior trust, that is within one standard error of the best.
Comparisons with the merged model are stated with Bonferroni's correction for the number of candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftlens.utils.errors import DataError
from driftlens.utils.intervals import standard_error, t_quantile

NUM_FOLDS = 4
# Simultaneous confidence level of all comparisons (Bonferroni).
LEVEL = 0.95


@dataclass(frozen=True)
class HeldOutScores:
    """Held-out scores of one candidate calibration by task, one per sample; lower is better."""

    by_task: Mapping[str, NDArray[np.float64]]

    @property
    def mean(self) -> float:
        """The mean score over tasks of the mean over samples; every task has the same weight."""
        return float(np.mean([values.mean() for values in self.by_task.values()]))

    def compare_to(self, other: HeldOutScores, *, among: int = 1) -> _ScoreDifference:
        """Compare the mean with another candidate's, with Bonferroni correction for `among` comparisons.

        Samples are paired, and tasks are strata: Student's t with the degrees of freedom of Welch and Satterthwaite.
        Scores of different folds come from fits that share samples, which the error ignores: intervals are slightly too
        narrow.
        """
        pairs = [(other.by_task[task], values) for task, values in self.by_task.items()]
        # A candidate that could not be solved has infinite scores and never wins.
        if not all(np.isfinite(values).all() for pair in pairs for values in pair):
            return _ScoreDifference(other.mean - self.mean, math.inf, 0.0, math.nan, math.nan, is_clear=False)
        gaps = [before - after for before, after in pairs]
        # Each task has the same weight, whatever its number of samples.
        error, freedom = standard_error([gap / len(gaps) for gap in gaps])
        advantage = float(np.mean([gap.mean() for gap in gaps]))
        reach = t_quantile(freedom, 1 - (1 - LEVEL) / among) * error
        return _ScoreDifference(
            advantage, error, freedom, advantage - reach, advantage + reach, is_clear=advantage > reach
        )


@dataclass(frozen=True)
class _ScoreDifference:
    """The difference of two candidates' mean scores, with its interval; clear if the interval is above 0."""

    advantage: float
    standard_error: float
    freedom: float
    low: float
    high: float
    is_clear: bool


@dataclass(frozen=True)
class ModelChoice:
    """The model chosen among candidates by held-out scores, and its comparisons with the merged model.

    Attributes:
        name: the last model that is within one standard error of the best.
        over_merged: every other model compared with the merged one.
        among: the number of comparisons that share the allowed error.
        base_stands: True if the base's mean is as low as the chosen model's.
        best: the model with the lowest mean except the merged one, if any.
    """

    name: str
    over_merged: Mapping[str, _ScoreDifference]
    among: int
    base_stands: bool
    best: str


def choose_model(scores: Mapping[str, HeldOutScores], *, among: int | None = None) -> ModelChoice:
    """Select the last model whose mean is within one standard error of the lowest.

    The error is that of the difference on the same samples (the one-standard-error rule of cross-validation; Breiman et
    al., 1984). Few samples can't separate neighbours, so the order of `scores` decides between them. A model that gives
    the same scores as an earlier one is not preferred to it.

    Args:
        scores: scores by model, in the order of prior trust; one is `merged`.
        among: the number of comparisons with the merged model that share the allowed error; None takes the number of
            other models.
    """
    among = max(1, len(scores) - 1) if among is None else among
    # The merged model is always usable: it needs no solve.
    usable = [name for name in scores if math.isfinite(scores[name].mean)] or ["merged"]
    lowest = min(usable, key=lambda name: scores[name].mean)
    behind = {name: scores[lowest].compare_to(scores[name]) for name in usable}
    name = [name for name, by in behind.items() if name == lowest or by.advantage < by.standard_error][-1]
    others = [other for other in scores if other != "merged"]
    return ModelChoice(
        name,
        {other: scores[other].compare_to(scores["merged"], among=among) for other in others},
        among,
        "base" in usable and scores["base"].mean <= scores[name].mean,
        min(others, key=lambda other: scores[other].mean, default=""),
    )


def fold_ranges(
    num_samples: int, task: str, purpose: str = "choosing settings", *, parts: int = NUM_FOLDS
) -> list[range]:
    """Return the sample positions of every cross-validation fold; raise a `DataError` for too few samples.

    Args:
        num_samples: the number of samples.
        task: the task, for messages.
        purpose: the purpose of holding out, for messages.
        parts: the number of folds.
    """
    if num_samples < 2 * NUM_FOLDS:
        raise DataError(
            f"task {task} has {num_samples} calibration samples; {purpose} takes at least {2 * NUM_FOLDS}",
            hint="Add samples, or name a preset or a merge, which need no held-out samples.",
        )
    # Strides, because samples are often sorted by class.
    return [range(part, num_samples, parts) for part in range(parts)]
