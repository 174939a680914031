"""The verdict: how far final features are from the experts', before and after, and the checks.

First the numbers, then the sentences that fixed templates make of them, then the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from driftlens.records.before_after import change_in_words, mean_sentences
from driftlens.records.checks import CheckReport, Status, self_checks
from driftlens.records.intervals import Interval
from driftlens.records.outcomes import Measure, TaskMeans, outcomes, task_means
from driftlens.records.outcomes import Outcome as VariantOutcome
from driftlens.records.reading import Kind, estimate, is_measured
from driftlens.records.run import DriftRun
from driftlens.records.tables import plain
from driftlens.variants import control_of, part_of, title
from driftlens_reports import facts
from driftlens_reports.content import Change, Estimate, Outcome, Table, Verdict, sheet_table, table

_RELATIONS = {"<=": "≤", ">=": "≥"}


def _compared(run: DriftRun) -> tuple[str | None, str | None, str | None]:
    """The merged model or what takes its place, the anchor alone, and the calibration added last; None where absent."""
    others = [name for name in run.variants if part_of(name) in ("merged", "baseline")]
    before = "merged" if "merged" in others else others[0] if others else None
    calibrated = [name for name in run.variants if part_of(name) == "calibrated"]
    if not calibrated:
        return before, None, None
    control = control_of(calibrated[-1].partition(":")[2])
    return before, control if control in run.variants else None, calibrated[-1]


def _change(found: TaskMeans, compared: Sequence[str | None]) -> Change:
    measure = found.about
    means = [None if name is None else _estimate(found.means[name]) for name in compared]
    before, control, after = means
    change = _estimate(found.change)
    return Change(
        measure=measure.title,
        kind=measure.kind,
        worse=measure.worse,
        num_tasks=len(found.tasks),
        before=before,
        control=control,
        after=after,
        change=change,
        relative_change=plain(change.value / before.value) if change and before and before.value else None,
    )


def _estimate(found: Interval) -> Estimate | None:
    if not is_measured(found.value):
        return None
    return Estimate(value=found.value, low=plain(found.low), high=plain(found.high), n=found.n)


def verdict_of(run: DriftRun) -> Verdict:
    """The verdict on a run: its merged model, and the calibration that was added last.

    Raises:
        RunError: a table can't be read.
    """
    before, control, after = compared = _compared(run)
    means = task_means(run, [name for name in compared if name is not None])
    judged = after or before
    worst = max(
        (entry for entry in outcomes(run, [judged] if judged else []) if is_measured(entry.relative.value)),
        key=lambda entry: entry.relative.value,
        default=None,
    )
    outcome = outcome_of(self_checks(run))
    return Verdict(
        before=before,
        control=control,
        after=after,
        changes=tuple(_change(entry, compared) for entry in means),
        worst_task=worst.task if worst else None,
        worst_drift=worst.relative.value if worst else None,
        self_checks=outcome,
        sentences=tuple(_sentences(run, compared, means, worst, outcome)),
    )


def verdict_tables(run: DriftRun, verdict: Verdict) -> list[Table]:
    """The means of the verdict, and the final drift of every task and variant."""
    return [_means_table(verdict), sheet_table(facts.final_sheet(run))]


def outcome_of(report: CheckReport) -> Outcome:
    """How many checks ended how."""
    ends: tuple[Status, ...] = ("pass", "warn", "fail", "skip")
    passed, warned, failed, skipped = (report.count(status) for status in ends)
    return Outcome(passed=passed, warned=warned, failed=failed, skipped=skipped)


def _means_table(verdict: Verdict) -> Table:
    """A row per measure and variant, the anchor alone among them, and one for the change from before to after."""
    names = [title(name) if name else "" for name in (verdict.before, verdict.control, verdict.after)]
    rows = [
        (change.measure, model, at.value, at.low, at.high, change.num_tasks, at.n)
        for change in verdict.changes
        for model, at in (
            *zip(names, (change.before, change.control, change.after), strict=True),
            ("change", change.change),
        )
        if at is not None
    ]
    return table(
        "verdict",
        "Means over tasks",
        {
            **{"measure": "text", "model": "text", "mean": "number", "95 % low": "number"},
            **{"95 % high": "number", "tasks": "count", "samples": "count"},
        },
        rows,
        "Relative drift and shares of right answers are fractions. Intervals are over samples: the tasks are those of "
        "this run.",
    )


def _sentences(
    run: DriftRun,
    compared: Sequence[str | None],
    means: Sequence[TaskMeans],
    worst: VariantOutcome | None,
    outcome: Outcome,
) -> Iterator[str]:
    """The verdict in words; the anchor alone is a row of the tables."""
    if not means:
        yield "Nothing was measured that a verdict could rest on."
    before, control, after = compared
    hidden = {control} - {before}
    told = [
        replace(entry, means={name: mean for name, mean in entry.means.items() if name not in hidden})
        for entry in means
    ]
    yield from mean_sentences(told, len(run.tasks))
    if worst is not None:
        among = f" of {len(run.tasks)} tasks" if len(run.tasks) > 1 else ""
        yield (
            f"Worst{among}: {worst.task}, where the final feature of {title(worst.variant)} is "
            f"{estimate(worst.relative, 'share', counted=True)} of the expert's norm away, cosine "
            f"{estimate(worst.cosine, 'number')}."
        )
    if after is None:
        yield "Not calibrated: `driftlens calibrate RUN --name NAME` adds a variant to compare with."
    yield check_sentence(outcome, "self-check")


def signed(change: Change) -> str:
    """A change in words, with its interval."""
    assert change.change is not None and change.before is not None
    measure, at = Measure(change.measure, change.kind, change.worse), change.change
    ends = (float("nan") if end is None else end for end in (at.low, at.high))
    return change_in_words(measure, change.before.value, Interval(at.value, *ends, at.n))


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
