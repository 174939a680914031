"""The verdict as the content of a report, its tables, and the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driftlens.base.intervals import Interval
from driftlens.base.variants import control_of, part_of, title
from driftlens.findings.checks import CheckReport, Status, self_checks
from driftlens.findings.features import RELATIVE
from driftlens.findings.frame import change_in_words
from driftlens.findings.measures import common, level, mean, mean_change
from driftlens.findings.summary import final_sheet
from driftlens.findings.table import Table
from driftlens.findings.verdict import shareable, task_sheet, verdict
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import plain
from driftlens_reports.content import (
    Change,
    Estimate,
    Gap,
    Outcome,
    Verdict,
)


def _compared(run: DriftRun) -> tuple[str | None, str | None, str | None]:
    """The merged model or what takes its place, the anchor alone, and the calibration added last; None where absent."""
    others = [name for name in run.variants if part_of(name) in ("merged", "baseline")]
    before = "merged" if "merged" in others else others[0] if others else None
    calibrated = [name for name in run.variants if part_of(name) == "calibrated"]
    if not calibrated:
        return before, None, None
    control = control_of(calibrated[-1].partition(":")[2])
    return before, control if control in run.variants else None, calibrated[-1]


def _changes(run: DriftRun, compared: Sequence[str | None]) -> Iterator[Change]:
    """A row per measure that was taken of all compared variants."""
    there = [name for name in compared if name is not None]
    for about, tasks in common(run, there):
        means = {name: mean(run, about, tasks, name) for name in there}
        before, control, after = (means.get(name or "") for name in compared)
        change = mean_change(run, about, tasks, (there[0], there[-1])) if len(there) > 1 else None
        yield Change(
            measure=about.title,
            kind=about.kind,
            worse=about.worse,
            num_tasks=len(tasks),
            before=_estimate(before),
            control=_estimate(control),
            after=_estimate(after),
            change=_estimate(change),
            words=change_in_words(about, before.value, change) if change and before else "",
            relative_change=plain(change.value / before.value)
            if change and before and before.value
            else None,
        )


def _estimate(numbers: Interval | None) -> Estimate | None:
    return None if numbers is None else Estimate.model_validate(numbers)


def verdict_of(run: DriftRun) -> Verdict:
    """The verdict on a run: its merged model, and the calibration that was added last."""
    found, compared = verdict(run), _compared(run)
    before, control, after = compared
    last = after or before
    drifts = {task: level(run, RELATIVE, task, last) for task in run.tasks if last}
    drifts = {task: drift for task, drift in drifts.items() if drift.is_measured}
    furthest = max(drifts, key=lambda task: drifts[task].value, default=None)
    return Verdict(
        measure=found.measure.title,
        tasks=found.tasks,
        means={name: Estimate.model_validate(numbers) for name, numbers in found.means.items()},
        gaps=tuple(Gap.model_validate(gap) for gap in found.gaps),
        worst=found.worst,
        bad_experts=found.bad_experts,
        source=found.source.name if found.source else "",
        source_share=_estimate(found.source.share if found.source else None),
        command=shareable(run, found.command),
        before=before,
        control=control,
        after=after,
        changes=tuple(_changes(run, compared)),
        worst_task=furthest,
        worst_drift=drifts[furthest].value if furthest else None,
        self_checks=outcome_of(self_checks(run)),
        sentences=tuple(shareable(run, text) for text in found.sentences),
    )


def verdict_tables(run: DriftRun, judged: Verdict) -> list[Table]:
    """A row per task, the means of the verdict, and the final drift of every task and variant."""
    tasks = task_sheet(run, verdict(run))
    return [tasks, _means_table(judged), final_sheet(run)]


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
    return Table.of(
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


def checks_sentence(outcome: Outcome, noun: str) -> str:
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
    sentences = [checks_sentence(outcome_of(self_checks), "self-check")]
    tables = [self_checks.table("self-checks", "Self-checks: claims that are exact in theory", "error")]
    if checks is not None:
        sentences.append(checks_sentence(outcome_of(checks), "check"))
        tables.append(checks.table("checks", "Checks asked for"))
    return sentences, tables
