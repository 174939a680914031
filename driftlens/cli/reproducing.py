"""The command that runs a published suite and puts its numbers beside the published ones: reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from driftlens.cli.app import Job, JsonFlag, app, computing, say, say_json


@app.command()
@computing
def reproduce(
    suite: Annotated[
        str,
        typer.Argument(metavar="SUITE", help="A published suite, a YAML file of that form, or a run's spec."),
    ],
    protocol: Annotated[
        str,
        typer.Option(
            help="main: every merge with every repair; samples: 8 to 512 of them per task; ablations: FeatCal apart."
        ),
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
    from driftlens.pipeline.search.reproduce import mergers_of
    from driftlens.suites.reproduce import load_suite

    name, found, folder = load_suite(suite)
    mergers = mergers_of(found, protocol)
    specs = {merger: found.run_spec(name, merger, folder) for merger in mergers}
    if dry_run:
        from driftlens.pipeline.preflight.reproducing import plan, plan_text

        planned = plan(found, specs, protocol, access=job.access)
        say_json(planned) if as_json else say(plan_text(planned))
        return
    from driftlens.pipeline.search.reproduce import reproduce as run_suite
    from driftlens_reports.reproduced import reproduced_rows, reproduced_sheet
    from driftlens_reports.terminal import sheet_text, sweep_text

    place = out or Path("runs") / name
    with job.watched() as watched:
        runs, failed = run_suite(name, found, folder, place, protocol=protocol, access=job.access, **watched)
    if protocol != "main":
        (run,) = runs.values()
        rows: Any = run.sweeps()
        names = rows["sweep"].unique()
        say_json({"suite": name, "protocol": protocol, "rows": rows}) if as_json else say(
            "\n\n".join(sweep_text(run, each) for each in names)
        )
        return
    rows = reproduced_rows(runs, found.published)
    if as_json:
        say_json({"suite": name, "protocol": protocol, "rows": rows, "failed": failed})
        return
    say(sheet_text(reproduced_sheet(found.title, rows, failed)))
