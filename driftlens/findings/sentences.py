"""Sentences that several surfaces say of rows of the frame; none claims more than its row's interval supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlens.base.intervals import Interval
from driftlens.findings.frame import Finding, Measure
from driftlens.findings.reading import is_measured, percent_interval, points, points_interval, signed


def pairing(paired: Mapping[str, bool | None]) -> str:
    """How the intervals of changes of a score were taken, by the name of each: by samples in pairs, or by counts."""
    apart = [name for name, is_paired in paired.items() if not is_paired]
    if not paired:
        return ""
    if not apart:
        return "95 % intervals of changes are paired by sample."
    where = "" if len(apart) == len(paired) else f" of {', '.join(apart)}"
    return (
        f"95 % intervals of changes{where} are not paired, as single answers are not stored: they take the two scores "
        "for independent and are wider than they need be where both models answered the same samples; "
        "`driftlens evaluate RUN --again` stores them."
    )


def paired_by_task(rows: Sequence[Finding]) -> dict[str, bool]:
    """By task, whether all changes on it that have an interval are paired."""
    known = [row for row in rows if is_measured(row.low)]
    return {row.task: all(other.paired for other in known if other.task == row.task) for row in known}


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
