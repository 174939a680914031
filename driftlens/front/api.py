"""Python interface: the commands as functions, some also for modules in memory.

Keyword arguments are the fields of the requests in `driftlens.config.requests` and of `Around` (progress, device ...).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.config.requests import (
    REQUIRED,
    AnalysisRequest,
    CalibrationRequest,
    ComparisonRequest,
    LiveSettings,
    MergeRequest,
    Modules,
    PreflightRequest,
    ProjectionRequest,
    SweepRequest,
    ViewRequest,
)
from driftlens.front.keywords import Around, Quietly, keywords
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, is_live
from driftlens.utils.errors import SpecError
from driftlens.utils.files import PathLike

# Functions import what needs torch or plotly, so that saved runs are read without them.
if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from driftlens.calibration.calibrator import Calibrator
    from driftlens.config.run import RunSpec
    from driftlens.pipelines.validate import Preflight
    from driftlens.results.formatting import Table
    from driftlens.results.projection import Projection
    from driftlens_reports.charts.chart import Plots
    from driftlens_reports.explorer import Explorer

    SpecLike = Path | str | Mapping[str, Any] | RunSpec

log = logging.getLogger("driftlens")


class Run(DriftRun):
    """A run that can also be added to; like every run it is read without torch."""

    @property
    def plot(self) -> Plots:
        """Every chart by name, as in reports and the dashboard: `run.plot.layer_drift(tasks=["cars"])`."""
        from driftlens_reports.charts.chart import Plots

        return Plots(self)

    # Arguments of `analyze` for live modules. A run directory holds no modules, so a reopened run has None.
    _live: Mapping[str, Any] | None = None

    @keywords(request=CalibrationRequest, around=Quietly)
    def calibrate(
        self,
        calibrator: Calibrator,
        request: CalibrationRequest,
        around: Around,
        *,
        modules: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        on_measured: Callable[[DriftRun], None] | None = None,
    ) -> Run:
        """Calibrate the merged model, measure the result, and return the run with `calibrated:NAME`.

            run = run.calibrate(dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3), name="featcal")
            merged.load_state_dict(run.calibrated_state("featcal"))

        Args:
            calibrator: a calibrator of a registered class, with settings.
            request: by keywords, name and other fields of `CalibrationRequest`.
            around: by keywords, progress, device and other fields of `Around`.
            modules: modules of a run of live modules, as passed to `analyze`. Required if the run was reopened. Other
                settings, weights, samples, labels or heads are refused.
            data: calibration samples per task for a run of live modules; by default those of the analysis.
            on_measured: called with the run once drift and accuracy are measured.
        """
        from driftlens.pipelines.calibration_plan import method_called

        merged_request = request.changed(
            method=request.method or method_called(calibrator),
            # Settings passed by keyword override those of the calibrator.
            parameters={**calibrator.get_params(), **request.parameters},
        )
        return _calibrate_run(self, merged_request, around, modules, data, on_measured)

    def summary(self) -> Table:
        """Return a table with one row per task: scores and drift of all models. `frame()` has the unrounded numbers."""
        from driftlens.results.verdict import summary_sheet

        return summary_sheet(self)

    def repairs(self) -> Table:
        """Return a table of all calibrations: gains with paired intervals, and costs."""
        from driftlens.results.calibration_summary import arena_sheet

        return arena_sheet(self)

    def findings(self) -> pd.DataFrame:
        """Return every number of the verdict, tables and pages, one per row, with its 95 % interval.

        Columns: measure, task (empty for the mean), variant, against (the reference of a change, else empty), value,
        low, high, n, paired (True if the interval of a change uses the same samples), kind and worse.
        """
        from driftlens.results.measures import findings

        return findings(self)

    @keywords(request=ViewRequest)
    def view(self, request: ViewRequest) -> Explorer:
        """Create the interactive page of samples across models, by the fields of `ViewRequest`; `out` writes it."""
        from driftlens_reports.explorer import Explorer

        made = Explorer(self, request)
        if request.out is not None:
            made.save(request.out)
        return made

    def _repr_html_(self) -> str:
        """Return headline and summary as HTML for notebooks; wide tables scroll."""
        from driftlens.results.verdict import headline
        from driftlens_reports.content import Headline
        from driftlens_reports.formats.page import shown_alone

        heading = shown_alone(Headline.model_validate(headline(self)))
        return f'{heading}<div style="overflow-x: auto">{self.summary()._repr_html_()}</div>'

    def before_after(self, name: str) -> pd.DataFrame:
        """Return final drift and accuracy before and after a calibration, with intervals: one row per task and model.

        `attrs["notices"]` has the notices of the calibration.
        """
        from driftlens.results.calibration_summary import before_after

        return before_after(self, name)

    def calibrated_state(self, name: str) -> dict[str, Tensor]:
        """Load the weights of the calibration `name` for `load_state_dict`, without correction modules."""
        from driftlens.checkpoints.loading import open_checkpoint
        from driftlens.runs.manifest import calibration_weights

        # Called for its error, which lists the calibrations; a missing file would name only its path.
        self.calibration_info(name)
        weights = open_checkpoint(self.path / calibration_weights(name))
        return {key: weights.read(key) for key in weights.headers}

    @keywords()
    def measure(self, around: Around, *, add: Sequence[str] | str = ()) -> Run:
        """Measure missing scores, missing attribution of drift to layers, and the diagnostics named in `add`."""
        from driftlens.pipelines.analyze import add_to_run

        with around.context() as context:
            add_to_run(self.path, context, (add,) if isinstance(add, str) else add)
        return Run.at(self.path)


def open_run(path: PathLike) -> Run:
    """Open the run in the directory `path`. Only its manifest is read at once."""
    return Run.at(path)


def _run_folder(run: PathLike | DriftRun) -> Path:
    return run.path if isinstance(run, DriftRun) else Path(run)


def _reopen_with_modules(before: PathLike | DriftRun) -> Run:
    run = Run.at(_run_folder(before))
    run._live = before._live if isinstance(before, Run) else None
    return run


def _live_study_opener(
    run: PathLike | DriftRun,
    modules: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    device: str | None,
) -> Callable[[int | None], Any] | None:
    """Return a function that opens the live modules of a run again; None for a run of a spec."""
    folder = _run_folder(run)
    kept = run._live if isinstance(run, Run) else None
    if kept is None and modules is None and data is None:
        return None
    if not is_live(read_manifest(folder)):
        raise SpecError(
            f"{folder} has a spec; modules= and data= are for live modules",
            hint="Remove both; `samples` sets the number of calibration samples.",
        )
    # The pipeline refuses a run that lacks its modules, with a hint.
    if kept is None and modules is None:
        return None
    from driftlens.pipelines.in_memory import live_again

    arguments = {**(kept or {}), **(modules or {})}
    arguments |= {} if device is None else {"device": device}
    return partial(live_again, folder, arguments, data)


@keywords(request=AnalysisRequest, modules=Modules, settings=LiveSettings)
def analyze(
    spec: SpecLike | None = None,
    *,
    request: AnalysisRequest,
    modules: Modules,
    settings: LiveSettings,
    around: Around,
) -> Run:
    """Measure feature drift of a spec or of live modules, and write a run directory.

        run = dl.analyze("run.yaml", out="runs/ta8")
        run = dl.analyze(base=b, merged=m, experts={"cars": e}, data={"cars": loader}, out="runs/live")

    A run of live modules keeps them for `Run.calibrate`.

    Args:
        spec: a spec, or the path of one; None for live modules.
        request: by keywords, fields of `AnalysisRequest`: out, seed, resume, ...
        modules: by keywords, fields of `Modules`: merged, base, experts, data, ...
        settings: by keywords, fields of `LiveSettings`: metrics and sample counts of live modules.
        around: by keywords, fields of `Around`: progress, device, cancel, ...

    Raises:
        SpecError: a setting is unknown or not allowed, or belongs to the other kind of run.
    """
    if (spec is None) == (len(modules.missing) == len(REQUIRED)) or (spec is None and modules.missing):
        raise SpecError("pass either a spec, or merged=, experts= and data=")
    _refuse_misplaced_settings(request, settings, is_spec=spec is not None)
    with around.context() as context:
        if spec is not None:
            # Reading a spec needs libraries that live modules do without.
            from driftlens.pipelines.analyze import analyze as analyze_spec

            return Run.at(analyze_spec(spec, request, context).path)
        from driftlens.pipelines.in_memory import analyze_study, live_study

        run = Run.at(analyze_study(live_study(modules, settings), request, settings, context).path)
    # Kept in memory only: a run directory does not hold modules.
    run._live = {**vars(modules), **{name: getattr(settings, name) for name in settings.model_fields_set}}
    return run


def _refuse_misplaced_settings(request: AnalysisRequest, settings: LiveSettings, *, is_spec: bool) -> None:
    """Refuse settings of specs for live modules, and settings of live modules for specs."""
    # Keywords of both kinds of run; `keywords` passes them to both requests.
    both = {"out", "resume", "force", "seed"}
    misplaced = (settings if is_spec else request).model_fields_set - both
    if misplaced:
        kind, other = ("a spec", "live modules") if is_spec else ("live modules", "a spec")
        raise SpecError(f"{min(misplaced)} belongs to {other}; given: {kind}")


@keywords(request=CalibrationRequest)
def calibrate(
    run: PathLike | DriftRun,
    request: CalibrationRequest,
    around: Around,
    *,
    modules: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    on_measured: Callable[[DriftRun], None] | None = None,
) -> Run:
    """Calibrate the merged model of a run and measure the result, as `driftlens calibrate` does.

        run = dl.calibrate("runs/ta8", name="featcal", preset="paper-clip", lam=0.1)

    Args:
        run: the run, or its directory.
        request: by keywords, fields of `CalibrationRequest`: name, method, preset, ...
        around: by keywords, fields of `Around`: progress, device, cancel, ...
        modules: for a run of live modules, see `Run.calibrate`.
        data: for a run of live modules, see `Run.calibrate`.
        on_measured: called with the run once drift and accuracy are measured.
    """
    return _calibrate_run(run, request, around, modules, data, on_measured)


def _calibrate_run(
    run: PathLike | DriftRun,
    request: CalibrationRequest,
    around: Around,
    modules: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    on_measured: Callable[[DriftRun], None] | None,
) -> Run:
    from driftlens.pipelines.calibrate import calibrate as run_calibration

    with around.context(_live_study_opener(run, modules, data, around.device)) as context:
        run_calibration(_run_folder(run), request, context, on_measured=on_measured)
    return _reopen_with_modules(run)


@keywords(request=ProjectionRequest, around=Quietly)
def project(
    run: PathLike | DriftRun,
    task: str,
    request: ProjectionRequest,
    around: Around,
    *,
    store_it: bool = True,
) -> Projection:
    """Compute one joint 2-D layout of the features of the expert and the variants. Stored coordinates are reused.

    Args:
        run: the run, or its directory.
        task: a task of the run.
        request: by keywords, fields of `ProjectionRequest`: method, layer, ...
        around: by keywords, fields of `Around`.
        store_it: True to store new coordinates in the run.
    """
    from driftlens.results.projection import project as lay_out

    with around.context() as context:
        on_progress, cancel = context.on_progress, context.cancel
        return lay_out(run, task, request, store_it=store_it, on_progress=on_progress, cancel=cancel)


@keywords(request=MergeRequest)
def merge(spec: SpecLike, request: MergeRequest, around: Around) -> Path:
    """Merge the experts of a spec and save the result in the format of the base, as `driftlens merge` does.

        dl.merge("run.yaml", method="task_arithmetic", out="merged/", parameters={"scaling": 0.3})

    Without a method the spec's own merge is made. Notices, such as changes lost to rounding, are logged as warnings.

    Args:
        spec: a spec, or the path of one.
        request: by keywords, fields of `MergeRequest`: method, out, parameters, ...
        around: by keywords, fields of `Around`.
    """
    from driftlens.experiment.merging import save_one

    for notice in save_one(spec, request, around.context)[1]:
        log.warning(notice)
    # `save_one` refuses a request without it, which type checkers can't know.
    assert request.out is not None
    return request.out


@keywords(request=ComparisonRequest)
def compare_merges(spec: SpecLike, request: ComparisonRequest, around: Around) -> Table:
    """Rank merges of a spec's experts by their distance from the experts, without labels, as `merge --compare` does.

        dl.compare_merges("run.yaml", ["average", "ties", ("ties", {"scaling": 0.4})]).frame()

    Args:
        spec: a spec, or the path of one.
        request: by keywords, fields of `ComparisonRequest`: merges, out, ...
        around: by keywords, fields of `Around`.
    """
    from driftlens.config.run import load_spec
    from driftlens.pipelines.compare_merges import compare_merges as compared
    from driftlens.pipelines.compare_merges import resolve_merges
    from driftlens.utils.files import require_free
    from driftlens_reports.merges import merges_sheet, write_merges

    out = request.out
    # Before the comparison, which may take hours, and not after it.
    if out is not None:
        require_free(out)
    merges = resolve_merges(request.merges or [("all", {})])
    with around.context() as context:
        ranked = compared(load_spec(spec), merges, context)
    if out is not None:
        write_merges(ranked, out)
    return merges_sheet(ranked)


@keywords(request=PreflightRequest)
def validate(spec: SpecLike, request: PreflightRequest, around: Around) -> Preflight:
    """Check a spec, its checkpoints and its data without loading weights, as `driftlens validate` does.

        checks = dl.validate("run.yaml")
        print(checks.text())

    Args:
        spec: a spec, or the path of one.
        request: by keywords, fields of `PreflightRequest`.
        around: by keywords, fields of `Around`.
    """
    from driftlens.config.run import load_spec
    from driftlens.pipelines.validate import preflight

    return preflight(load_spec(spec, request.overrides), request, around.access)


@keywords(request=SweepRequest)
def sweep(
    run: PathLike | DriftRun,
    request: SweepRequest,
    around: Around,
    *,
    modules: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Run:
    """Calibrate a run with many settings, or by several methods, as `driftlens sweep` does.

        dl.sweep("runs/ta8", param={"lam": [0.01, 0.05, 0.25]}).sweeps()
        dl.sweep("runs/ta8", methods=["featcal", "residual", ("surgery", {"rank": 4})]).repairs()

    With `methods` and no settings to vary, each method becomes a calibration; those that fail are logged as warnings.

    Args:
        run: the run, or its directory.
        request: by keywords, fields of `SweepRequest`: param, methods, samples, ...
        around: by keywords, fields of `Around`.
        modules: for a run of live modules, see `Run.calibrate`.
        data: for a run of live modules, see `Run.calibrate`.
    """
    from driftlens.pipelines.sweep import compare_methods, resolve_methods
    from driftlens.pipelines.sweep import sweep as run_sweep

    with around.context(_live_study_opener(run, modules, data, around.device)) as context:
        if request.compares:
            methods = resolve_methods(request.methods or ())
            failed = compare_methods(_run_folder(run), methods, context, samples=request.samples)
            for name, reason in failed.items():
                log.warning(f"{name} failed: {reason}")
        else:
            run_sweep(_run_folder(run), request, context)
    return _reopen_with_modules(run)
