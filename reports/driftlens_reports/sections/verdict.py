"""The verdict: how far final features are from the experts', before and after, and whose doing the change is."""

from __future__ import annotations

from driftlens.records.checks import CheckReport, Status, run_self_checks
from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports import facts
from driftlens_reports.content import Change, Outcome, Section, Table, Verdict
from driftlens_reports.sections.comparison import changes, compared_variants
from driftlens_reports.sections.outline import TITLES
from driftlens_reports.sections.tabulate import table
from driftlens_reports.sections.verdict_words import verdict_sentences


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


def verdict_section(run: DriftRun, verdict: Verdict) -> Section:
    """The verdict in sentences, its means, and the final drift of every task and variant."""
    tables = [_change_table(verdict)] if verdict.changes else []
    final = _final_table(run)
    return Section(
        name="verdict",
        title=TITLES["verdict"],
        sentences=verdict.sentences,
        tables=(*tables, *([final] if final.rows else [])),
    )


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
            "task": "text",
            "model": "text",
            "L2 drift": "number",
            "relative drift": "share",
            "of base distance": "share",
            "cosine": "number",
            "samples": "count",
        },
        cells,
        note="Means over diagnosis samples. Relative: against the norm of the expert's feature. Of base distance: "
        "against the distance from base to expert.",
    )
