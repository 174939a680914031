"""Commands that repair: once, with many settings or methods: calibrate, sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.cli.app import Job, JsonFlag, RunFolder, app, flagged, manner, note, say, say_json, say_saved
from driftlens.spec.requests import CalibrationRequest, SweepRequest

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
    """Calibrate a run with many settings; drift and accuracy of each become rows of its sweep table.

    With --methods and nothing to vary, repair it by several methods on the same samples instead. Each becomes a
    calibration of the run, and a table shows what each gains, with paired intervals, and what it costs.
    """
    if request.compares:
        _compare_methods(run, request, job, as_json=as_json)
        return
    from driftlens.jobs.contest.sweep import sweep as run_sweep
    from driftlens_reports.terminal import sweep_text

    with job.context() as context:
        finished = run_sweep(run, request, context)
    asked = ["+".join(request.param)] if request.grid and request.param else [*request.param]
    asked += ["ablation"] * request.ablate
    rows = finished.sweeps()
    rows = rows[rows["sweep"].str.rpartition(":")[2].isin(asked)]
    if request.methods is not None:
        rows = rows[rows["method"].fillna("featcal").isin({method for method, _ in request.methods})]
    sweeps = sorted(rows["sweep"].unique(), key=lambda name: asked.index(name.rpartition(":")[2]))
    if not as_json:
        say("\n\n".join(sweep_text(finished, name) for name in sweeps))
        return
    ordered = rows.sort_values(["sweep", "point", "seed", "task"], kind="stable")
    say_json({"run": finished.id, "sweeps": sweeps, "rows": ordered})


def _compare_methods(run: Path, request: SweepRequest, job: Job, *, as_json: bool) -> None:
    from driftlens.findings.before_after import arena_rows, arena_sheet
    from driftlens.jobs.contest.methods import compare_methods, wanted_methods
    from driftlens.runs.run import open_run
    from driftlens_reports.terminal import sheet_text

    wanted = wanted_methods(request.methods or ())
    with job.context() as context:
        failed = compare_methods(run, wanted, context, samples=request.samples)
    finished = open_run(run)
    made = [each.name for each in wanted if each.name not in failed]
    if as_json:
        say_json({"run": finished.id, "rows": arena_rows(finished, made), "failed": failed})
        return
    say(sheet_text(arena_sheet(finished, made, failed)))
