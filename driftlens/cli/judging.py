"""Commands that judge a run: check, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.cli.app import JsonFlag, app, say, say_json
from driftlens.errors import ChecksFailedError

if TYPE_CHECKING:
    from driftlens.records.checks import CheckReport
    from driftlens.records.compare import Comparison
    from driftlens.records.equality import Equality


@app.command()
def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    tests: Annotated[
        Path | None,
        typer.Option(
            "--tests", metavar="FILE", help="YAML file of checks; the built-in self-checks if left out."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write the results as JUnit XML.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Hold a run's numbers against bounds; exit code 3 if one fails. What was not measured is skipped."""
    from driftlens.checking import check as judge
    from driftlens.files import write_text_atomic
    from driftlens.records.checks import junit_xml
    from driftlens_reports.verdicts import checks_text

    report = judge(run, tests)
    if junit is not None:
        write_text_atomic(junit, junit_xml(report))
    say_json(_report_document(report)) if as_json else say(checks_text(report))
    if report.failed:
        raise typer.Exit(ChecksFailedError.exit_code)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The run before.")],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="[B]", help="The run after; left out, two variants of A are compared."),
    ] = None,
    before: Annotated[
        str | None, typer.Option(help="Variant of A; merged, or with B every variant both have.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Variant of B; like --before, or without B the calibration added last.")
    ] = None,
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Compare also where samples, tasks or experts differ.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Demand equal numbers within this relative tolerance; exit code 3 if not."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what changes between two runs or two variants: drift, flips, accuracy with intervals."""
    from driftlens.records.compare import compare as compared
    from driftlens.records.equality import TOLERANCE, equality
    from driftlens_reports.verdicts import comparison_text, equality_text

    found = compared(first, second, before=before, after=after, allow_mismatch=allow_mismatch)
    if second is None and tolerance is not None:
        raise typer.BadParameter("--tolerance compares two runs; give the second one")
    limit = TOLERANCE if tolerance is None else tolerance
    equal = None if second is None else equality(found.before, found.after)
    if as_json:
        say_json(_comparison_document(found, equal, limit))
    else:
        say("\n\n".join([comparison_text(found), *([] if equal is None else [equality_text(equal, limit)])]))
    if tolerance is not None and equal is not None and not equal.within(limit):
        raise typer.Exit(ChecksFailedError.exit_code)


def _report_document(report: CheckReport) -> dict[str, Any]:
    from dataclasses import asdict

    from driftlens.records.tables import plain

    return {
        "run": report.run.id,
        "ok": not report.failed,
        "executed": report.executed,
        **{status: report.count(status) for status in ("pass", "warn", "fail", "skip")},
        "results": [
            {name: plain(value) for name, value in asdict(result).items()} for result in report.results
        ],
    }


def _comparison_document(found: Comparison, equal: Equality | None, tolerance: float) -> dict[str, Any]:
    from dataclasses import asdict

    from driftlens.records.tables import plain, plain_rows

    document: dict[str, Any] = {
        "before": {"id": found.before.id, "name": found.before.name},
        "after": {"id": found.after.id, "name": found.after.name},
        "pairs": [list(pair) for pair in found.pairs],
        "mismatches": list(found.mismatches),
        "notes": list(found.notes),
        "tasks": plain_rows(found.tasks),
        "layers": plain_rows(found.layers),
        "gains": plain_rows(found.gains),
        "equality": None,
    }
    if equal is not None:
        values = {name: plain(value) for name, value in asdict(equal).items()}
        document["equality"] = {**values, "tolerance": tolerance, "within": equal.within(tolerance)}
    return document
