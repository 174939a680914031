"""The Python front door: the command line's verbs as functions, some for live modules too, and runs to add to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.base.access import Access
from driftlens.base.errors import DataError, SpecError
from driftlens.base.files import PathLike
from driftlens.base.progress import CancelToken, Mode, ProgressEvent, ProgressSink, sink_for
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun
from driftlens.runs.standing import is_live

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from driftlens.calibration.calibrator import Calibrator
    from driftlens.findings.projection import Projection
    from driftlens.findings.table import Table
    from driftlens.jobs.preflight.outcome import Preflight
    from driftlens.jobs.study.reopening import Live
    from driftlens.spec import RunSpec


class Run(DriftRun):
    """A run that can also be added to; like every run it is read without torch."""

    @property
    def plot(self) -> Any:
        """Every chart by its name, as reports and the dashboard show it: `run.plot.layer_drift(tasks=["cars"])`.

        Names complete with the tab key. What is drawn shows itself in notebooks; its `figure` is plotly's, `data` every
        plotted number.
        """
        from driftlens_reports.charts.plots import Plots

        return Plots(self)

    _live: Mapping[str, Any] | None = None
    """What `analyze` was given, if that was live modules; a run that is opened anew doesn't know."""

    def calibrate(
        self,
        calibrator: Calibrator,
        *,
        name: str,
        modules: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Run:
        """Calibrate the merged model and measure the result; the run, opened anew, has `calibrated:NAME` too.

            run = run.calibrate(dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3), name="featcal")
            merged.load_state_dict(run.calibrated_state("featcal"))

        Args:
            calibrator: its settings; of a registered class.
            name: of the calibration.
            modules: for a run of live modules that was opened anew, what `analyze` was given: `base`, `merged`,
                `experts`, `data`, `heads`; for one that `analyze` just returned, what is to stand in for it. Settings
                are those of the run; other ones, and other weights, samples, labels or heads, are refused.
            data: for a run of live modules, samples per task to calibrate on, labels ignored; the calibration says so
                where they are those that the run was analyzed on, as they are if left out.
            **options: all other keywords of `driftlens.calibrate`; no progress is shown by default.

        Raises:
            SpecError: the calibrator's class is not registered, or something is missing.
            CheckpointError: a model is not the one that the run was made with.
            DataError: samples are not those that the run was made with.
            DriftLensError: see the tree in `driftlens.base.errors`.
        """
        from driftlens.jobs.calibrate.plan import method_called

        settings = {"method": method_called(calibrator), "parameters": calibrator.get_params()}
        given = {"progress": "none", **settings, **options}
        return calibrate(self, name=name, modules=modules, data=data, **given)

    def summary(self) -> Table:
        """Every task in a row: scores of base, expert, merged and calibrated models with intervals, and their drift.

        It shows itself as a table, in notebooks and as text; its `frame()` has the numbers, unrounded. Errors as for
        `layers`.
        """
        from driftlens.findings.summary import summary_sheet

        return summary_sheet(self)

    def project(self, task: str, **choices: Any) -> Projection:
        """One layout of the expert's and the variants' features on a plane, stored in the run once computed.

        Options and errors as for `driftlens.project`: layer, method, seed, variants, fit_on, max_points.
        """
        from driftlens.findings.projection import project

        return project(self, task, **choices)

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        return self.summary()._repr_html_()

    def before_after(self, name: str) -> pd.DataFrame:
        """Final drift and accuracy before and after a calibration, with intervals: one row per task and model.

        The models are the merged one, the anchor alone where there is such a control, the calibrated one and, for its
        accuracy, the expert. `attrs["notices"]` has what a reader should know of the calibration.

        Raises:
            DataError: the run has no such calibration.
            RunError: a table can't be read.
        """
        from driftlens.findings.before_after import before_after

        return before_after(self, name)

    def calibrated_state(self, name: str) -> dict[str, Tensor]:
        """The weights of the calibration `name`, for `load_state_dict` of a model like the merged one.

        What a trained calibrator attaches to the model is not among them.

        Raises:
            DataError: the run has no such calibration.
            CheckpointError: the file is missing or damaged.
        """
        from driftlens.checkpoints.loading import open_checkpoint
        from driftlens.runs.layout import calibration_weights

        if name not in self.manifest.calibrations:
            there = ", ".join(self.manifest.calibrations) or "none"
            raise DataError(f"the run has no calibration {name!r}; there are: {there}")
        weights = open_checkpoint(self.path / calibration_weights(name))
        return {key: weights.read(key) for key in weights.headers}

    def explain(self, **options: Any) -> Run:
        """Trace the drift of every variant back to layers, where that was left out or interrupted.

        Args:
            **options: on_progress, cancel, device, offline, trust as for `calibrate`.

        Raises:
            DriftLensError: as for `driftlens.jobs.analyze.job.explain`.
        """
        from driftlens.jobs.analyze.job import explain

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


def _folder(run: PathLike | DriftRun) -> Path:
    return run.path if isinstance(run, DriftRun) else Path(run)


def _live_study(
    run: PathLike | DriftRun,
    modules: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    access: Access,
) -> Live | None:
    """How the study of a run of live modules is made again; None for a run of a spec."""
    folder = _folder(run)
    known = run._live if isinstance(run, Run) else None
    if known is None and modules is None and data is None:
        return None
    if not is_live(read_manifest(folder)):
        raise SpecError(
            f"{folder} was made from a spec, which names its models and data",
            hint="Leave modules= and data= out; `samples` says how many to calibrate on.",
        )
    if known is None and modules is None:
        return None  # refused with what to do, as a run of modules that nobody hands in
    from driftlens.jobs.analyze.live import live_again

    given = {**(known or {}), **(modules or {})}
    given |= {} if access.device is None else {"device": access.device}
    return partial(live_again, folder, given, data)


@contextmanager
def _watched(progress: Mode, on_progress: ProgressSink | None, **more: Any) -> Iterator[dict[str, Any]]:
    """Keywords for the pipeline, `more` among them: a sink that shows progress as asked, and tells the caller's own."""
    with sink_for(progress) as shown:

        def sink(event: ProgressEvent) -> None:
            shown(event)
            if on_progress is not None:
                on_progress(event)

        yield {"on_progress": sink, **more}


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

    The run of live modules remembers them, so that `Run.calibrate` can go on with them.

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
        resume: go on where an interrupted run of the same spec, or of the same modules and data, stopped.
        force: replace the run that is there.
        **options: with a spec, those of `driftlens.jobs.analyze.job.analyze` (attribution, device, offline, trust,
            overrides); with modules, those of `driftlens.jobs.analyze.live.live_study` (heads, baselines, layers,
            blocks, mask, pool, n, batch_size, cka, jacobian, adjoint, groups, calibration, device, seed, name).

    Raises:
        SpecError: both a spec and modules are given, or neither.
        DriftLensError: see the tree in `driftlens.base.errors`.
    """
    with _watched(progress, on_progress, cancel=cancel, resume=resume, force=force) as watched:
        if spec is not None and merged is None and experts is None and data is None:
            # Reading a spec needs libraries that a machine which only computes may lack.
            from driftlens.jobs.analyze.job import analyze as analyze_spec
            from driftlens.spec import load_spec

            resolved, access = load_spec(spec), _access(options)
            folder = Path("runs", resolved.name) if out is None else Path(out)
            analyze_spec(resolved, out=folder, access=access, **watched, **options)
            return Run.at(folder)
        if spec is not None or merged is None or experts is None or data is None:
            raise SpecError("pass either a spec, or merged=, experts= and data=")
        from driftlens.jobs.analyze.live import analyze_study, live_study, recorded

        given = {"merged": merged, "experts": experts, "data": data, "base": base, **options}
        study = live_study(**given)
        folder = Path("runs", study.name) if out is None else Path(out)
        analyze_study(study, out=folder, settings=recorded(given), **watched)
        run = Run.at(folder)
        run._live = given
        return run


def calibrate(
    run: PathLike | DriftRun,
    *,
    name: str,
    lam: float | None = None,
    rho: float | None = None,
    alpha: float | None = None,
    parameters: Mapping[str, object] | None = None,
    auto: bool = False,
    modules: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    progress: Mode = "auto",
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    **options: Any,
) -> Run:
    """Calibrate the merged model of a run and measure the result, as `driftlens calibrate` does.

        run = dl.calibrate("runs/ta8", name="featcal", preset="paper-clip", lam=0.1)

    Args:
        run: a run, or its directory.
        name: of the calibration; its variant is `calibrated:NAME`.
        lam: ridge, over the preset's.
        rho: anchor, likewise.
        alpha: share of the expert in the target, likewise.
        parameters: other settings of the calibrator by name.
        auto: whether the best is chosen on held-out calibration samples: the merged model, the base, these settings, a
            search from them and, without `method`, what other methods offer.
        modules: live modules and what belongs to them, as for `Run.calibrate`.
        data: samples to calibrate on, as for `Run.calibrate`.
        progress: how progress is shown on stderr.
        on_progress: called with every `ProgressEvent`, besides.
        cancel: a token whose `cancel()` stops the work at the next batch.
        **options: method, preset, samples, layers, sites, top_layers, control (the same at rho 1 too); resume, replace,
            save_weights, attribution, on_first, on_measured as for `driftlens.jobs.calibrate.job.calibrate`;
            device, offline, trust as in `Access`.

    Raises:
        DriftLensError: see the tree in `driftlens.base.errors`.
    """
    from driftlens.jobs.calibrate.job import calibrate as run_calibration
    from driftlens.jobs.calibrate.plan import CalibrationRequest
    from driftlens.jobs.contest.automatic import BEST, HELD_OUT
    from driftlens.jobs.contest.sweep import control as measure_control

    given = {"lam": lam, "rho": rho, "alpha": alpha}
    settings = {**(parameters or {}), **{key: value for key, value in given.items() if value is not None}}
    asked = {field.name for field in fields(CalibrationRequest)} & set(options)
    request = CalibrationRequest(name, parameters=settings, **{key: options.pop(key) for key in asked})
    automatic = BEST if request.method is None else HELD_OUT
    access, choose = _access(options), automatic if auto else options.pop("choose", None)
    live = _live_study(run, modules, data, access)
    with _watched(progress, on_progress, cancel=cancel, access=access, live=live) as watched:
        found = Run.at(run_calibration(_folder(run), request, choose=choose, **watched, **options).path)
        if request.control:
            found = Run.at(measure_control(found.path, name, **watched).path)
    found._live = run._live if isinstance(run, Run) else None
    return found


def merge(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    *,
    method: str,
    out: PathLike,
    parameters: Mapping[str, object] | None = None,
    **options: Any,
) -> Path:
    """Merge the experts of a spec and save the result in the format of the base, as `driftlens merge` does.

        dl.merge("run.yaml", method="task_arithmetic", out="merged/", parameters={"scaling": 0.3})

    Args:
        spec: a spec file, its values, or a checked spec.
        method: a registered merge method.
        out: a .safetensors file, or a folder that the original library loads.
        parameters: settings of the method by name.
        **options: device, offline, trust as in `Access`.

    Returns:
        Where it was saved.

    Raises:
        DriftLensError: see the tree in `driftlens.base.errors`.
    """
    from driftlens.jobs.study.merging import merge_experts
    from driftlens.spec import load_spec

    access = _access(options)
    merge_experts(load_spec(spec), method, parameters or {}, out, access, **options)
    return Path(out)


def compare_merges(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    merges: Sequence[str | tuple[str, Mapping[str, object]]] = ("all",),
    *,
    out: PathLike | None = None,
    keep: bool = False,
    progress: Mode = "auto",
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    **options: Any,
) -> Table:
    """Merges of a spec's experts ranked without labels by how near they are to them, as `merge --compare` does.

        dl.compare_merges("run.yaml", ["average", "ties", ("ties", {"scaling": 0.4})]).frame()

    Args:
        spec: a spec file, its values, or a checked spec.
        merges: registered merge methods, or pairs of one and its settings by name; `all` is every method.
        out: a new folder for the table as CSV, JSON and HTML, and its picture, or that of the same comparison which was
            stopped, and goes on; nothing is written without.
        keep: save every merge too, in that folder.
        progress: how progress is shown on stderr.
        on_progress: called with every `ProgressEvent`, besides.
        cancel: a token whose `cancel()` stops the work.
        **options: device, offline, trust as in `Access`.

    Returns:
        The ranking with intervals: a table in a notebook; `frame()` has its numbers, `notes()` what to know of them.

    Raises:
        DriftLensError: see the tree in `driftlens.base.errors`.
    """
    from driftlens.jobs.contest.merges import compare_merges as compared
    from driftlens.jobs.contest.merges import require_place, wanted_merges
    from driftlens.spec import load_spec
    from driftlens_reports.merges import merges_sheet, write_merges

    if keep and out is None:
        raise SpecError("keep=True saves every merge in a folder, and there is none", hint="Give out=FOLDER.")
    if out is not None:
        require_place(out)
    wanted = wanted_merges([(each, {}) if isinstance(each, str) else each for each in merges])
    access = _access(options)
    with _watched(progress, on_progress, cancel=cancel, access=access) as watched:
        found = compared(
            load_spec(spec), wanted, out=out, keep=keep, write=write_merges, **watched, **options
        )
    return merges_sheet(found)


def validate(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    *,
    overrides: Sequence[str] = (),
    deep: bool = False,
    **options: Any,
) -> Preflight:
    """Check a spec, its checkpoints and its data before anything large is read, as `driftlens validate` does.

        found = dl.validate("run.yaml")
        print(found.text())
        assert not found.problems

    Args:
        spec: a spec file, its values, or a checked spec.
        overrides: `a.b=value` each, over the spec.
        deep: also score every expert on its own data.
        **options: device, offline, trust as in `Access`.

    Returns:
        All findings, problems among them, and an estimate of the cost.

    Raises:
        SpecError: the spec itself can't be read.
    """
    from driftlens.jobs.preflight.job import preflight
    from driftlens.spec import load_spec

    access = _access(options)
    return preflight(load_spec(spec, overrides), deep=deep, access=access, **options)


def sweep(
    run: PathLike | DriftRun,
    *,
    param: Mapping[str, Sequence[float]],
    resume: bool = False,
    replace: bool = False,
    modules: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    progress: Mode = "auto",
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    **options: Any,
) -> Run:
    """Calibrate a run with many settings side by side, as `driftlens sweep` does; its `sweeps()` has the rows.

        dl.sweep("runs/ta8", param={"lam": [0.01, 0.05, 0.25]}).sweeps()

    Args:
        run: a run, or its directory.
        param: lam, rho, alpha or n -> the values to visit.
        resume: leave out points that are there.
        replace: take earlier sweeps of the same factors out first.
        modules: live modules and what belongs to them, as for `Run.calibrate`.
        data: samples to calibrate on, as for `Run.calibrate`; a sweep of live modules needs them.
        progress: how progress is shown on stderr.
        on_progress: called with every `ProgressEvent`, besides.
        cancel: a token whose `cancel()` stops the work at the next batch.
        **options: grid, seeds, method, preset, samples, accuracy as in `driftlens.jobs.contest.sweep.SweepRequest`;
            device, offline, trust as in `Access`.

    Raises:
        DriftLensError: see the tree in `driftlens.base.errors`.
    """
    from driftlens.jobs.contest.sweep import SweepRequest
    from driftlens.jobs.contest.sweep import sweep as run_sweep

    access = _access(options)
    live = _live_study(run, modules, data, access)
    with _watched(progress, on_progress, cancel=cancel, access=access, live=live) as watched:
        request = SweepRequest(param, **options)
        found = Run.at(run_sweep(_folder(run), request, resume=resume, replace=replace, **watched).path)
    found._live = run._live if isinstance(run, Run) else None
    return found


def arena(
    run: PathLike | DriftRun,
    methods: Sequence[str | tuple[str, Mapping[str, object]]],
    *,
    progress: Mode = "auto",
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    **options: Any,
) -> Table:
    """Repair a run with several methods on the same samples, as `driftlens arena` does.

        dl.arena("runs/ta8", ["featcal", "residual", ("surgery", {"rank": 4})]).frame()

    Args:
        run: a run of a spec, or its directory; every repair becomes a calibration of it.
        methods: registered calibrators, or pairs of one and its settings by name; `all` is every method.
        progress: how progress is shown on stderr.
        on_progress: called with every `ProgressEvent`, besides.
        cancel: a token whose `cancel()` stops the work at the next batch; what is finished is kept.
        **options: samples, attribution as in `driftlens.jobs.contest.arena.compete`; device, offline, trust as in
            `Access`.

    Returns:
        What each gains and costs: a table in a notebook; `frame()` has its numbers, `notes()` what to know of them.

    Raises:
        DriftLensError: see the tree in `driftlens.base.errors`.
    """
    from driftlens.findings.arena import arena_sheet
    from driftlens.jobs.contest.arena import compete, entrants

    wanted = entrants([(each, {}) if isinstance(each, str) else each for each in methods])
    access, folder = _access(options), _folder(run)
    with _watched(progress, on_progress, cancel=cancel, access=access) as watched:
        failed = compete(folder, wanted, **watched, **options)
    return arena_sheet(open_run(folder), [each.name for each in wanted if each.name not in failed], failed)
