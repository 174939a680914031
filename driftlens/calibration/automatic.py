"""Which lambda, rho and alpha to calibrate with, chosen by how calibrations do on samples that they have not seen.

The search starts at the given settings (a preset) and changes one of them at a time, because candidates that differ in
one setting walk side by side. A candidate is calibrated on three quarters of the calibration samples and scored on the
fourth, which no candidate of the search has seen. Whole samples are held out, never tokens: those of one image are not
independent. At the end, what was found, the start and the merged model as it is are judged once more with another
quarter held out. What is simpler stays unless something else scores lower there by more than chance: the merged model
before the start, the start before what was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from driftlens.errors import DataError
from driftlens.records.intervals import standard_error, student

CHOSEN = ("lam", "alpha", "rho")
"""Settings that are chosen, in the order in which they are."""

NUM_FOLDS = 4
SEARCH_FOLD, DECISION_FOLD = 0, 1
LEVEL = 0.95
"""Of the two-sided intervals of all deciding comparisons together that must leave out 0 (Bonferroni)."""

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

    def compared_with(self, other: Scores, *, among: int = 1) -> Comparison:
        """Whether the mean is lower than the other's by more than chance explains.

        Samples are paired, and tasks are strata with variances of their own: Student's t with the degrees of freedom of
        Welch and Satterthwaite. `among` so many comparisons the error that is allowed is shared.
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
    """How one model's held-out scores compare with another's.

    Attributes:
        advantage: by how much its mean is lower.
        standard_error: of the advantage; infinite where one of them can't be solved for.
        freedom: degrees of freedom of that error.
        low: lower end of the advantage's interval, after the correction for several comparisons.
        high: upper end.
        is_clear: whether it is lower by more than chance explains.
    """

    advantage: float
    standard_error: float
    freedom: float
    low: float
    high: float
    is_clear: bool


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
        chosen: the settings to calibrate with; None leaves the merged model as it is.
        found: the best settings of the search, chosen or not.
        trials: everything that was tried, in order.
        deciding: the comparisons that decided: "start", and "found" where that is something else, each against what
            stood before it, in the order in which they were made.
        over_start: what was found against the start, for information; None where it is the start.
        over_merged: what was found against the merged model, likewise.
    """

    chosen: Candidate | None
    found: Candidate
    trials: Sequence[Trial]
    deciding: Mapping[str, Comparison]
    over_start: Comparison | None
    over_merged: Comparison


Evaluate = Callable[[Sequence[Candidate], int], Sequence[Scores]]
"""(candidates, fold) -> the scores on the fold's samples of each, calibrated on the samples of the other folds."""


def folds_of(num_samples: int, task: str) -> list[range]:
    """Positions of every fold's samples of a task; folds are as equal as can be, and each gets its share of any order.

    Raises:
        DataError: there are too few samples to hold any out.
    """
    if num_samples < 2 * NUM_FOLDS:
        raise DataError(
            f"task {task} has {num_samples} calibration samples; choosing settings takes at least {2 * NUM_FOLDS}",
            hint="Calibrate on more samples, or with the settings of a preset.",
        )
    return [range(fold, num_samples, NUM_FOLDS) for fold in range(NUM_FOLDS)]


def choose(
    start: Candidate,
    evaluate: Evaluate,
    merged: Callable[[int], Scores],
    *,
    varies: Sequence[str] = CHOSEN,
) -> Choice:
    """What to calibrate with, if at all, by scores on samples that were not calibrated on.

    The merged model stays as it is unless the start is clearly better; what stands then stays unless what was found is
    clearly better than it. A calibration that does no good is worth less than none: it takes time and moves weights.
    `merged` gives the scores on a fold of the merged model as it is; `varies` names what may be changed, in this order.
    """
    trials: list[Trial] = []

    def scored(candidates: Sequence[Candidate], fold: int) -> Sequence[Scores]:
        found = evaluate(candidates, fold)
        trials.extend(Trial(at, fold, scores.mean) for at, scores in zip(candidates, found, strict=True))
        return found

    best = start
    known: dict[Candidate, Scores] = {}
    for name in varies:
        candidates = [best, *steps_from(best, name)]
        new = [candidate for candidate in candidates if candidate not in known]
        known |= zip(new, scored(new, SEARCH_FOLD), strict=True)
        best = min(candidates, key=lambda candidate: known[candidate].mean)
    contenders = {"start": start} if best == start else {"start": start, "found": best}
    scores = scored([*contenders.values()], DECISION_FOLD)
    chosen, standing = None, merged(DECISION_FOLD)
    over_merged, deciding = scores[-1].compared_with(standing), {}
    for (name, candidate), score in zip(contenders.items(), scores, strict=True):
        deciding[name] = score.compared_with(standing, among=len(contenders))
        if deciding[name].is_clear:
            chosen, standing = candidate, score
    over_start = None if best == start else scores[-1].compared_with(scores[0])
    return Choice(chosen, best, trials, deciding, over_start, over_merged)


def steps_from(at: Candidate, name: str) -> list[Candidate]:
    """Candidates that differ in one setting: lam by factors, rho (above 0) and alpha (from 0 to 1) by steps."""
    if name == "lam":
        values = [at.lam * factor for factor in LAM_FACTORS]
    elif name == "rho":
        values = [at.rho + step for step in RHO_STEPS if at.rho + step > 0]
    else:
        values = [min(1.0, max(0.0, at.alpha + step)) for step in ALPHA_STEPS]
    candidates = [replace(at, **{name: round(value, 12)}) for value in values]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate != at]
