"""The verdict: how far final features are from the experts', before and after, whose doing that is, and the checks.

First the numbers, then the sentences that fixed templates make of them, then the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from driftlens.records.before_after import accuracy_change
from driftlens.records.checks import CheckReport, Status, run_self_checks
from driftlens.records.compare import accuracy_of, drift_changes
from driftlens.records.intervals import Interval, mean_over_tasks
from driftlens.records.run import DriftRun
from driftlens.records.split import Split
from driftlens.records.tables import plain
from driftlens.variants import control_of, part_of, title
from driftlens_reports import facts
from driftlens_reports.content import Change, Kind, Outcome, Table, Verdict
from driftlens_reports.sections.tabulate import table
from driftlens_reports.wording import number, percent, percent_interval, points, points_interval

Worse = Literal["higher", "lower"]

_MEASURES: tuple[tuple[str, Kind, Worse], ...] = (
    ("final drift", "number", "higher"),
    ("relative drift", "share", "higher"),
    ("cosine to the expert", "number", "lower"),
    ("accuracy", "share", "lower"),
)
_RELATIONS = {"<=": "≤", ">=": "≥"}


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
        math.nan if name is None else means[name]
        for name in (compared.before, compared.control, compared.after)
    )
    split = Split(before, control, after)
    return Change(
        measure=measure,
        kind=kind,
        worse=worse,
        num_tasks=num_tasks,
        before=plain(before),
        control=plain(control),
        after=plain(after),
        change=plain(split.change),
        change_low=plain(interval.low),
        change_high=plain(interval.high),
        relative_change=plain(split.change / before) if before else None,
        rescaling=plain(split.rescaling),
        calibration=plain(split.calibration),
    )


def verdict_of(run: DriftRun) -> Verdict:
    """The verdict on a run: its merged model, and the calibration that was added last.

    Raises:
        RunError: a table can't be read.
    """
    compared = compared_variants(run)
    found = tuple(changes(run, compared))
    worst = _worst(run, compared.judged)
    outcome = outcome_of(run_self_checks(run))
    return Verdict(
        before=compared.before,
        control=compared.control,
        after=compared.after,
        changes=found,
        worst_task=worst.task if worst else None,
        worst_drift=worst.relative if worst else None,
        self_checks=outcome,
        sentences=tuple(verdict_sentences(run, compared, found, worst, outcome)),
    )


def verdict_tables(run: DriftRun, verdict: Verdict) -> list[Table]:
    """The means of the verdict, and the final drift of every task and variant."""
    return [_change_table(verdict), _final_table(run)]


def outcome_of(report: CheckReport) -> Outcome:
    """How many checks ended how."""
    ends: tuple[Status, ...] = ("pass", "warn", "fail", "skip")
    passed, warned, failed, skipped = (report.count(status) for status in ends)
    return Outcome(passed=passed, warned=warned, failed=failed, skipped=skipped)


def _worst(run: DriftRun, variant: str | None) -> facts.FinalDrift | None:
    measured = [
        entry
        for entry in facts.final_drift(run)
        if entry.variant == variant and facts.is_measured(entry.relative)
    ]
    return max(measured, key=lambda entry: entry.relative, default=None)


def _change_table(verdict: Verdict) -> Table:
    """One row per measure; differences in the measure's own unit, so percentages of a share are points."""
    heads = ("before", "anchor only", "after", "change", "by rescaling", "by calibration")
    rows = [(change.measure, change.num_tasks, *_in_row(change)) for change in verdict.changes]
    return table(
        "verdict",
        "Means over tasks",
        {"measure": "text", "tasks": "count", **dict.fromkeys(heads, "number")},
        rows,
        note="Relative drift and accuracy are fractions. Before: "
        f"{_named(verdict.before)}. Anchor only: {_named(verdict.control)}. After: {_named(verdict.after)}.",
    )


def _named(variant: str | None) -> str:
    return "none" if variant is None else title(variant)


def _in_row(change: Change) -> tuple[float | None, ...]:
    return (change.before, change.control, change.after, change.change, change.rescaling, change.calibration)


def _final_table(run: DriftRun) -> Table:
    rows = run.layers(layer="final") if run.manifest.layers else run.layers()
    to_base = rows.set_index(["task", "variant"])["drift_vs_base"].to_dict()
    cells = [
        (
            entry.task,
            title(entry.variant),
            entry.drift,
            entry.relative,
            to_base.get((entry.task, entry.variant)),
            entry.cosine,
            entry.n,
        )
        for entry in facts.final_drift(run)
    ]
    return table(
        "final-drift",
        "Final feature against each task's expert",
        {
            **{"task": "text", "model": "text", "L2 drift": "number", "relative drift": "share"},
            **{"of base distance": "share", "cosine": "number", "samples": "count"},
        },
        cells,
        note="Means over diagnosis samples. Relative: against the norm of the expert's feature. Of base distance: "
        "against the distance from base to expert.",
    )


def verdict_sentences(
    run: DriftRun,
    compared: Compared,
    changes: Sequence[Change],
    worst: facts.FinalDrift | None,
    outcome: Outcome,
) -> Iterator[str]:
    """The verdict in sentences.

    Args:
        run: the run.
        compared: the variants.
        changes: of every measure.
        worst: the task that is worst after calibration, or without one before; None where nothing is measured.
        outcome: how the self-checks ended.
    """
    if not changes:
        yield "Nothing was measured that a verdict could rest on."
    for change in changes:
        yield _change_sentence(change, compared, len(run.tasks))
    if worst is not None:
        among = f" of {len(run.tasks)} tasks" if len(run.tasks) > 1 else ""
        yield (
            f"Worst{among}: {worst.task}, where the final feature of {title(worst.variant)} is "
            f"{percent(worst.relative)} of the expert's norm away (cosine {number(worst.cosine)})."
        )
    yield from _credit_sentences(run, compared, changes)
    yield check_sentence(outcome, "self-check")


def _change_sentence(change: Change, compared: Compared, num_tasks: int) -> str:
    write = percent if change.kind == "share" else number
    of = f"{change.num_tasks} of " if change.num_tasks < num_tasks else ""
    over = (
        f"Mean {change.measure} over {of}{num_tasks} tasks" if num_tasks > 1 else change.measure.capitalize()
    )
    values = [(compared.before, change.before), (compared.after, change.after)]
    said = ", ".join(f"{title(name)} {write(value)}" for name, value in values if name and value is not None)
    if change.change is None:
        return f"{over}: {said}."
    return f"{over}: {said} ({signed(change)}{_interval_in_words(change)})."


def _interval_in_words(change: Change) -> str:
    """The 95 % interval of a change, in the unit that `signed` has; empty where it is not known."""
    if change.change_low is None or change.change_high is None:
        return ""
    if change.kind == "share":
        return f", 95 % interval {points_interval(change.change_low, change.change_high)}"
    scale = change.before if change.worse == "higher" and change.before else 1.0
    ends = (change.change_low / scale, change.change_high / scale)
    return f", 95 % interval {percent_interval(*ends)}"


def signed(change: Change) -> str:
    """A change in words: a share in points, a length relative to before, anything else in its own unit."""
    assert change.change is not None
    if change.kind == "share":
        return f"{100 * change.change:+.1f} points"
    if change.worse == "higher" and change.relative_change is not None:
        return f"{100 * change.relative_change:+.1f} %"
    return f"{change.change:+.4f}"


def _credit_sentences(run: DriftRun, compared: Compared, changes: Sequence[Change]) -> Iterator[str]:
    """How much of each change the anchor alone makes; where no control tells, that is said."""
    if compared.after is None:
        yield "Not calibrated: `driftlens calibrate RUN --name NAME` adds a variant to compare with."
        return
    if compared.control is None:
        info = run.manifest.calibrations.get(compared.after.partition(":")[2])
        yield (
            "No anchor other than the merged model was used, so none of the change is rescaling."
            if info is not None and not info.control
            else "No control shows what the anchor does by itself, so calibration and rescaling can't be told apart."
        )
        return
    for change in changes:
        if change.measure == "relative drift" or not change.change:
            continue
        assert change.rescaling is not None and change.calibration is not None
        yield (
            f"Of the change in {change.measure}, rescaling (the anchor alone) makes "
            f"{_part(change.rescaling, change)} and calibration {_part(change.calibration, change)}."
        )


def _part(value: float, change: Change) -> str:
    """A part of a change in the measure's own unit: parts that work against each other make no readable shares."""
    if change.kind == "share":
        return f"{points(value)} points"
    return f"{value:+.4g} feature units" if change.measure == "final drift" else f"{value:+.4f}"


def check_sentence(outcome: Outcome, noun: str) -> str:
    """How many checks hold, in words; that none was executed is said."""
    executed = outcome.passed + outcome.warned + outcome.failed
    if not executed:
        return f"No {noun} had the numbers it needs, so nothing is known."
    parts = [f"{outcome.passed} of {executed} {noun}s {'holds' if executed == 1 else 'hold'}"]
    parts += [f"{outcome.failed} failed"] if outcome.failed else []
    parts += [f"{outcome.warned} warned"] if outcome.warned else []
    parts += [f"{outcome.skipped} lack the numbers they need"] if outcome.skipped else []
    return f"{'; '.join(parts)}."


def checks_parts(self_checks: CheckReport, checks: CheckReport | None) -> tuple[list[str], list[Table]]:
    """Sentences and tables of the self-checks that every run has, and of the user's checks where there are any."""
    sentences = [check_sentence(outcome_of(self_checks), "self-check")]
    tables = [_check_table("self-checks", "Self-checks: claims that are exact in theory", self_checks)]
    if checks is not None:
        sentences.append(check_sentence(outcome_of(checks), "check"))
        tables.append(_check_table("checks", "Checks asked for", checks))
    return sentences, tables


def _check_table(name: str, heading: str, report: CheckReport) -> Table:
    rows = [
        (
            result.title,
            result.status,
            result.value,
            f"{_RELATIONS.get(result.relation, result.relation)} {result.threshold:g}",
            result.margin,
            result.n,
            result.where,
            result.reason,
        )
        for result in report.results
    ]
    kinds: dict[str, Kind] = {
        **{"check": "text", "status": "text", "value": "error", "wanted": "text"},
        **{"margin": "error", "rows": "count", "where": "text", "reason": "text"},
    }
    return table(name, heading, kinds, rows)
