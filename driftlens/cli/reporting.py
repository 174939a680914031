"""The command that reads a run out: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftlens.cli.app import JsonFlag, app, say, say_json


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    formats: Annotated[
        str,
        typer.Option("--format", help="html, html-light, json, md, csv, latex; several joined by commas."),
    ] = "html",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; the run's own `reports` if left out.")
    ] = None,
    sections: Annotated[
        str,
        typer.Option(
            help="summary, standard, calibration or full; or names of sections joined by commas, such as layers,checks."
        ),
    ] = "standard",
    raw: Annotated[bool, typer.Option("--raw", help="Also charts and tables of single samples.")] = False,
    checks: Annotated[
        Path | None, typer.Option("--checks", metavar="FILE", help="YAML file of checks to show results of.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a drift report: what a run found, in sentences, tables and charts made from its numbers."""
    from driftlens_reports.build import Report
    from driftlens_reports.sections.outline import PRESETS

    chosen = _parts(sections)
    is_preset = len(chosen) == 1 and chosen[0] in PRESETS
    made = Report(
        run,
        chosen[0] if is_preset else "standard",
        sections=None if is_preset else chosen,
        raw=raw,
        checks=checks,
    )
    wanted = _parts(formats)
    paths = made.attach(wanted) if out is None else made.save(out, wanted)
    if as_json:
        say_json([str(path) for path in paths])
        return
    for path in _beginnings(paths):
        say(f"wrote {path}")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _beginnings(paths: list[Path]) -> list[str]:
    """A line per file, but one per folder of many files."""
    folders = dict.fromkeys(path.parent for path in paths if path.parent.name in ("csv", "latex"))
    files = [str(path) for path in paths if path.parent not in folders]
    counts = [(folder, sum(path.parent == folder for path in paths)) for folder in folders]
    return [*files, *(f"{count} files in {folder}" for folder, count in counts)]
