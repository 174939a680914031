"""The frame of findings: one row for every number a run tells, with the two ends of its 95 % interval.

A row says how a variant does by one measure on one task, or how that changes from another variant, `against`, to it.
Rows whose task is empty are means over `tasks`. Verdict, tables, sentences and pages are made from such rows. What
several surfaces say of rows stands here once, and claims no more than a row's interval supports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

from driftlens.results.formatting import Kind, is_measured, percent_interval, points, points_interval, signed
from driftlens.utils.intervals import Interval, Paired


@dataclass(frozen=True)
class Measure:
    """What variants are measured by, and on which samples.

    `name` stands in the frame: drift, relative, cosine or flips; of scores the name of their metric, or "score" where a
    mean is over several.
    """

    title: str
    kind: Kind
    worse: Literal["higher", "lower"]
    split: Literal["diagnosis", "test"] = "diagnosis"
    name: str = ""

    @property
    def role(self) -> str:
        """The name, or "score" of all that tasks are judged by."""
        return "score" if self.split == "test" else self.name

    @property
    def sign(self) -> int:
        """1 where a higher value is better, else -1."""
        return 1 if self.worse == "lower" else -1


@dataclass(frozen=True)
class Finding(Interval):
    """One row of the frame: what a `variant` has, or how that changed `against` another; NaN what was not measured.

    Attributes:
        task: empty for a mean over `tasks`.
        paired: of a change, whether its interval rests on both variants' results of the same samples; None of others.
        answers: of a change of a share, counts of the answers that changed on the samples for which both are stored.
        answered: which samples those are, "test" or "diagnosis".
    """

    about: Measure = field(kw_only=True)
    task: str = field(default="", kw_only=True)
    variant: str = field(default="", kw_only=True)
    against: str = field(default="", kw_only=True)
    paired: bool | None = field(default=None, kw_only=True)
    tasks: tuple[str, ...] = field(default=(), kw_only=True)
    answers: Paired | None = field(default=None, kw_only=True)
    answered: str = field(default="", kw_only=True)

    @property
    def is_measured(self) -> bool:
        """Whether there is a number."""
        return not math.isnan(self.value)

    @property
    def interval(self) -> Interval:
        """The number and its ends alone."""
        return Interval(self.value, self.low, self.high, self.n)

    @property
    def side(self) -> int:
        """Of a change: 1 where the whole interval says better, -1 where worse, 0 where it can't tell."""
        return self.about.sign * ((self.low > 0) - (self.high < 0))


def finding(
    about: Measure,
    numbers: Interval,
    task: str,
    variant: str,
    against: str = "",
    *,
    paired: bool | None = None,
) -> Finding:
    """The row of these numbers."""
    return Finding(
        *numbers.ends, numbers.n, about=about, task=task, variant=variant, against=against, paired=paired
    )


COLUMNS = ("measure", "task", "variant", "against", "value", "low", "high", "n", "paired", "kind", "worse")


def frame_of(rows: Iterable[Finding]) -> pd.DataFrame:
    """The rows as a tidy frame with `COLUMNS`; an empty task is the mean, an empty `against` no change."""
    cells = [
        (
            *(row.about.name, row.task, row.variant, row.against, *row.ends, row.n),
            *(row.paired, row.about.kind, row.about.worse),
        )
        for row in rows
    ]
    return pd.DataFrame(cells, columns=[*COLUMNS]).astype({"paired": "boolean"})


def pairing(paired: Mapping[str, bool | None]) -> str:
    """How the intervals of changes were taken, by the name of each: in pairs of samples, or as if of other samples."""
    apart = [name for name, is_paired in paired.items() if not is_paired]
    if not paired:
        return ""
    if not apart:
        return "95 % intervals of changes are paired by sample."
    where = "" if len(apart) == len(paired) else f" of {', '.join(apart)}"
    return (
        f"95 % intervals of changes{where} are not paired, as single answers are not stored: they take the two scores "
        "for independent and are wider than they need be where both models answered the same samples; "
        "a new analysis of its spec stores them."
    )


def paired_by_task(rows: Sequence[Finding]) -> dict[str, bool]:
    """By task, whether all changes on it that have an interval are paired."""
    measured = [row for row in rows if is_measured(row.low)]
    return {row.task: all(other.paired for other in measured if other.task == row.task) for row in measured}


def change_in_words(measure: Measure, before: float, change: Interval) -> str:
    """A change with its interval: a share's in points, a length's against the one before, else in its own unit.

    Where the interval holds 0, no change is claimed. Empty where nothing is compared.
    """
    if not is_measured(change.value):
        return ""
    if measure.kind == "share":
        text, ends = f"{points(change.value)} points", points_interval(change.low, change.high)
    elif measure.worse == "higher" and before:
        relative = change.scaled(1 / before)
        text, ends = f"{points(relative.value)} %", percent_interval(relative.low, relative.high)
    else:
        text = signed(change.value)
        ends = f"{signed(change.low)} to {signed(change.high)}" if is_measured(change.low) else ""
    claimed = "no clear change, " if change.low <= 0 <= change.high else ""
    return f"{claimed}{text}{f' ({ends})' if ends else ''}"
