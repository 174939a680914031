"""Python interface: the commands as functions, some also for modules in memory.

Keyword arguments are the fields of the requests in `driftlens.config.requests` and of `JobArguments` (device ...).
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
    fields_as_keywords,
)
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, has_live_modules
from driftlens.utils.distributed import JobArguments, QuietJobArguments
from driftlens.utils.errors import SpecError
from driftlens.utils.files import PathLike

# Functions import what needs torch or plotly, so that saved runs are read without them.
if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from driftlens.calibration.calibrator import Calibrator
    from driftlens.config.spec import RunSpec
    from driftlens.pipelines.validate import PreflightReport
    from driftlens.results.formatting import Table
    from driftlens.results.projection import Projection
    from driftlens_reports.charts.chart import RunCharts
    from driftlens_reports.explorer import Explorer

    SpecLike = Path | str | Mapping[str, Any] | RunSpec

log = logging.getLogger("driftlens")


class Run(DriftRun):
    """A saved run with methods that plot it, calibrate it and add measurements to it."""

    @property
    def plot(self) -> RunCharts:
        """All charts by name: `run.plot.layer_drift(tasks=["cars"])`."""
        from driftlens_reports.charts.chart import RunCharts

        return RunCharts(self)

    # Arguments of `analyze` for live modules. A run directory holds no modules, so a reopened run has None.
    _live: Mapping[str, Any] | None = None

    @fields_as_keywords(request=CalibrationRequest, around=QuietJobArguments)
    def calibrate(
        self,
        calibrator: Calibrator,
        request: CalibrationRequest,
        around: JobArguments,
        *,
        modules: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        on_measured: Callable[[DriftRun], None] | None = None,
    ) -> Run:
        """Calibrate the merged model, measure it as variant `calibrated:NAME`, and return the run.

            run = run.calibrate(dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3), name="featcal")
            merged.load_state_dict(run.calibrated_state("featcal"))

        Args:
            calibrator: a calibrator of a registered class, with settings.
            request: by keywords, name and other fields of `CalibrationRequest`.
            around: by keywords, progress, device and other fields of `JobArguments`.
            modules: modules of a run of live modules, as passed to `analyze`. Required if the run was reopened. Other
                settings, weights, samples, labels or heads are refused.
            data: calibration samples per task for a run of live modules; by default those of the analysis.
            on_measured: called with the run once drift and accuracy are measured.
        """
        from driftlens.pipelines.calibration_plan import registered_method

        merged_request = request.with_changes(
            method=request.method or registered_method(calibrator),
            # Settings passed by keyword override those of the calibrator.
            parameters={**calibrator.get_params(), **request.parameters},
        )
        return _calibrate_run(self, merged_request, around, modules, data, on_measured)

    def summary(self) -> Table:
        """Return a table with one row per task: scores and drift of all variants, rounded."""
        from driftlens.results.verdict import summary_table

        return summary_table(self)

    def repairs(self) -> Table:
        """Return a table of all calibrations: gains with paired confidence intervals, and costs."""
        from driftlens.results.calibration_summary import leaderboard_table

        return leaderboard_table(self)

    def findings(self) -> pd.DataFrame:
        """Return the numbers of the verdict and of all result tables, one per row, with 95 % intervals.

        Columns: measure, task (empty for the mean), variant, against (the reference of a change, else empty), value,
        low, high, n, paired (True if the interval of a change uses the same samples), kind and worse.
        """
        from driftlens.results.measures import findings_frame

        return findings_frame(self)

    @fields_as_keywords(request=ViewRequest)
    def view(self, request: ViewRequest) -> Explorer:
        """Create an interactive HTML page to compare samples across variants; `out` saves it."""
        from driftlens_reports.explorer import Explorer

        made = Explorer(self, request)
        if request.out is not None:
            made.save(request.out)
        return made

    def _repr_html_(self) -> str:
        """Return headline and summary table as HTML for notebooks."""
        from driftlens.results.verdict import headline
        from driftlens_reports.content import ReportHeadline
        from driftlens_reports.formats.page import standalone_headline

        heading = standalone_headline(ReportHeadline.model_validate(headline(self)))
        return f'{heading}<div style="overflow-x: auto">{self.summary()._repr_html_()}</div>'

    def before_after(self, name: str) -> pd.DataFrame:
        """Return final drift and accuracy before and after a calibration, with intervals: one row per task and model.

        `attrs["notices"]` has the notices of the calibration.
        """
        from driftlens.results.calibration_summary import before_after_rows

        return before_after_rows(self, name)

    def calibrated_state(self, name: str) -> dict[str, Tensor]:
        """Load the weights of the calibration `name` for `load_state_dict`, without correction modules."""
        from driftlens.checkpoints.loading import open_checkpoint
        from driftlens.runs.manifest import calibrated_weights_file

        # Called for its error, which lists the calibrations; a missing file would name only its path.
        self.calibration_info(name)
        weights = open_checkpoint(self.path / calibrated_weights_file(name))
        return {key: weights.read(key) for key in weights.headers}

    @fields_as_keywords(around=JobArguments)
    def measure(self, around: JobArguments, *, add: Sequence[str] | str = ()) -> Run:
        """Measure what the run lacks: scores, attribution of drift to layers, and diagnostics named in `add`."""
        from driftlens.pipelines.analyze import measure_missing_parts

        with around.context() as context:
            measure_missing_parts(self.path, context, (add,) if isinstance(add, str) else add)
        return Run.at(self.path)


def open_run(path: PathLike) -> Run:
    """Open the run in the directory `path`; tables are loaded on first use."""
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
    """Return a function that reopens a run's modules in memory; None for a run made from a spec."""
    folder = _run_folder(run)
    kept = run._live if isinstance(run, Run) else None
    if kept is None and modules is None and data is None:
        return None
    if not has_live_modules(read_manifest(folder)):
        raise SpecError(
            f"{folder} has a spec; modules= and data= are for live modules",
            hint="Remove both; `samples` sets the number of calibration samples.",
        )
    # The pipeline refuses a run that lacks its modules, with a hint.
    if kept is None and modules is None:
        return None
    from driftlens.pipelines.in_memory import reopen_live_study

    arguments = {**(kept or {}), **(modules or {})}
    arguments |= {} if device is None else {"device": device}
    return partial(reopen_live_study, folder, arguments, data)


@fields_as_keywords(request=AnalysisRequest, modules=Modules, settings=LiveSettings, around=JobArguments)
def analyze(
    spec: SpecLike | None = None,
    *,
    request: AnalysisRequest,
    modules: Modules,
    settings: LiveSettings,
    around: JobArguments,
) -> Run:
    """Measure the feature drift of the models of a spec, or of modules in memory, and write a run directory.

        run = dl.analyze("run.yaml", out="runs/ta8")
        run = dl.analyze(base=b, merged=m, experts={"cars": e}, data={"cars": loader}, out="runs/live")

    A run of live modules keeps them for `Run.calibrate`.

    Args:
        spec: a spec, or the path of one; None for live modules.
        request: by keywords, fields of `AnalysisRequest`: out, seed, resume, ...
        modules: by keywords, fields of `Modules`: merged, base, experts, data, ...
        settings: by keywords, fields of `LiveSettings`: metrics and sample counts of live modules.
        around: by keywords, fields of `JobArguments`: progress, device, cancel, ...

    Raises:
        SpecError: a setting is unknown or not allowed, or belongs to the other kind of run.
    """
    if (spec is None) == (len(modules.missing_fields) == len(REQUIRED)) or (spec is None and modules.missing_fields):
        raise SpecError("pass either a spec, or merged=, experts= and data=")
    _refuse_misplaced_settings(request, settings, is_spec=spec is not None)
    with around.context() as context:
        if spec is not None:
            # Reading a spec needs libraries that live modules do without.
            from driftlens.pipelines.analyze import analyze as analyze_spec

            return Run.at(analyze_spec(spec, request, context).path)
        from driftlens.pipelines.in_memory import analyze_study, study_of_modules

        run = Run.at(analyze_study(study_of_modules(modules, settings), request, settings, context).path)
    # Kept in memory only: a run directory does not hold modules.
    run._live = {**vars(modules), **{name: getattr(settings, name) for name in settings.model_fields_set}}
    return run


def _refuse_misplaced_settings(request: AnalysisRequest, settings: LiveSettings, *, is_spec: bool) -> None:
    """Raise an error for settings that apply only to specs, or only to modules in memory."""
    # Keywords of both kinds of run; `fields_as_keywords` passes them to both requests.
    both = {"out", "resume", "force", "seed"}
    misplaced = (settings if is_spec else request).model_fields_set - both
    if misplaced:
        kind, other = ("a spec", "live modules") if is_spec else ("live modules", "a spec")
        raise SpecError(f"{min(misplaced)} belongs to {other}; given: {kind}")


@fields_as_keywords(request=CalibrationRequest, around=JobArguments)
def calibrate(
    run: PathLike | DriftRun,
    request: CalibrationRequest,
    around: JobArguments,
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
        around: by keywords, fields of `JobArguments`: progress, device, cancel, ...
        modules: for a run of live modules, see `Run.calibrate`.
        data: for a run of live modules, see `Run.calibrate`.
        on_measured: called with the run once drift and accuracy are measured.
    """
    return _calibrate_run(run, request, around, modules, data, on_measured)


def _calibrate_run(
    run: PathLike | DriftRun,
    request: CalibrationRequest,
    around: JobArguments,
    modules: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    on_measured: Callable[[DriftRun], None] | None,
) -> Run:
    from driftlens.pipelines.calibrate import calibrate as run_calibration

    with around.context(_live_study_opener(run, modules, data, around.device)) as context:
        run_calibration(_run_folder(run), request, context, on_measured=on_measured)
    return _reopen_with_modules(run)


@fields_as_keywords(request=ProjectionRequest, around=QuietJobArguments)
def project(
    run: PathLike | DriftRun,
    task: str,
    request: ProjectionRequest,
    around: JobArguments,
    *,
    store_it: bool = True,
) -> Projection:
    """Compute a 2-D projection of the features of the expert and the variants; stored coordinates are reused.

    Args:
        run: the run, or its directory.
        task: a task of the run.
        request: by keywords, fields of `ProjectionRequest`: method, layer, ...
        around: by keywords, fields of `JobArguments`.
        store_it: True to store new coordinates in the run.
    """
    from driftlens.results.projection import project as lay_out

    with around.context() as context:
        return lay_out(run, task, request, store_it=store_it, report=context.reporter().step)


@fields_as_keywords(request=MergeRequest, around=JobArguments)
def merge(spec: SpecLike, request: MergeRequest, around: JobArguments) -> Path:
    """Merge the experts of a spec and save the result as a checkpoint in the format of the base.

        dl.merge("run.yaml", method="task_arithmetic", out="merged/", parameters={"scaling": 0.3})

    Without a method the spec's own merge is made. Notices, such as changes lost to rounding, are logged as warnings.

    Args:
        spec: a spec, or the path of one.
        request: by keywords, fields of `MergeRequest`: method, out, parameters, ...
        around: by keywords, fields of `JobArguments`.
    """
    from driftlens.experiment.merging import merge_and_save

    for notice in merge_and_save(spec, request, around.context)[1]:
        log.warning(notice)
    # `merge_and_save` refuses a request without it, which type checkers can't know.
    assert request.out is not None
    return request.out


@fields_as_keywords(request=ComparisonRequest, around=JobArguments)
def compare_merges(spec: SpecLike, request: ComparisonRequest, around: JobArguments) -> Table:
    """Rank merge methods by the distance of their merges from the experts, without labels.

        dl.compare_merges("run.yaml", ["average", "ties", ("ties", {"scaling": 0.4})]).frame()

    Args:
        spec: a spec, or the path of one.
        request: by keywords, fields of `ComparisonRequest`: merges, out, ...
        around: by keywords, fields of `JobArguments`.
    """
    from driftlens.config.spec import load_spec
    from driftlens.pipelines.compare_merges import compare_merges as compared, resolve_merges
    from driftlens.utils.files import require_unused_path
    from driftlens_reports.merges import merge_ranking_table, write_merge_ranking

    out = request.out
    # Before the comparison, which may take hours, and not after it.
    if out is not None:
        require_unused_path(out)
    merges = resolve_merges(request.merges or [("all", {})])
    with around.context() as context:
        ranked = compared(load_spec(spec), merges, context)
    if out is not None:
        write_merge_ranking(ranked, out)
    return merge_ranking_table(ranked)


@fields_as_keywords(request=PreflightRequest, around=JobArguments)
def validate(spec: SpecLike, request: PreflightRequest, around: JobArguments) -> PreflightReport:
    """Check a spec, its checkpoints and its data without loading weights, as `driftlens validate` does.

        checks = dl.validate("run.yaml")
        print(checks.text())

    Args:
        spec: a spec, or the path of one.
        request: by keywords, fields of `PreflightRequest`.
        around: by keywords, fields of `JobArguments`.
    """
    from driftlens.config.spec import load_spec
    from driftlens.pipelines.validate import preflight

    return preflight(load_spec(spec, request.overrides), request, around.access)


@fields_as_keywords(request=SweepRequest, around=JobArguments)
def sweep(
    run: PathLike | DriftRun,
    request: SweepRequest,
    around: JobArguments,
    *,
    modules: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Run:
    """Calibrate a run with many settings or several methods, and record drift and accuracy of each.

        dl.sweep("runs/ta8", param={"lam": [0.01, 0.05, 0.25]}).sweeps()
        dl.sweep("runs/ta8", methods=["featcal", "residual", ("surgery", {"rank": 4})]).repairs()

    With `methods` and no settings to vary, each method becomes a calibration; those that fail are logged as warnings.

    Args:
        run: the run, or its directory.
        request: by keywords, fields of `SweepRequest`: param, methods, samples, ...
        around: by keywords, fields of `JobArguments`.
        modules: for a run of live modules, see `Run.calibrate`.
        data: for a run of live modules, see `Run.calibrate`.
    """
    from driftlens.pipelines.sweep import compare_methods, resolve_calibrators, sweep as run_sweep

    with around.context(_live_study_opener(run, modules, data, around.device)) as context:
        if request.is_comparison:
            methods = resolve_calibrators(request.methods or ())
            failed = compare_methods(_run_folder(run), methods, context, samples=request.samples)
            for name, reason in failed.items():
                log.warning(f"{name} failed: {reason}")
        else:
            run_sweep(_run_folder(run), request, context)
    return _reopen_with_modules(run)
