"""Which lambda, rho and alpha to calibrate with, chosen by how calibrations do on samples that they have not seen.

The search starts at the given settings (a preset) and changes one of them at a time, because candidates that differ in
one setting walk side by side. A candidate is calibrated on three quarters of the calibration samples and scored on the
fourth, which no candidate of the search has seen. Whole samples are held out, never tokens: those of one image are not
independent. At the end, what was found and the start are both judged once more with another quarter held out; the start
is left only for a score that is lower there by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from driftlens.errors import DataError

CHOSEN = ("lam", "alpha", "rho")
"""Settings that are chosen, in the order in which they are."""

NUM_FOLDS = 4
SEARCH_FOLD, DECISION_FOLD = 0, 1
CONFIDENCE = 1.96
"""Standard errors by which a score has to be lower; a normal variable is so far out once in forty times."""

LAM_FACTORS = (0.2, 5.0)
RHO_STEPS = (-1.0, 1.0)
ALPHA_STEPS = (-0.15, 0.2)


@dataclass(frozen=True)
class Candidate:
    """Settings that are tried."""

    lam: float
    rho: float
    alpha: float


@dataclass(frozen=True)
class Scores:
    """How well a candidate does on held-out samples; lower is better.

    Attributes:
        by_task: one value per sample, by task; the same samples in the same order for every candidate.
    """

    by_task: Mapping[str, NDArray[np.float64]]

    @property
    def mean(self) -> float:
        """Mean over tasks of the mean over samples, so that every task counts alike."""
        return float(np.mean([values.mean() for values in self.by_task.values()]))

    def advantage_over(self, other: Scores) -> tuple[float, float]:
        """By how much the mean is lower than the other's, and the standard error of that (samples are paired)."""
        gaps = [other.by_task[task] - values for task, values in self.by_task.items()]
        variances = [gap.var(ddof=1) / len(gap) if len(gap) > 1 else math.inf for gap in gaps]
        return float(np.mean([gap.mean() for gap in gaps])), math.sqrt(sum(variances)) / len(gaps)

    def is_clearly_better_than(self, other: Scores) -> bool:
        """Whether the mean is lower by more than chance explains."""
        advantage, error = self.advantage_over(other)
        return advantage > CONFIDENCE * error


@dataclass(frozen=True)
class Trial:
    """One candidate, calibrated without one fold and scored on it."""

    candidate: Candidate
    fold: int
    score: float


@dataclass(frozen=True)
class Choice:
    """What the search came to.

    Attributes:
        chosen: the settings to calibrate with.
        found: the best settings of the search, chosen or not.
        trials: everything that was tried, in order.
        advantage: by how much what was found scored lower than the start on the deciding fold; 0 if it is the start.
        standard_error: of the advantage.
    """

    chosen: Candidate
    found: Candidate
    trials: Sequence[Trial]
    advantage: float = 0.0
    standard_error: float = 0.0


Evaluate = Callable[[Sequence[Candidate], int], Sequence[Scores]]
"""(candidates, fold) -> the scores on the fold's samples of each, calibrated on the samples of the other folds."""


def folds_of(num_samples: int, task: str) -> list[range]:
    """Positions of every fold's samples; folds are as equal as can be, and each gets its share of any order.

    Args:
        num_samples: calibration samples of a task.
        task: its name, for messages.

    Raises:
        DataError: there are too few samples to hold any out.
    """
    if num_samples < 2 * NUM_FOLDS:
        raise DataError(
            f"task {task} has {num_samples} calibration samples; choosing settings takes at least {2 * NUM_FOLDS}",
            hint="Calibrate on more samples, or with the settings of a preset.",
        )
    return [range(fold, num_samples, NUM_FOLDS) for fold in range(NUM_FOLDS)]


def choose(start: Candidate, evaluate: Evaluate, *, varies: Sequence[str] = CHOSEN) -> Choice:
    """The settings to calibrate with: the start, or others that are clearly better on samples not seen.

    Args:
        start: where the search begins.
        evaluate: calibrates and scores candidates.
        varies: settings that may be changed, in the order in which they are.
    """
    search, best = _Search(evaluate), start
    known: dict[Candidate, Scores] = {}
    for name in varies:
        candidates = [best, *steps_from(best, name)]
        new = [candidate for candidate in candidates if candidate not in known]
        known |= zip(new, search.run(new, SEARCH_FOLD), strict=True)
        best = min(candidates, key=lambda candidate: known[candidate].mean)
    if best == start:
        return Choice(start, start, search.trials)
    before, after = search.run([start, best], DECISION_FOLD)
    advantage, error = after.advantage_over(before)
    chosen = best if after.is_clearly_better_than(before) else start
    return Choice(chosen, best, search.trials, advantage, error)


def steps_from(at: Candidate, name: str) -> list[Candidate]:
    """Candidates that differ from another one in one setting.

    Args:
        at: where to go from.
        name: lam (goes by factors), rho or alpha (go by steps; alpha stays between 0 and 1, rho above 0).
    """
    if name == "lam":
        values = [at.lam * factor for factor in LAM_FACTORS]
    elif name == "rho":
        values = [at.rho + step for step in RHO_STEPS if at.rho + step > 0]
    else:
        values = [min(1.0, max(0.0, at.alpha + step)) for step in ALPHA_STEPS]
    candidates = [replace(at, **{name: round(value, 12)}) for value in values]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate != at]


@dataclass
class _Search:
    """Evaluates candidates, and keeps what was tried."""

    evaluate: Evaluate
    trials: list[Trial] = field(default_factory=list)

    def run(self, candidates: Sequence[Candidate], fold: int) -> Sequence[Scores]:
        scores = self.evaluate(candidates, fold)
        self.trials += [
            Trial(candidate, fold, found.mean) for candidate, found in zip(candidates, scores, strict=True)
        ]
        return scores
