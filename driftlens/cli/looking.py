"""Commands that only look: show, ls, verify, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftlens.cli.app import JsonFlag, app, note, say, say_json

if TYPE_CHECKING:
    from driftlens.records.run import DriftRun


def show_run(run: DriftRun, *, as_json: bool = False) -> None:
    """Print a run's summary, or its final rows as JSON."""
    from driftlens.records.tables import plain_rows
    from driftlens_reports.summary import summary

    if as_json:
        say_json(
            {
                "id": run.id,
                "name": run.name,
                "path": str(run.path),
                "synthetic": run.manifest.synthetic,
                "tasks": list(run.tasks),
                "variants": list(run.variants),
                "final": plain_rows(run.layers(layer="final")),
                "accuracy": plain_rows(run.accuracy()),
                "warnings": list(run.manifest.warnings),
                "notices": list(run.manifest.notices),
            }
        )
        return
    say(summary(run))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], as_json: JsonFlag = False
) -> None:
    """Tell what a run found: drift, where it comes from, accuracy, self-checks."""
    from driftlens.records.run import open_run

    show_run(open_run(run), as_json=as_json)


@app.command("ls")
def list_runs(
    root: Annotated[Path, typer.Argument(help="The folder to look in.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """List the runs below a folder."""
    from dataclasses import asdict

    from driftlens.records.listing import find_runs
    from driftlens_reports.summary import listing_text

    found = find_runs(root)
    if as_json:
        say_json([{**asdict(run), "path": str(run.path)} for run in found])
    else:
        say(listing_text(found) if found else f"no runs below {root}; `driftlens demo` makes one")


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], as_json: JsonFlag = False
) -> None:
    """Hash every file of a run again and compare with its manifest."""
    from dataclasses import asdict

    from driftlens.records.listing import left_undone
    from driftlens.records.run import open_run
    from driftlens.records.verify import verify as rehash
    from driftlens_reports.summary import verification_text

    found = rehash(run)
    say_json({"ok": found.ok, **asdict(found)}) if as_json else say(verification_text(found))
    for text in left_undone(open_run(run)) if found.unlisted else ():
        note(text)  # whose the files are that are not listed
    if not found.ok:
        raise typer.Exit(4)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Report the environment: versions, devices, cache, and what is missing."""
    from driftlens.doctor import examine

    found = examine()
    if as_json:
        say_json(found)
    else:
        width = max(map(len, found))
        say("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))


@app.command()
def methods(as_json: JsonFlag = False) -> None:
    """List calibrators and merge methods with their settings, defaults and presets."""
    from driftlens.catalog import as_text, catalog

    found = catalog()
    say_json(found) if as_json else say(as_text(found))
