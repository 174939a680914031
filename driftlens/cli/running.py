"""Commands that compute: demo, init, validate, analyze, merge, attach, why, calibrate, sweep."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from driftlens.cli.app import (
    Device,
    JobOptions,
    JsonFlag,
    RunFolder,
    app,
    limit_threads,
    manner,
    print_json,
    print_note,
    print_result,
    show_run,
    takes_requests,
)
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import SpecError

if TYPE_CHECKING:
    from driftlens.config.requests import (
        AnalysisRequest,
        CalibrationRequest,
        ComparisonRequest,
        MergeRequest,
        PreflightRequest,
        SweepRequest,
    )
    from driftlens.config.spec import RunSpec
    from driftlens.runs.run import DriftRun

SpecFile = Annotated[Path, typer.Argument(metavar="RUN.YAML", help="Run spec; see `driftlens init`.")]


@app.command()
def _demo(
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("driftlens-demo"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
    suite: Annotated[Literal["image", "text"], typer.Option(help="Embedded suite.")] = "text",
    device: Device = None,
) -> None:
    """Run everything on an embedded suite, without network: measure, repair twice, report.

    `text` is a small language model with four experts, `image` a small CLIP with eight. FeatCal (published settings)
    and residual calibration repair the merged model.
    """
    from driftlens.config.requests import AnalysisRequest, CalibrationRequest
    from driftlens.demo import spec_file
    from driftlens.pipelines.analyze import analyze
    from driftlens.pipelines.calibrate import calibrate
    from driftlens.runs.writer import refuse_occupied_folder
    from driftlens_reports.build import Report

    refuse_occupied_folder(out, force=force)
    preset = "paper-clip" if suite == "image" else "llama-3b"
    with JobOptions(device).context() as context:
        request = AnalysisRequest(out=out, force=force, synthetic=True)
        analyze(spec_file(suite), request, context.with_phase_prefix("merged model"))
        calibrate(out, CalibrationRequest(name="featcal", preset=preset), context.with_phase_prefix("featcal"))
        run = calibrate(
            out, CalibrationRequest(name="residual", method="residual"), context.with_phase_prefix("residual")
        )
    (page,) = Report(run).save(formats=["html"])
    show_run(run, everyone=True)
    folder = shlex.quote(str(out))
    print_result(f"\nReport: {page}")
    print_result(f"One page of all samples: `driftlens view {folder}`\nThe dashboard: `driftlens ui {folder}`")


DataPaths = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="[TASK=]PATH",
        help="JSON lines, a table, .npz or an image folder, labels optional; once for all experts or per expert.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override one value of the spec; repeatable.")
]


@app.command()
def _init(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BASE [TASK=]EXPERT...]",
            help="Folders, weight files or Hub ids in this order; or a mergekit recipe.",
        ),
    ] = None,
    data: DataPaths = None,
    out: Annotated[Path, typer.Option(help="Output file; `-` is stdout.")] = Path("run.yaml"),
    template: Annotated[str, typer.Option(help="generic, clip-8, llama, vit, ...; without models.")] = "generic",
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a run spec: a commented template, or one for given models and data (default: built-in samples)."""
    from driftlens.config.packaged import spec_template
    from driftlens.utils.files import write_text_atomic

    is_shown = as_json or str(out) == "-"
    if out.exists() and not force and not is_shown:
        raise SpecError(f"{out} exists already", hint="Choose another --out, or use --force.")
    chosen: tuple[str, ...] = ()
    if models:
        from driftlens.pipelines.quickstart import draft_spec, models_by_role

        roles = models_by_role(models, is_merged=False)
        drafted = draft_spec(roles, data or (), overrides or (), Permissions(offline=manner.offline))
        text, chosen = drafted.text, drafted.chosen
    else:
        text = spec_template(template)
    if as_json:
        print_json({"spec": text, "chosen": chosen})
        return
    for choice in chosen:
        print_note(f"notice: {choice}")
    if is_shown:
        print_result(text.rstrip("\n"))
        return
    write_text_atomic(out, text)
    print_result(f"wrote {out}; edit it, then: driftlens validate {shlex.quote(str(out))}")


@app.command()
@takes_requests
def _validate(spec: SpecFile, request: PreflightRequest, job: JobOptions, as_json: JsonFlag = False) -> None:
    """Check a spec, its checkpoints and its data, and estimate memory and disk."""
    from driftlens.config.spec import load_spec

    # Before torch is imported, as in the commands below: a wrong path is refused in a moment.
    resolved = load_spec(spec, request.overrides)
    from driftlens.pipelines.validate import preflight

    with limit_threads(manner.threads):
        checks = preflight(resolved, request, job.access)
    print_json(checks.as_dict()) if as_json else print_result(checks.text())
    if checks.problems:
        raise typer.Exit(checks.exit_code)


@app.command()
@takes_requests
def _analyze(
    source: Annotated[Path, typer.Argument(metavar="RUN.YAML|RUN", help="Run spec, or run to extend.")],
    request: AnalysisRequest,
    add: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Diagnostics to add to a run: adjoint, cka, jacobian.spectral."),
    ] = None,
    *,
    job: JobOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure the drift of every variant in a spec and write a run directory, or extend a run.

    Given a run directory, add missing scores and the attribution of drift to layers, and with --add diagnostics.
    """
    from driftlens.config.requests import AnalysisRequest, split_names
    from driftlens.config.spec import load_spec
    from driftlens.runs.manifest import read_manifest

    if source.is_dir():
        read_manifest(source)
        if request != AnalysisRequest():
            raise SpecError(
                f"{source} is a run; options such as --out or --set need a spec",
                hint=f"Give its spec, {source / 'spec.yaml'}, or only --add.",
            )
        from driftlens.pipelines.analyze import measure_missing_parts

        with job.context() as context:
            run = measure_missing_parts(source, context, split_names(add or ""))
    elif add is not None:
        raise SpecError("--add needs a finished run", hint="Give the run directory instead of a spec.")
    else:
        resolved = load_spec(source, request.overrides)
        from driftlens.pipelines.analyze import analyze as run_analysis

        with job.context() as context:
            run = run_analysis(resolved, request, context)
    if manner.verbose:
        for text in (*run.manifest.warnings, *run.manifest.notices):
            print_note(f"notice: {text}")
    show_run(run, as_json=as_json)


@app.command()
@takes_requests
def _merge(
    spec: SpecFile, request: MergeRequest, comparison: ComparisonRequest, job: JobOptions, as_json: JsonFlag = False
) -> None:
    """Merge the experts of a spec and save the result in the format of the base, or compare several merges.

    With --out alone, the spec's own merge is used. Data are read only if a comparison or a method needs them.
    """
    from driftlens.config.spec import load_spec

    method, out, merges = request.method, request.out, comparison.merges
    is_alone = out is not None and not request.parameters
    if (merges is not None and method is not None) or not (merges or method or is_alone):
        raise SpecError(
            "expected exactly one of --method and --compare, or --out alone",
            hint="`driftlens doctor --methods` lists methods; --out alone uses the spec's own merge.",
        )
    if merges is not None:
        if request.parameters:
            raise SpecError("--set belongs to --method", hint="Write settings after a method: ties:scaling=0.4.")
        _print_merge_comparison(load_spec(spec), comparison, job, as_json=as_json)
        return
    resolved = load_spec(spec)
    from driftlens.experiment.merging import merge_and_save

    method, notices = merge_and_save(resolved, request, job.context)
    for text in notices:
        print_note(f"notice: {text}")
    assert out is not None
    print_json({"out": out, "method": method}) if as_json else print_result(f"wrote {out}")


def _print_merge_comparison(spec: RunSpec, comparison: ComparisonRequest, job: JobOptions, *, as_json: bool) -> None:
    from driftlens.pipelines.compare_merges import compare_merges, resolve_merges
    from driftlens.utils.files import require_unused_path
    from driftlens_reports.merges import merge_ranking_table, write_merge_ranking
    from driftlens_reports.terminal import table_text

    out = comparison.out or Path("merges") / spec.name
    require_unused_path(out)
    merges = resolve_merges(comparison.merges or ())
    with job.context() as context:
        compared = compare_merges(spec, merges, context)
        write_merge_ranking(compared, out)
    print_json(compared) if as_json else print_result(table_text(merge_ranking_table(compared)))
    print_note(f"wrote {out}: merges.csv, .json")


@app.command()
def _attach(
    run: RunFolder,
    variant: Annotated[str, typer.Option(help="Evaluated variant of the run, or expert:TASK.")],
    results: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON results of lm_eval."),
    ],
) -> None:
    """Add results of lm-evaluation-harness to a variant of a run."""
    from driftlens.runs.external_scores import attach_scores as attach_results
    from driftlens_reports.facts import accuracy_table
    from driftlens_reports.terminal import table_text

    attached = attach_results(run, variant, results)
    print_result(table_text(accuracy_table(attached)))


@app.command()
@takes_requests
def _why(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE EXPERT... [MERGED]",
            help="Folders, weight files or Hub ids in this order; or a mergekit recipe and its merged model "
            "(default: merged by mergekit-yaml). TASK=MODEL is an expert, also at the end.",
        ),
    ],
    data: DataPaths = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 unless every check passes.")] = False,
    out: Annotated[Path, typer.Option(help="The run directory, with --data.")] = Path("runs/why"),
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
    *,
    job: JobOptions,
    as_json: JsonFlag = False,
) -> None:
    """Find what breaks a merge: a checklist from files alone; with --data also a small analysis and its verdict.

    Without labels the analysis reports drift and its sources, not accuracy.
    """
    from driftlens.pipelines.quickstart import draft_spec, has_merged_model, models_by_role, run_recipe

    if data:
        from driftlens.runs.writer import refuse_occupied_folder

        refuse_occupied_folder(out, force=force)
    models = run_recipe(models, out.with_name(f"{out.name}-merged"), force=force, offline=job.access.offline)
    roles = models_by_role(models, is_merged=has_merged_model(models))
    merged = roles.merged if isinstance(roles.merged, str) else None
    from driftlens.experiment.checklist import check_merge_files

    checklist = check_merge_files(roles.base, roles.experts, merged, offline=job.access.offline)
    if not as_json:
        print_result(checklist.text())
    if data and checklist.is_like_expert:
        given = shlex.join([*models[:-1], f"TASK={models[-1]}"])
        raise SpecError(
            f"{models[-1]}, taken as the merged model, looks like an expert: it holds almost nothing of "
            f"{', '.join(roles.experts)}",
            hint=f"If it is one: driftlens why {given} --data ... Else write a spec with `driftlens init`, set "
            "`merged`, and run `driftlens analyze`.",
        )
    if data and not checklist.exit_code:
        drafted = draft_spec(roles, data, overrides or (), job.access)
        from driftlens.config.requests import AnalysisRequest
        from driftlens.pipelines.analyze import analyze as run_analysis

        with job.context() as context:
            run = run_analysis(drafted.spec, AnalysisRequest(out=out, force=force, weights=False), context)
        for choice in drafted.chosen:
            print_note(f"notice: {choice}")
        show_run(run, as_json=as_json, checklist=checklist.as_dict())
        print_note(f"Spec: {out / 'spec.yaml'}")
    elif as_json:
        print_json(checklist.as_dict())
    else:
        print_note("With --data FILE, the drift of every layer and the scores are measured, too.")
    if checklist.exit_code or (strict and checklist.has_doubts):
        raise typer.Exit(checklist.exit_code or 3)


@app.command()
@takes_requests
def _calibrate(run: RunFolder, request: CalibrationRequest, job: JobOptions, as_json: JsonFlag = False) -> None:
    """Calibrate the merged model of a run layer by layer, save it, and analyze it like any other variant."""
    from driftlens.runs.manifest import read_manifest

    read_manifest(run)
    from driftlens.pipelines.calibrate import calibrate as run_calibration
    from driftlens_reports.terminal import calibration_text, early_results_text

    def _name_of(measured: DriftRun) -> str:
        # An unnamed calibration is new, and the newest is the last.
        return request.name or [*measured.manifest.calibrations][-1]

    def _print_first_numbers(measured: DriftRun) -> None:
        # A program that parses JSON lines of progress has no use for these.
        if manner.progress != "jsonl":
            print_note(early_results_text(measured, _name_of(measured)))

    with job.context() as context:
        finished = run_calibration(run, request, context, on_measured=_print_first_numbers)
    name = _name_of(finished)
    if request.save_weights is not None and request.save_weights.is_dir():
        from driftlens_reports.card import add_image_to_model_card

        add_image_to_model_card(request.save_weights, finished, name)
    if as_json:
        # Notices are part of the text output, but not of the document.
        for text in finished.manifest.calibrations[name].notices:
            print_note(f"notice: {text}")
        from driftlens.results.calibration_summary import calibration_json
        from driftlens.results.verdict import verdict
        from driftlens.utils.variants import calibrated_variant

        info = {"name": name, "variant": calibrated_variant(name), **vars(finished.manifest.calibrations[name])}
        print_json({**info, **calibration_json(finished, name), "verdict": verdict(finished, name)})
        return
    print_result(calibration_text(finished, name, verbose=manner.verbose))
    for place in filter(None, (request.save_weights, request.save_adapter)):
        print_result(f"wrote {place}")
    if not (request.save_weights or request.save_adapter) and not finished.manifest.calibrations[name].kept:
        from driftlens.runs.run import save_hint

        print_note(
            f"The run keeps the calibrated model; {save_hint(run, name, finished.manifest, *job.access.cli_options)}."
        )


@app.command()
@takes_requests
def _sweep(run: RunFolder, request: SweepRequest, job: JobOptions, as_json: JsonFlag = False) -> None:
    """Calibrate a run with many settings; drift and accuracy of each become rows of its sweep table.

    With --methods and nothing to vary, compare methods on the same samples instead: each becomes a calibration of
    the run, and a table compares gains (paired intervals) and costs.
    """
    from driftlens.runs.manifest import read_manifest

    read_manifest(run)
    if request.is_comparison:
        _print_method_comparison(run, request, job, as_json=as_json)
        return
    from driftlens.pipelines.sweep import sweep as run_sweep
    from driftlens_reports.terminal import sweep_text

    with job.context() as context:
        finished = run_sweep(run, request, context)
    # A grid is one sweep named after all its factors; one-factor sweeps have a name each.
    factors = ["+".join(request.param)] if request.grid and request.param else [*request.param]
    rows = finished.sweeps()
    rows = rows[rows["sweep"].str.rpartition(":")[2].isin(factors)]
    if request.methods is not None:
        rows = rows[rows["method"].fillna("featcal").isin({method for method, _ in request.methods})]
    sweeps = sorted(rows["sweep"].unique(), key=lambda name: factors.index(name.rpartition(":")[2]))
    if not as_json:
        print_result("\n\n".join(sweep_text(finished, name) for name in sweeps))
        return
    ordered = rows.sort_values(["sweep", "point", "seed", "task"], kind="stable")
    print_json({"run": finished.id, "sweeps": sweeps, "rows": ordered})


def _print_method_comparison(run: Path, request: SweepRequest, job: JobOptions, *, as_json: bool) -> None:
    from driftlens.pipelines.sweep import compare_methods, resolve_calibrators
    from driftlens.results.calibration_summary import leaderboard_rows, leaderboard_table
    from driftlens.runs.run import open_run
    from driftlens_reports.terminal import table_text

    methods = resolve_calibrators(request.methods or ())
    with job.context() as context:
        failed = compare_methods(run, methods, context, samples=request.samples)
    finished = open_run(run)
    made = [method.name for method in methods if method.name not in failed]
    if as_json:
        print_json({"run": finished.id, "rows": leaderboard_rows(finished, made), "failed": failed})
        return
    print_result(table_text(leaderboard_table(finished, made, failed)))
