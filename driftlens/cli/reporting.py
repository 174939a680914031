"""Commands that read runs out: report, export, view."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftlens.base.errors import DataError
from driftlens.cli.app import JsonFlag, RunFolder, app, flagged, note, say, say_json
from driftlens.spec.requests import ExportRequest, ViewRequest, parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driftlens_reports.paper.export import Exported


@app.command()
def report(
    run: RunFolder,
    formats: Annotated[
        str,
        typer.Option("--format", help="html, html-light, json, md, csv; several joined by commas."),
    ] = "html",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; the run's own `reports` if left out.")
    ] = None,
    sections: Annotated[
        str,
        typer.Option(
            help="summary, standard, calibration or full (single samples, too); or sections joined by commas, such as "
            "layers,checks."
        ),
    ] = "standard",
    checks: Annotated[
        Path | None, typer.Option("--checks", metavar="FILE", help="YAML file of checks to show results of.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a drift report: what a run found, in sentences, tables and charts made from its numbers."""
    from driftlens_reports.build import Report
    from driftlens_reports.sections import PRESETS

    chosen = parts(sections)
    is_preset = len(chosen) == 1 and chosen[0] in PRESETS
    made = Report(
        run,
        chosen[0] if is_preset else "standard",
        sections=None if is_preset else chosen,
        checks=checks,
    )
    paths = made.attach(parts(formats)) if out is None else made.save(out, parts(formats))
    if as_json:
        say_json(paths)
        return
    for path in _beginnings(paths):
        say(f"wrote {path}")


def _beginnings(paths: list[Path]) -> list[str]:
    """A line per file, but one per folder of many files."""
    folders = dict.fromkeys(path.parent for path in paths if path.parent.name == "csv")
    files = [str(path) for path in paths if path.parent not in folders]
    counts = [(folder, sum(path.parent == folder for path in paths)) for folder in folders]
    return [*files, *(f"{count} files in {folder}" for folder, count in counts)]


@app.command()
@flagged
def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    request: ExportRequest,
    as_json: JsonFlag = False,
) -> None:
    """Write figures and tables for a paper, with their numbers, provenance and a caption draft."""
    from driftlens.runs.run import open_run
    from driftlens_reports.card import save_card
    from driftlens_reports.paper.exhibit import ExhibitOptions
    from driftlens_reports.paper.export import export as write

    names = [*request.figures, *request.tables]
    if request.card:
        for run in runs:
            place = request.out / ("card.png" if len(runs) == 1 else f"{run.resolve().name}/card.png")
            note(f"wrote {' and '.join(map(str, save_card(run, place)))}")
        if not names:
            return
    written = write(
        [open_run(run) for run in runs],
        request.out,
        names=names or None,
        formats=parts(request.formats),
        options=ExhibitOptions.of(request),
    )
    _tell(written, runs, request.out, as_json)
    if request.strict and any(entry.missing and entry.files for entry in written):
        raise typer.Exit(DataError.exit_code)


def _tell(written: Sequence[Exported], runs: Sequence[Path], out: Path, as_json: bool) -> None:
    """Print what was written to stdout and what is missing to stderr, with commands to copy where there is one run."""
    if as_json:
        say_json(
            [
                {
                    "exhibit": entry.name,
                    "files": entry.files,
                    "missing": [{"name": part.name, "missing": part.missing} for part in entry.missing],
                }
                for entry in written
            ]
        )
        return
    run = shlex.quote(str(runs[0])) if len(runs) == 1 else "RUN"
    for entry in written:
        if entry.files:
            say(f"{entry.name}: {' '.join(path.suffix.removeprefix('.') for path in entry.files)}")
        for part in entry.missing:
            what = f"  {entry.name} lacks {part.name}" if entry.files else f"{entry.name} is not written"
            missing = re.sub(r"\bRUN\b", lambda _: run, part.missing)
            note(f"{what}: {missing}")
    say(f"{sum(len(entry.files) for entry in written)} files in {out}")


@app.command()
@flagged
def view(run: RunFolder, request: ViewRequest) -> None:
    """Write a page to explore samples in: they move from model to model; select, filter, search, export. No server."""
    from driftlens_reports.explorer import Explorer

    say(f"wrote {Explorer(run, request).save(request.out)}")
