"""The Python front door: `dl.analyze`, for specs and for live modules, and runs that can be added to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.access import Access
from driftlens.errors import SpecError
from driftlens.files import PathLike
from driftlens.progress import CancelToken, Mode, ProgressEvent, ProgressSink, sink_for
from driftlens.records.run import DriftRun

if TYPE_CHECKING:
    from torch import nn

    from driftlens.calibration.calibrator import Calibrator
    from driftlens.spec import RunSpec


class Run(DriftRun):
    """A run that can also be calibrated; like every run it is read without torch."""

    def calibrate(self, calibrator: Calibrator, *, name: str, auto: bool = False, **options: Any) -> Run:
        """Calibrate the merged model and measure the result; the run, opened anew, has `calibrated:NAME` too.

            run.calibrate(dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3), name="featcal")

        Args:
            calibrator: its settings; of a registered class.
            name: of the calibration.
            auto: whether the calibrator's free settings are chosen from the calibration samples, starting from these.
            **options: samples, layers, sites, top_layers, resume, replace, save_weights, attribution, on_first,
                on_measured, on_progress, cancel: as for `driftlens.pipeline.calibrate.job.calibrate`; device, offline,
                trust as in `Access`.

        Raises:
            SpecError: the calibrator's class is not registered.
            DriftLensError: see the tree in `driftlens.errors`.
        """
        from driftlens.pipeline.calibrate.job import calibrate
        from driftlens.pipeline.calibrate.plan import CalibrationRequest, method_called
        from driftlens.pipeline.search.automatic import HELD_OUT

        asked = {
            key: options.pop(key) for key in ("samples", "layers", "sites", "top_layers") if key in options
        }
        request = CalibrationRequest(
            name, method=method_called(calibrator), parameters=calibrator.get_params(), **asked
        )
        choose = HELD_OUT if auto else options.pop("choose", None)
        calibrate(self.path, request, choose=choose, access=_access(options), **options)
        return Run.at(self.path)

    def explain(self, **options: Any) -> Run:
        """Trace the drift of every variant back to layers, where that was left out or interrupted.

        Args:
            **options: on_progress, cancel, device, offline, trust as for `calibrate`.

        Raises:
            DriftLensError: as for `driftlens.pipeline.analyze.job.explain`.
        """
        from driftlens.pipeline.analyze.job import explain

        explain(self.path, access=_access(options), **options)
        return Run.at(self.path)


def open_run(path: PathLike) -> Run:
    """The run in the directory `path`. Nothing but its manifest is read until it is asked for.

    Raises:
        RunError: there is no run, or its manifest is damaged.
        SchemaTooNewError: a newer DriftLens wrote it.
    """
    return Run.at(path)


def _access(options: dict[str, Any]) -> Access:
    """What the options say of device, network and trust, which are taken out of them."""
    given = {field.name: options.pop(field.name) for field in fields(Access) if field.name in options}
    return Access(**given)


def analyze(
    spec: Path | str | Mapping[str, Any] | RunSpec | None = None,
    *,
    out: PathLike | None = None,
    merged: nn.Module | None = None,
    experts: Mapping[str, nn.Module] | None = None,
    data: Mapping[str, Any] | None = None,
    base: nn.Module | None = None,
    progress: Mode = "auto",
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> Run:
    """Measure feature drift and write a run directory, from a spec or from live modules.

        run = dl.analyze("run.yaml", out="runs/ta8")
        run = dl.analyze(base=b, merged=m, experts={"cars": e}, data={"cars": loader}, out="runs/live")

    Args:
        spec: a spec file, its values, or a checked spec; leave it out to pass modules.
        out: the run directory; `runs/<name>` if left out.
        merged: the merged model, a live module.
        experts: one live module per task.
        data: per task a tensor, Dataset, DataLoader or iterable of batches.
        base: the common base, if there is one.
        progress: how progress is shown on stderr.
        on_progress: called with every `ProgressEvent`, besides.
        cancel: a token whose `cancel()` stops the work at the next batch.
        resume: go on where an interrupted run of the same spec stopped.
        force: replace the run that is there.
        **options: with a spec, those of `driftlens.pipeline.analyze.job.analyze` (attribution, device, offline, trust,
            overrides); with modules, those of `driftlens.pipeline.analyze.live.live_study` (heads, layers, blocks,
            pool, n, batch_size, cka, jacobian, device, seed, name).

    Raises:
        SpecError: both a spec and modules are given, or neither.
        DriftLensError: see the tree in `driftlens.errors`.
    """
    with sink_for(progress) as shown:

        def sink(event: ProgressEvent) -> None:
            shown(event)
            if on_progress is not None:
                on_progress(event)

        if spec is not None and merged is None and experts is None and data is None:
            # Reading a spec needs libraries that a machine which only computes may lack.
            from driftlens.pipeline.analyze.job import analyze as analyze_spec
            from driftlens.spec import load_spec

            resolved, access = load_spec(spec), _access(options)
            folder = Path("runs", resolved.name) if out is None else Path(out)
            watched: dict[str, Any] = {"on_progress": sink, "cancel": cancel, "access": access}
            analyze_spec(resolved, out=folder, resume=resume, force=force, **watched, **options)
            return Run.at(folder)
        if spec is not None or merged is None or experts is None or data is None:
            raise SpecError("pass either a spec, or merged=, experts= and data=")
        from driftlens.pipeline.analyze.live import analyze_study, live_study

        study = live_study(merged=merged, experts=experts, data=data, base=base, **options)
        folder = Path("runs", study.name) if out is None else Path(out)
        analyze_study(study, out=folder, force=force, on_progress=sink, cancel=cancel)
        return Run.at(folder)
