"""Before and after in means over tasks: which variants a verdict compares, and how each measure changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from driftlens.records.before_after import accuracy_change
from driftlens.records.compare import accuracy_of, drift_changes
from driftlens.records.intervals import Interval, mean_over_tasks
from driftlens.records.run import DriftRun
from driftlens.variants import control_of, part_of
from driftlens_reports import facts
from driftlens_reports.content import Change, Kind

Worse = Literal["higher", "lower"]

_MEASURES: tuple[tuple[str, Kind, Worse], ...] = (
    ("final drift", "number", "higher"),
    ("relative drift", "share", "higher"),
    ("cosine to the expert", "number", "lower"),
    ("accuracy", "share", "lower"),
)


@dataclass(frozen=True)
class Compared:
    """The variants of the verdict; None for one that the run has not.

    Attributes:
        before: the merged model, or what takes its place.
        control: the anchor alone.
        after: the calibration that was added last.
    """

    before: str | None
    control: str | None
    after: str | None

    @property
    def there(self) -> list[str]:
        """Those that the run has."""
        return [name for name in (self.before, self.control, self.after) if name is not None]

    @property
    def judged(self) -> str | None:
        """The variant that a reader of the verdict would use."""
        return self.after or self.before


def compared_variants(run: DriftRun) -> Compared:
    """Which variants of a run its verdict compares."""
    others = [name for name in run.variants if part_of(name) in ("merged", "baseline")]
    before = "merged" if "merged" in others else others[0] if others else None
    calibrated = [name for name in run.variants if part_of(name) == "calibrated"]
    if not calibrated:
        return Compared(before, None, None)
    control = control_of(calibrated[-1].partition(":")[2])
    return Compared(before, control if control in run.variants else None, calibrated[-1])


def changes(run: DriftRun, compared: Compared) -> Iterator[Change]:
    """The change of every measure that was taken of all compared variants on at least one task.

    Raises:
        RunError: a table can't be read.
    """
    final = {(entry.task, entry.variant): entry for entry in facts.final_drift(run)}
    unknown = facts.FinalDrift("", "", math.nan, math.nan, math.nan, 0)
    readers: Sequence[Callable[[str, str], float]] = (
        lambda task, variant: final.get((task, variant), unknown).drift,
        lambda task, variant: final.get((task, variant), unknown).relative,
        lambda task, variant: final.get((task, variant), unknown).cosine,
        lambda task, variant: accuracy_of(run, task, variant)[0],
    )
    for (measure, kind, worse), read in zip(_MEASURES, readers, strict=True):
        values = {task: [read(task, variant) for variant in compared.there] for task in run.tasks}
        whole = {
            task: row for task, row in values.items() if row and not any(math.isnan(value) for value in row)
        }
        if whole:
            means = [sum(column) / len(whole) for column in zip(*whole.values(), strict=True)]
            interval = _interval(run, measure, list(whole), compared, final)
            by_variant = dict(zip(compared.there, means, strict=True))
            yield _change(measure, kind, worse, len(whole), by_variant, compared, interval)


def _interval(
    run: DriftRun,
    measure: str,
    tasks: Sequence[str],
    compared: Compared,
    final: Mapping[tuple[str, str], facts.FinalDrift],
) -> Interval:
    """The change of a measure's mean over tasks with its interval; NaN ends where its samples are not stored."""
    if compared.before is None or compared.after is None or measure == "cosine to the expert":
        return Interval(math.nan)
    pair = (compared.before, compared.after)
    if measure == "accuracy":
        changes = [accuracy_change(run, task, pair) for task in tasks]
        return mean_over_tasks([Interval(at.change, at.low, at.high) for at in changes])
    last, found = run.layer_index("final"), []
    for task in tasks:
        start = final[task, compared.before]
        change = drift_changes(run, run, task, pair).get(last)
        if change is None or not start.drift:
            return Interval(math.nan)
        # The expert's norm, by which drift is divided, is taken as known.
        scale = start.relative / start.drift if measure == "relative drift" else 1.0
        found.append(change.difference.scaled(scale))
    return mean_over_tasks(found)


def _change(
    measure: str,
    kind: Kind,
    worse: Worse,
    num_tasks: int,
    means: dict[str, float],
    compared: Compared,
    interval: Interval,
) -> Change:
    before, control, after = (
        None if name is None else means[name] for name in (compared.before, compared.control, compared.after)
    )
    change = _difference(after, before)
    relative = None if change is None or not before else change / before
    return Change(
        measure=measure,
        kind=kind,
        worse=worse,
        num_tasks=num_tasks,
        before=before,
        control=control,
        after=after,
        change=change,
        change_low=None if math.isnan(interval.low) else interval.low,
        change_high=None if math.isnan(interval.high) else interval.high,
        relative_change=relative,
        rescaling=_difference(control, before),
        calibration=_difference(after, control),
    )


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other
