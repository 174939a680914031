"""Commands that repair: once, with many settings, with several methods: calibrate, sweep, arena."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.base.errors import SpecError
from driftlens.cli.app import (
    Job,
    JsonFlag,
    NoAttribution,
    RunFolder,
    app,
    assignments,
    computing,
    layer_named,
    manner,
    note,
    parts,
    say,
    say_json,
    say_saved,
    with_settings,
)

if TYPE_CHECKING:
    from driftlens.runs.run import DriftRun

Method = Annotated[str | None, typer.Option(help="A registered calibrator.", show_default="featcal")]
Hyperparameters = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="name=value", help="Another hyperparameter of the method; repeatable."),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(help="Layers to calibrate: numbers or patterns on module paths, all blocks if left out."),
]
Sites = Annotated[
    list[str] | None,
    typer.Option(
        help="Modules to calibrate: patterns on their paths, or groups (q, k, v, o, gate, up, down, norms); linear "
        "and norm modules if left out."
    ),
]
Control = Annotated[bool, typer.Option("--control", help="Measure the same at rho 1 too.")]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="name=values",
        help="A setting of the method, or n (samples per task), and values: lam=0.01,0.05. Repeatable.",
    ),
]


@app.command()
@computing
def calibrate(
    run: RunFolder,
    name: Annotated[str, typer.Option(help="Its variant will be called calibrated:NAME.")],
    method: Method = None,
    preset: Annotated[
        str | None, typer.Option(help="Published settings; `driftlens methods` lists them.")
    ] = None,
    lam: Annotated[float | None, typer.Option(help="Ridge, for Gram matrices of norm 1; >= 0.")] = None,
    rho: Annotated[float | None, typer.Option(help="Anchor: rho * merged + (1 - rho) * base.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Share of the expert in the target; 0 to 1.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibration samples per task.", show_default="the spec's")
    ] = None,
    parameters: Hyperparameters = None,
    layers: Layers = None,
    sites: Sites = None,
    top_layers: Annotated[
        int | None, typer.Option(help="Only so many layers: those that most of the final drift comes from.")
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Choose the best on held-out calibration samples: the merged model, the base, these settings, a "
            "search from them and, without --method, what other methods offer.",
        ),
    ] = False,
    control: Control = False,
    save_weights: Annotated[
        Path | None,
        typer.Option(help="A .safetensors file, or a folder the original library loads, with model card."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted calibration.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take out the calibration of this name.")
    ] = False,
    no_attribution: NoAttribution = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything but digests, estimate the cost, write nothing."),
    ] = False,
    *,
    as_json: JsonFlag = False,
    job: Job,
) -> None:
    """Calibrate the merged model of a run layer by layer, save it, and analyze it like any other variant."""
    from driftlens.jobs.calibrate.job import calibrate as run_calibration
    from driftlens.jobs.calibrate.plan import CalibrationRequest
    from driftlens.jobs.contest.automatic import BEST, HELD_OUT
    from driftlens.jobs.contest.sweep import control as measure_control
    from driftlens.jobs.preflight.rehearsal import rehearse

    given = {"lam": lam, "rho": rho, "alpha": alpha}
    request = CalibrationRequest(
        name,
        method=method,
        preset=preset,
        parameters=assignments(parameters)
        | {key: value for key, value in given.items() if value is not None},
        samples=samples,
        layers=None if layers is None else [*map(layer_named, parts(layers))],
        sites=None if sites is None else parts(sites),
        top_layers=top_layers,
        control=control,
    )
    how: dict[str, Any] = {
        **{"resume": resume, "replace": replace, "save_weights": save_weights},
        **{"attribution": not no_attribution, "access": job.access},
        "choose": (BEST if method is None else HELD_OUT) if auto else None,
    }
    if dry_run:
        found = manner.team.once(lambda: rehearse(run, request, **how))
        say_json(found.as_dict()) if as_json else say(found.text())
        raise typer.Exit(found.exit_code)
    from driftlens_reports.terminal import before_after_text, first_numbers_text

    def show_first(measured: DriftRun) -> None:
        note(first_numbers_text(measured, name))

    with job.watched() as watched:
        finished = run_calibration(
            run,
            request,
            **how,
            on_first=None if job.progress == "jsonl" else note,
            on_measured=show_first if job.progress != "jsonl" else None,
            **watched,
        )
        if control:
            finished = measure_control(run, name, access=job.access, **watched)
    if as_json:
        for text in finished.manifest.calibrations[name].notices:  # the text has them
            note(f"notice: {text}")
        say_json(_document(finished, name))
        return
    say(before_after_text(finished, name, verbose=manner.verbose))
    if save_weights is not None:
        say_saved(save_weights)


def _document(run: DriftRun, name: str) -> dict[str, Any]:
    from driftlens.base.variants import calibrated
    from driftlens.findings.before_after import calibration_document
    from driftlens.findings.verdict import verdict

    named = {"name": name, "variant": calibrated(name), **vars(run.manifest.calibrations[name])}
    return {**named, **calibration_document(run, name), "verdict": verdict(run, name)}


@app.command()
@computing
def sweep(
    run: RunFolder,
    param: Parameters = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Take the method apart: every declared part by itself.")
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="Draws of the calibration samples; the first is the run's own.")
    ] = 1,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid/--one-factor", help="All combinations, or one factor at a time around the preset."
        ),
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Registered calibrators, joined by commas.", show_default="featcal"),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Published settings for what is not varied.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Calibration samples per task where n is not varied.", show_default="the spec's"
        ),
    ] = None,
    no_accuracy: Annotated[
        bool, typer.Option("--no-accuracy", help="Drift only; the test samples are not read.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out points that are there.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take earlier sweeps of the same factors out first.")
    ] = False,
    *,
    as_json: JsonFlag = False,
    job: Job,
) -> None:
    """Calibrate a run with many settings side by side; drift and accuracy of each become rows of its sweep table."""
    from driftlens.jobs.contest.sweep import SweepRequest
    from driftlens.jobs.contest.sweep import sweep as run_sweep
    from driftlens_reports.terminal import sweep_text

    values = _values(param or ())
    request = SweepRequest(
        values,
        grid=grid,
        ablate=ablate,
        seeds=seeds,
        method=None if method is None else parts(method),
        preset=preset,
        samples=samples,
        accuracy=not no_accuracy,
    )
    with job.watched() as watched:
        finished = run_sweep(run, request, resume=resume, replace=replace, access=job.access, **watched)
    asked = (["+".join(values)] if grid and values else list(values)) + ["ablation"] * ablate
    rows = finished.sweeps()
    rows = rows[rows["sweep"].str.rpartition(":")[2].isin(asked)]
    if method is not None:
        rows = rows[rows["method"].fillna("featcal").isin(parts(method))]
    sweeps = sorted(rows["sweep"].unique(), key=lambda name: asked.index(name.rpartition(":")[2]))
    if not as_json:
        say("\n\n".join(sweep_text(finished, name) for name in sweeps))
        return
    ordered = rows.sort_values(["sweep", "point", "seed", "task"], kind="stable")
    say_json({"run": finished.id, "sweeps": sweeps, "rows": ordered})


@app.command()
@computing
def arena(
    run: RunFolder,
    methods: Annotated[
        list[str],
        typer.Option(
            metavar="A,B:key=value,...",
            help="Repairs to compare, by `driftlens methods`; settings behind colons; `all` is every method.",
        ),
    ],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Calibration samples per task.", show_default="the spec's")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="The repair that the others are compared with, by its name.", show_default="the best"
        ),
    ] = None,
    no_attribution: NoAttribution = False,
    *,
    as_json: JsonFlag = False,
    job: Job,
) -> None:
    """Repair a run with several methods on the same samples, and put what each gains and costs into one table.

    Each becomes a calibration of the run under its own name, with published settings where there are some. Those that
    are there are left as they are; an interrupted one goes on where it stopped.
    """
    from driftlens.findings.arena import arena_rows, arena_sheet
    from driftlens.jobs.contest.arena import compete, entrants
    from driftlens.runs.run import open_run
    from driftlens_reports.terminal import sheet_text

    wanted = entrants(with_settings(methods))
    with job.watched() as watched:
        failed = compete(
            run, wanted, samples=samples, attribution=not no_attribution, access=job.access, **watched
        )
    finished = open_run(run)
    made = [each.name for each in wanted if each.name not in failed]
    if as_json:
        say_json({"run": finished.id, "rows": arena_rows(finished, made, against=against), "failed": failed})
        return
    say(sheet_text(arena_sheet(finished, made, failed, against=against)))


def _values(given: Sequence[str]) -> dict[str, list[Any]]:
    """The values of `--param name=1,2`, each read as YAML; the same name twice adds to its values.

    Raises:
        SpecError: one is not of this form.
    """
    from driftlens.spec.yaml_text import from_yaml

    found: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not name.strip() or not equals:
            raise SpecError(
                f"--param {text}: expected name=value,value", hint="For example --param lam=0.01,0.05."
            )
        found.setdefault(name.strip(), []).extend(from_yaml(f"[{values}]", f"--param {name}"))
    return found
