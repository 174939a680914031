"""The command that tries settings: sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.access import Access
from driftlens.cli.app import Device, JsonFlag, Offline, ProgressMode, Trust, app, say, say_json, watched
from driftlens.cli.calibrating import Method
from driftlens.cli.running import RunFolder
from driftlens.errors import SpecError

if TYPE_CHECKING:
    from driftlens.records.run import DriftRun

Parameters = Annotated[
    list[str],
    typer.Option(
        "--param", metavar="name=values", help="lam, rho, alpha or n, and values: lam=0.01,0.05. Repeatable."
    ),
]


@app.command()
def sweep(
    run: RunFolder,
    param: Parameters,
    seeds: Annotated[
        int, typer.Option(min=1, help="Draws of the calibration samples; the first is the run's own.")
    ] = 1,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid/--one-factor", help="All combinations, or one factor at a time around the preset."
        ),
    ] = False,
    method: Method = None,
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
    device: Device = None,
    offline: Offline = False,
    trust: Trust = False,
    progress: ProgressMode = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Calibrate a run with many settings side by side; drift and accuracy of each become rows of its sweep table."""
    from driftlens.pipeline.search.sweep import SweepRequest
    from driftlens.pipeline.search.sweep import sweep as run_sweep

    values = _values(param)
    request = SweepRequest(
        values,
        grid=grid,
        seeds=seeds,
        method=method,
        preset=preset,
        samples=samples,
        accuracy=not no_accuracy,
    )
    with watched(progress) as (sink, cancel):
        finished = run_sweep(
            run,
            request,
            resume=resume,
            replace=replace,
            access=Access(device, offline, trust),
            on_progress=sink,
            cancel=cancel,
        )
    _show(finished, ["+".join(values)] if grid else list(values), as_json=as_json)


def _values(given: Sequence[str]) -> dict[str, list[float]]:
    """The values of `--param name=1,2`; the same name twice adds to its values.

    Raises:
        SpecError: one is not of this form.
    """
    found: dict[str, list[float]] = {}
    for text in given:
        name, _, values = text.partition("=")
        try:
            numbers = [float(value) for value in values.split(",")]
        except ValueError:
            raise SpecError(
                f"--param {text}: expected name=number,number,...", hint="For example --param lam=0.01,0.05."
            ) from None
        found.setdefault(name.strip(), []).extend(numbers)
    return found


def _show(run: DriftRun, sweeps: Sequence[str], *, as_json: bool) -> None:
    from driftlens_reports.sweep_text import sweep_text

    if as_json:
        say_json(_document(run, sweeps))
    else:
        say("\n\n".join(sweep_text(run, name) for name in sweeps))


def _document(run: DriftRun, sweeps: Sequence[str]) -> dict[str, Any]:
    from driftlens.records.tables import plain_rows

    rows = run.sweeps()
    ordered = rows[rows["sweep"].isin(sweeps)].sort_values(["sweep", "point", "seed", "task"], kind="stable")
    return {"run": run.id, "sweeps": list(sweeps), "rows": plain_rows(ordered)}
