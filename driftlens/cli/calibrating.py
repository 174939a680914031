"""The command that repairs: calibrate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.access import Access
from driftlens.cli.app import (
    Device,
    JsonFlag,
    Offline,
    ProgressMode,
    Trust,
    app,
    assignments,
    note,
    say,
    say_json,
    watched,
)
from driftlens.cli.running import RunFolder

if TYPE_CHECKING:
    from driftlens.records.run import DriftRun

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
    typer.Option(help="Modules to calibrate, patterns on their paths: linear and norm modules if left out."),
]


@app.command()
def calibrate(
    run: RunFolder,
    name: Annotated[str, typer.Option(help="Its variant will be called calibrated:NAME.")],
    method: Method = None,
    preset: Annotated[str | None, typer.Option(help="Published settings: paper-clip or demo-clip.")] = None,
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
            "--auto", help="Choose lam, rho and alpha from the calibration samples, starting from these."
        ),
    ] = False,
    save_weights: Annotated[
        Path | None,
        typer.Option(help="A .safetensors file, or a folder the original library loads, with model card."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted calibration.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take out the calibration of this name.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything but digests, estimate the cost, write nothing."),
    ] = False,
    device: Device = None,
    offline: Offline = False,
    trust: Trust = False,
    progress: ProgressMode = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Calibrate the merged model of a run layer by layer, save it, and analyze it like any other variant."""
    from driftlens.pipeline.calibrate.job import calibrate as run_calibration
    from driftlens.pipeline.calibrate.request import CalibrationRequest
    from driftlens.pipeline.preflight.rehearsal import rehearse
    from driftlens.pipeline.search.automatic import HELD_OUT

    given = {"lam": lam, "rho": rho, "alpha": alpha}
    request = CalibrationRequest(
        name,
        method=method,
        preset=preset,
        parameters=assignments(parameters)
        | {key: value for key, value in given.items() if value is not None},
        samples=samples,
        layers=None if layers is None else [_layer(part) for part in _parts(layers)],
        sites=None if sites is None else _parts(sites),
        top_layers=top_layers,
    )
    if dry_run:
        if auto:
            note("--auto would first calibrate candidates; the estimate leaves them out")
        found = rehearse(
            run,
            request,
            resume=resume,
            replace=replace,
            save_weights=save_weights,
            access=Access(device, offline, trust),
        )
        say_json(found.as_dict()) if as_json else say(found.text())
        raise typer.Exit(found.exit_code)
    with watched(progress) as (sink, cancel):
        finished = run_calibration(
            run,
            request,
            resume=resume,
            replace=replace,
            save_weights=save_weights,
            choose=HELD_OUT if auto else None,
            access=Access(device, offline, trust),
            on_progress=sink,
            cancel=cancel,
        )
    for text in finished.manifest.calibrations[name].notices:
        note(f"notice: {text}")
    _show(finished, name, save_weights, as_json=as_json)


def _show(run: DriftRun, name: str, saved: Path | None, *, as_json: bool) -> None:
    from driftlens_reports.before_after import before_after_text

    if as_json:
        say_json(_document(run, name))
        return
    say(before_after_text(run, name))
    if saved is not None:
        say(f"\nwrote {saved}")


def _document(run: DriftRun, name: str) -> dict[str, Any]:
    from dataclasses import asdict

    from driftlens.records.before_after import accuracy_changes, credits_of, final_drift_changes
    from driftlens.records.tables import plain, plain_rows
    from driftlens.variants import calibrated
    from driftlens_reports.before_after import before_after

    return {
        "name": name,
        "variant": calibrated(name),
        **asdict(run.manifest.calibrations[name]),
        "before_after": plain_rows(before_after(run, name)),
        "accuracy_changes": [
            {key: plain(value) for key, value in vars(entry).items()}
            | {"paired": entry.paired and asdict(entry.paired)}
            for entry in accuracy_changes(run, name)
        ],
        "drift_changes": [
            {
                **{"task": task, "n": at.n, "is_paired": at.is_paired},
                **{key: plain(value) for key, value in vars(at.difference).items()},
                "relative": {key: plain(value) for key, value in vars(at.relative).items()},
            }
            for task, at in final_drift_changes(run, name).items()
        ],
        "gains": [
            asdict(credit) | {"rescaling": credit.rescaling, "calibration": credit.calibration}
            for credit in credits_of(run, name)
        ],
    }


def _parts(given: Sequence[str]) -> list[str]:
    """Repeated options and comma-separated ones are the same."""
    return [part.strip() for text in given for part in text.split(",") if part.strip()]


def _layer(text: str) -> str | int:
    return int(text) if text.isdigit() else text
