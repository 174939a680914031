"""The command that runs a published suite and puts its numbers beside the published ones: reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftlens.cli.app import Job, JsonFlag, app, say, say_json
from driftlens.cli.flags import flagged
from driftlens.suites.protocols import PROTOCOLS


@app.command()
@flagged
def reproduce(
    suite: Annotated[
        str,
        typer.Argument(metavar="SUITE", help="A published suite, a YAML file of that form, or a run's spec."),
    ],
    protocol: Annotated[
        str, typer.Option(help=f"One of {', '.join(PROTOCOLS)}; docs/reproduce.md says what each runs.")
    ] = "main",
    out: Annotated[
        Path | None, typer.Option(help="Where its runs go, one per merge; runs/<suite> if left out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is downloaded and what it costs; write nothing.")
    ] = False,
    *,
    as_json: JsonFlag = False,
    job: Job,
) -> None:
    """Run a suite as published, and put what is measured beside what was printed, with intervals.

    Called again it goes on where it stopped. Models and data come through the Hub's cache (HF_HOME).
    """
    from driftlens.suites.protocols import protocol_called
    from driftlens.suites.reproduce import load_suite

    name, found, folder = load_suite(suite)
    mergers = protocol_called(protocol).of(found)
    if dry_run:
        from driftlens.jobs.preflight.reproducing import plan, plan_text

        specs = {merger: found.run_spec(name, merger, folder) for merger in mergers}
        planned = plan(found, specs, protocol, access=job.access)
        say_json(planned) if as_json else say(plan_text(planned))
        return
    from driftlens.jobs.contest.arena import entrants
    from driftlens.jobs.contest.reproduce import reproduce as run_suite
    from driftlens_reports.reproduced import shown
    from driftlens_reports.terminal import sheet_text

    place = out or Path("runs") / name
    with job.context() as context:
        runs, failed = run_suite(name, found, folder, place, context, protocol=protocol)
    names = [each.name for each in entrants([*protocol_called(protocol).repairs(found).items()])]
    told = shown(found, protocol, runs, names, failed)
    if as_json:
        say_json({"suite": name, "protocol": protocol, "rows": told.rows, "failed": failed})
        return
    say("\n\n".join(map(sheet_text, told.sheets)))
