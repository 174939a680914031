"""Saved runs in plain text, for the terminal: one run, its accuracy, a folder of runs, a verification."""

from __future__ import annotations

import math
from collections.abc import Sequence

from driftlens.records.listing import RunSummary
from driftlens.records.run import DriftRun
from driftlens.records.verify import VerifyResult
from driftlens_reports import facts
from driftlens_reports.columns import aligned, printable
from driftlens_reports.story import story
from driftlens_reports.wording import check_sentence, number, origin_sentence, percent, size


def summary(run: DriftRun) -> str:
    """What a run found: final drift, accuracy, where the drift comes from, self-checks.

    Nothing is said that the tables do not hold; a number that is null reads "not measured".

    Raises:
        RunError: a table can't be read.
    """
    parts = [
        [f"{run.name} ({run.id})", *facts.stamps(run)],
        _section("Final feature against each task's expert (mean over samples)", _drift_lines(run)),
        _section("Accuracy on test samples", _accuracy_lines(run)),
        _section("What happened", story(run)),
        _section("Where the final drift comes from", [origin_sentence(task) for task in facts.origins(run)]),
        _section("Self-checks", [check_sentence(check) for check in facts.self_checks(run)]),
    ]
    if run.manifest.notices:
        parts.append(_section("Notices", run.manifest.notices))
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts)


def accuracy_text(run: DriftRun) -> str:
    """Accuracy of every variant on every task, one line per task.

    Raises:
        RunError: the table can't be read.
    """
    return "\n".join(_accuracy_lines(run) or [facts.NOT_MEASURED])


def listing_text(runs: Sequence[RunSummary]) -> str:
    """One line per run; below it, why a run can't be read, and what later work left undone."""
    header = ["folder", "name", "state", "tasks", "variants", "size", "largest final drift"]
    rows = []
    for run in runs:
        counts = [str(len(run.tasks)), str(len(run.variants)), size(run.bytes)]
        rows.append([run.path.name, run.name, run.state, *counts, _largest_drift(run)])
    problems = [printable(f"{run.path.name}: {run.problem}") for run in runs if run.problem]
    left = [printable(f"{run.path.name}: {text}") for run in runs for text in run.left]
    return "\n".join([*aligned([header, *rows], num_names=3), *problems, *left])


def verification_text(result: VerifyResult) -> str:
    """What `verify` found: the verdict first, then the files that differ."""
    verdict = "unchanged" if result.ok else "not as they were written"
    found = (("missing", result.missing), ("changed", result.changed), ("not listed", result.unlisted))
    files = [printable(f"{how}: {name}") for how, names in found for name in names]
    return "\n".join([f"{result.checked} files checked: {verdict}", *files])


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines or [facts.NOT_MEASURED])]


def _drift_lines(run: DriftRun) -> list[str]:
    rows = [
        [row.task, row.variant, number(row.drift), number(row.relative), number(row.cosine), str(row.n)]
        for row in facts.final_drift(run)
    ]
    header = ["task", "variant", "L2 drift", "relative", "cosine", "samples"]
    return aligned([header, *rows], num_names=2) if rows else []


def _accuracy_lines(run: DriftRun) -> list[str]:
    found = facts.accuracies(run)
    variants = facts.accuracy_variants(found)
    rows = [
        [task, *(percent(values.get(variant, math.nan)) for variant in variants)]
        for task, values in found.items()
    ]
    return aligned([["task", *variants], *rows], num_names=1) if rows else []


def _largest_drift(run: RunSummary) -> str:
    if not run.final_drift:
        return facts.NOT_MEASURED
    worst = max(run.final_drift, key=lambda task: run.final_drift[task])
    return f"{number(run.final_drift[worst])} ({worst})"
