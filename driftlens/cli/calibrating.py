"""Commands that repair: once, with many settings or methods: calibrate, sweep, arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from driftlens.cli.app import Job, JsonFlag, RunFolder, app, flagged, manner, note, say, say_json, say_saved
from driftlens.spec.requests import ArenaRequest, CalibrationRequest, SweepRequest

if TYPE_CHECKING:
    from driftlens.runs.run import DriftRun


@app.command()
@flagged
def calibrate(run: RunFolder, request: CalibrationRequest, job: Job, as_json: JsonFlag = False) -> None:
    """Calibrate the merged model of a run layer by layer, save it, and analyze it like any other variant."""
    choose = None
    if request.chooses:
        from driftlens.jobs.contest.automatic import choice_of

        choose = choice_of(request)
    from driftlens.jobs.calibrate.job import calibrate as run_calibration
    from driftlens.jobs.contest.sweep import control
    from driftlens_reports.terminal import before_after_text, first_numbers_text

    name, is_watched = request.name, manner.progress == "jsonl"

    def show_first(measured: DriftRun) -> None:
        note(first_numbers_text(measured, name))

    with job.context() as context:
        finished = run_calibration(
            run,
            request,
            context,
            choose=choose,
            on_first=None if is_watched else note,
            on_measured=None if is_watched else show_first,
        )
        finished = control(run, name, context) if request.control else finished
    if request.save_weights is not None and request.save_weights.is_dir():
        from driftlens_reports.card import put_beside

        put_beside(request.save_weights, finished, name)
    if as_json:
        for text in finished.manifest.calibrations[name].notices:  # the text has them
            note(f"notice: {text}")
        say_json(_document(finished, name))
        return
    say(before_after_text(finished, name, verbose=manner.verbose))
    if request.save_weights is not None:
        say_saved(request.save_weights)
    elif not finished.manifest.calibrations[name].kept:
        from driftlens.runs.standing import how_to_save

        note(
            f"The run keeps the calibrated model; {how_to_save(run, name, finished.manifest, *job.access.words)}."
        )


def _document(run: DriftRun, name: str) -> dict[str, Any]:
    from driftlens.base.variants import calibrated
    from driftlens.findings.before_after import calibration_document
    from driftlens.findings.verdict import verdict

    named = {"name": name, "variant": calibrated(name), **vars(run.manifest.calibrations[name])}
    return {**named, **calibration_document(run, name), "verdict": verdict(run, name)}


@app.command()
@flagged
def sweep(run: RunFolder, request: SweepRequest, job: Job, as_json: JsonFlag = False) -> None:
    """Calibrate a run with many settings side by side; drift and accuracy of each become rows of its sweep table."""
    from driftlens.jobs.contest.sweep import sweep as run_sweep
    from driftlens_reports.terminal import sweep_text

    with job.context() as context:
        finished = run_sweep(run, request, context)
    asked = ["+".join(request.param)] if request.grid and request.param else [*request.param]
    asked += ["ablation"] * request.ablate
    rows = finished.sweeps()
    rows = rows[rows["sweep"].str.rpartition(":")[2].isin(asked)]
    if request.method is not None:
        rows = rows[rows["method"].fillna("featcal").isin(request.method)]
    sweeps = sorted(rows["sweep"].unique(), key=lambda name: asked.index(name.rpartition(":")[2]))
    if not as_json:
        say("\n\n".join(sweep_text(finished, name) for name in sweeps))
        return
    ordered = rows.sort_values(["sweep", "point", "seed", "task"], kind="stable")
    say_json({"run": finished.id, "sweeps": sweeps, "rows": ordered})


@app.command()
@flagged
def arena(run: RunFolder, request: ArenaRequest, job: Job, as_json: JsonFlag = False) -> None:
    """Repair a run with several methods on the same samples, and put what each gains and costs into one table.

    Each becomes a calibration of the run under its own name, with published settings where there are some. Those that
    are there are left as they are; an interrupted one goes on where it stopped.
    """
    from driftlens.findings.before_after import arena_rows, arena_sheet
    from driftlens.jobs.contest.arena import compete, entrants
    from driftlens.runs.run import open_run
    from driftlens_reports.terminal import sheet_text

    wanted, against = entrants(request.methods), request.against
    samples, attribution = request.samples, request.attribution
    with job.context() as context:
        failed = compete(run, wanted, context, samples=samples, attribution=attribution, against=against)
    finished = open_run(run)
    made = [each.name for each in wanted if each.name not in failed]
    if as_json:
        say_json({"run": finished.id, "rows": arena_rows(finished, made, against=against), "failed": failed})
        return
    say(sheet_text(arena_sheet(finished, made, failed, against=against)))
