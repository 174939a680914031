"""The command that writes a paper's figures and tables: export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftlens.cli.app import JsonFlag, app, note, say, say_json
from driftlens.errors import DataError, SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driftlens_reports.paper.export import Exported


@app.command()
def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    figures: Annotated[
        list[str] | None, typer.Option("--figure", metavar="ID", help="A figure; repeatable.")
    ] = None,
    tables: Annotated[
        list[str] | None, typer.Option("--table", metavar="ID", help="A table; repeatable.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every figure and table.")] = False,
    style: Annotated[
        str, typer.Option(help="Width of the venue: neurips, icml-column or slide.")
    ] = "neurips",
    formats: Annotated[
        str, typer.Option("--format", help="Of figures and tables; csv, json and txt are always written.")
    ] = "pdf,svg,png,tex,csv",
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("exhibits"),
    task: Annotated[
        str | None, typer.Option(help="Task of exhibits about one; the one that drifts most if left out.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Variant to compare with; the anchor-only control if left out.")
    ] = None,
    method: Annotated[str, typer.Option(help="Projection of features: pca, umap or tsne.")] = "pca",
    paper: Annotated[
        bool, typer.Option("--paper", help="Figures also show the paper's printed numbers, set apart.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 if a part is missing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write figures and tables for a paper, with their numbers, provenance and a caption draft."""
    from driftlens.records.run import open_run
    from driftlens_reports.paper.exhibit import ExhibitOptions
    from driftlens_reports.paper.export import export as write
    from driftlens_reports.paper.export import width_of

    options = ExhibitOptions(width=width_of(style), task=task, baseline=baseline, method=method, paper=paper)
    written = write(
        [open_run(run) for run in runs],
        out,
        names=None if everything else _named(figures or [], tables or []),
        formats=[part.strip() for part in formats.split(",") if part.strip()],
        options=options,
    )
    _tell(written, out, as_json)
    if strict and any(entry.missing for entry in written):
        raise typer.Exit(DataError.exit_code)


def _named(figures: Sequence[str], tables: Sequence[str]) -> list[str]:
    from driftlens_reports.paper.exhibit import exhibits
    from driftlens_reports.paper.export import check_kind

    chosen = [check_kind(name, "figure") for name in figures] + [check_kind(name, "table") for name in tables]
    if not chosen:
        raise SpecError(
            "nothing to export",
            hint=f"Give --figure ID, --table ID or --all; there are {', '.join(exhibits)}.",
        )
    return chosen


def _tell(written: Sequence[Exported], out: Path, as_json: bool) -> None:
    """What was written, on stdout; what is missing of it, on stderr."""
    if as_json:
        say_json(
            [
                {
                    "exhibit": entry.name,
                    "files": [str(path) for path in entry.files],
                    "missing": [{"name": panel.name, "missing": panel.missing} for panel in entry.missing],
                }
                for entry in written
            ]
        )
        return
    for entry in written:
        say(f"{entry.name}: {' '.join(path.suffix.removeprefix('.') for path in entry.files)}")
        for panel in entry.missing:
            note(f"  {entry.name} lacks {panel.name}: {panel.missing}")
    say(f"{sum(len(entry.files) for entry in written)} files in {out}")
