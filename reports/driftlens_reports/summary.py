"""A saved run in one screen of text."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports import facts
from driftlens_reports.wording import check_sentence, number, origin_sentence, percent


def summary(run: DriftRun) -> str:
    """What a run found, in plain text: final drift, accuracy, where drift comes from, self-checks.

    Nothing is said that the tables do not hold; a number that is null reads "not measured".

    Raises:
        RunError: a table can't be read.
    """
    parts = [
        _heading(run),
        _section("Final feature against each task's expert (mean over samples)", _drift_lines(run)),
        _section("Accuracy on test samples", _accuracy_lines(run)),
        _section(
            "Where the final drift comes from", [origin_sentence(entry) for entry in facts.origins(run)]
        ),
        _section("Self-checks", [check_sentence(check) for check in facts.self_checks(run)]),
        _section("Notices", list(run.manifest.notices)) if run.manifest.notices else "",
    ]
    return _printable("\n\n".join(part for part in parts if part)) + "\n"


def _heading(run: DriftRun) -> str:
    return "\n".join([f"{run.name} ({run.id})", *facts.stamps(run)])


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines or [facts.NOT_MEASURED])])


def _drift_lines(run: DriftRun) -> list[str]:
    rows = [
        [row.task, row.variant, number(row.drift), number(row.relative), number(row.cosine), str(row.n)]
        for row in facts.final_drift(run)
    ]
    header = ["task", "variant", "L2 drift", "relative", "cosine", "samples"]
    return _aligned([header, *rows], num_names=2) if rows else []


def _accuracy_lines(run: DriftRun) -> list[str]:
    found = facts.accuracies(run)
    variants = facts.accuracy_variants(found)
    rows = [
        [task, *(percent(values.get(variant, float("nan"))) for variant in variants)]
        for task, values in found.items()
    ]
    return _aligned([["task", *variants], *rows], num_names=1) if rows else []


def _aligned(rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    """Columns as wide as a terminal shows them: first the names, to the left, then numbers, to the right."""
    from rich.cells import cell_len

    clean = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(cell_len(row[column]) for row in clean) for column in range(len(clean[0]))]
    lines = []
    for row in clean:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            cell + gap if column < num_names else gap + cell
            for column, (cell, gap) in enumerate(zip(row, gaps, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _printable(text: str) -> str:
    """`text` without control characters: a name in a run must not steer the terminal that shows it."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\ufffd" for character in text
    )
