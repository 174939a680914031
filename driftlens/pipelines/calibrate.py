"""Calibration of a finished run: plan, solve layer by layer, save, and measure. Entry point: `calibrate`.

Solved layers are kept in a scratch folder of the run until the variant is complete.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import safe_open

from driftlens.calibration.automatic import fold_ranges
from driftlens.calibration.calibrator import Calibrator, calibrators, require_task_id
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import LazyTensors
from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest
from driftlens.data.samples import SampleSet
from driftlens.engine.calibrating import CalibratedLayer, CalibrationProgress, SiteReport
from driftlens.engine.pool import ModelPool, attachment_tensors
from driftlens.engine.sites import parameter_coverage
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import OpenModels, open_models, with_save_dtype
from driftlens.models.adapters import check_adapter
from driftlens.models.saving import check_save_path, save_state_dict
from driftlens.pipelines.adapters import save_measured_adapter
from driftlens.pipelines.analyze import (
    AnalysisPhases,
    add_calibrated_models,
    first_difference,
    load_run_spec,
    on_main_process,
    open_finished_run,
    reopen_study,
    require_same_inputs,
    run_phase,
    with_resume_hint,
)
from driftlens.pipelines.calibration_plan import (
    CalibrationExport,
    CalibrationPlan,
    CalibrationSolution,
    calibration_context,
    plan_calibration,
    registered_method,
    save_variants,
    views_of_preset,
    with_saved_results,
)
from driftlens.pipelines.evaluation import training_overlap_text
from driftlens.runs.manifest import (
    CANDIDATE,
    SCRATCH,
    CalibrationInfo,
    Manifest,
    calibrated_weights_file,
    calibration_folder,
    calibration_marker,
    read_manifest,
)
from driftlens.runs.run import (
    COMMAND,
    DriftRun,
    open_run,
    require_analyzed,
    resume_hint,
    save_hint,
)
from driftlens.runs.writer import RunWriter, remove_tree
from driftlens.utils.distributed import ALONE, JobContext, ProgressReporter
from driftlens.utils.errors import Cancelled, DriftLensError, RunError, SpecError
from driftlens.utils.files import PathLike, parse_json, write_json_atomic
from driftlens.utils.registry import resolve_settings
from driftlens.utils.variants import next_free_name, task_of_expert

# Name of an automatic choice until it is made, and of one that keeps a model unchanged.
AUTO = "auto"
# The phase of progress events while layers are solved.
_PHASE = "calibrate"


def calibrate(
    path: PathLike,
    request: CalibrationRequest,
    context: JobContext = JobContext(),
    *,
    on_measured: Callable[[DriftRun], None] | None = None,
) -> DriftRun:
    """Calibrate the merged model of a finished run and add it as variant `calibrated:NAME`.

    Existing rows keep their exact values. The variant becomes visible to readers once its drift and accuracy are
    measured, when `on_measured` is called with the run; the attribution of its drift to layers follows.

    Args:
        path: the run directory.
        request: method, settings and samples.
        context: device, progress and cancellation.
        on_measured: called with the run once drift and accuracy are measured.

    Raises:
        SpecError: a setting is invalid, or the name is taken.
        DataError: there are too few samples, or they changed.
        SingularGramError: a layer has no unique solution.
    """
    folder, team = pathlib.Path(path), context.access.team
    is_named, request = bool(request.name), _with_default_name(request, folder, context)
    # Without --replace and --resume, saving a finished calibration solves nothing.
    begins = request.replace or request.resume
    saves = request.save_weights is not None or request.save_adapter is not None
    if saves and not begins and request.name in read_manifest(folder).calibrations:
        if request.save_weights is not None:
            team.run_on_main(lambda: _export_finished_calibration(folder, request, context))
        if request.save_adapter is not None:
            _save_adapter_of_finished_calibration(folder, request, context)
        return open_run(folder)
    # Refuse before the lock is taken: a finished run must not become a failed one.
    opened = prepare_calibration(folder, request, context)
    plan, study, scratch = opened.plan, opened.study, _SolvedLayerStore(folder, opened.plan.name)
    _require_free_name(request, opened, opened.manifest)
    if request.resume:
        identity = plan.solution_inputs(opened.manifest, study) | {"automatic": request.auto}
        scratch.require_same_settings(identity, start=plan.starting_point if request.auto else {})
    export, target = None, request.save_weights
    if target is not None:
        team.run_on_main(lambda: check_save_path(opened.models.architecture, target))
        export = CalibrationExport(folder, plan.name, plan.method, opened.models, target)
    if request.save_adapter is not None:
        if not plan.calibrator.takes_sites:
            raise SpecError(f"{plan.method} changes no weights, so adapters can't hold it", hint="Use --save-weights.")
        team.run_on_main(lambda: _check_adapter(study, opened.models, request.save_adapter))
    if request.auto:
        _require_held_out_samples(plan)
    require_same_inputs(opened.manifest, study, context.reporter())
    with open_finished_run(folder, study, context) as (writer, reporter):
        # Another process may have taken the name while the models were being opened.
        _require_free_name(request, opened, writer.manifest)
        job = _CalibrationJob(request, opened, writer, reporter, is_named=is_named)
        if request.replace or not (request.resume and plan.name in writer.manifest.calibrations):
            with with_resume_hint(
                lambda: job.scratch.is_started and resume_hint(folder, job.plan.name, writer.manifest)
            ):
                job.solve_and_measure()
            if on_measured is not None and team.is_main_process:
                on_measured(open_run(folder))
        # Drift and accuracy are stored; an interruption from here on only delays the attribution.
        more = f"`{shlex.join(['driftlens', 'analyze', str(folder)])}` adds the missing attribution"
        if context.live is not None:
            more = resume_hint(folder, job.plan.name, opened.manifest)
        weights = folder / calibrated_weights_file(job.plan.name)
        with with_resume_hint(lambda: weights.is_file() and more):
            job.finish(None if export is None else dataclasses.replace(export, name=job.plan.name))
    return open_run(folder)


def _with_default_name(request: CalibrationRequest, folder: pathlib.Path, context: JobContext) -> CalibrationRequest:
    """Name an unnamed calibration after its method, with a number if the run has one of that name.

    With --auto the method is not known yet: the calibration is called `auto` until it is chosen.
    """
    if request.name:
        return request
    require_analyzed(folder)
    section = load_run_spec(folder).calibration if context.live is None else None
    stem = AUTO if request.auto else request.method or (DEFAULT_METHOD if section is None else section.method)
    # To resume or replace a calibration means the one that has the plain name.
    is_new = not (request.resume or request.replace)
    return request.with_changes(name=next_free_name(stem, read_manifest(folder).calibrations if is_new else ()))


@dataclass(frozen=True)
class PreparedCalibration:
    """A reopened run with a resolved calibration plan; `words` are the equivalent command-line options."""

    folder: pathlib.Path
    manifest: Manifest
    study: Study
    models: OpenModels
    plan: CalibrationPlan
    words: Sequence[str] = ()


def prepare_calibration(
    folder: pathlib.Path, request: CalibrationRequest, context: JobContext = JobContext()
) -> PreparedCalibration:
    """Reopen a run and resolve the requested calibration; nothing is written.

    Args:
        folder: the run directory.
        request: method, settings and samples.
        context: device, and how live modules are passed in again.
    """
    require_analyzed(folder)
    run = open_run(folder)
    spec = load_run_spec(folder) if context.live is None else None
    # Other calibrations are not needed to solve this one, and opening them takes time.
    study, models = reopen_study(folder, context, num_calibration=request.samples, with_calibrations=False)
    models = with_save_dtype(models, request.out_dtype)
    section = None if spec is None else spec.calibration
    study = dataclasses.replace(study, out_dtype=models.out_dtype)
    study = study.with_views(request.views, default=views_of_preset(request, section))
    plan = plan_calibration(request, section, study)
    if spec is not None:
        require_task_id(spec.task_id, plan.method)
    options = request.with_changes(resume=False, replace=False).to_cli_args()
    words = [*(word for word in options if not word.startswith("--name=")), *context.access.cli_options]
    return PreparedCalibration(folder, run.manifest, study, models, plan, words)


def _export_finished_calibration(folder: pathlib.Path, request: CalibrationRequest, context: JobContext) -> None:
    """Save the model of a finished calibration if it has the requested settings."""
    manifest, access = read_manifest(folder), dataclasses.replace(context.access, team=ALONE)
    # A request with only a name needs no samples and no models other than the base.
    if request.without_exports != CalibrationRequest(name=request.name):
        opened = prepare_calibration(folder, request, dataclasses.replace(context, access=access))
        _require_free_name(request.with_changes(resume=True), opened, manifest)
        models = opened.models
    elif context.live is not None:
        _, models = context.live(None)
    else:
        models = open_models(load_run_spec(folder), access)
    assert request.save_weights is not None
    info = manifest.calibrations[request.name]
    models = with_save_dtype(models, info.out_dtype)
    check_save_path(models.architecture, request.save_weights)
    export = CalibrationExport(folder, request.name, info.method, models, request.save_weights)
    export.require_unchanged(manifest)
    export.save(info)


def _save_adapter_of_finished_calibration(
    folder: pathlib.Path, request: CalibrationRequest, context: JobContext
) -> None:
    """Save and measure LoRA adapters of a finished calibration if it has the requested settings."""
    name, manifest = request.name, read_manifest(folder)
    if request.without_exports != CalibrationRequest(name=name):
        opened = prepare_calibration(folder, request, context)
        _require_free_name(request.with_changes(resume=True), opened, manifest)
    study, models = reopen_study(folder, context)
    require_same_inputs(manifest, study, context.reporter())
    if manifest.calibrations[name].attached:
        raise SpecError(f"{name!r} changes no weights, so adapters can't hold it", hint="Use --save-weights.")
    study.team.run_on_main(lambda: _check_adapter(study, models, request.save_adapter))
    with open_finished_run(folder, study, context) as (writer, reporter):
        on_main_process(study.team, writer, lambda: _save_adapter(writer, study, models, request, reporter))
        on_main_process(study.team, writer, lambda: _write_model_card(writer, name))


def _check_adapter(study: Study, models: OpenModels, target: pathlib.Path | None) -> None:
    assert target is not None
    check_adapter(models.architecture, models.sources.get("base"), study.pool.source("merged"), target)


def _save_adapter(
    writer: RunWriter, study: Study, models: OpenModels, request: CalibrationRequest, reporter: ProgressReporter
) -> None:
    assert request.save_adapter is not None and request.rank is not None
    save_measured_adapter(writer, study, models, request.name, request.save_adapter, request.rank, reporter)


def _write_model_card(writer: RunWriter, name: str) -> None:
    from driftlens.experiment.model_card import model_card

    with writer.file(f"{calibration_folder(name)}/README.md") as file:
        file.write_text(model_card(open_run(writer.folder), name), encoding="utf-8")


def _require_free_name(request: CalibrationRequest, opened: PreparedCalibration, manifest: Manifest) -> None:
    """Refuse the name of a finished calibration with other settings, unless it is to be replaced."""
    name, finished = opened.plan.name, manifest.calibrations.get(opened.plan.name)
    if finished is None or request.replace:
        return
    hint = f"Choose another --name or add --replace; {save_hint(opened.folder, name, manifest)}."
    if not request.resume:
        raise SpecError(f"the run has a calibration {name!r} already", hint=hint)
    if text := _difference_from_finished(opened.plan, finished, is_chosen=request.auto):
        raise SpecError(f"the calibration {name!r} is finished, with other settings: {text}", hint=hint)


def _difference_from_finished(plan: CalibrationPlan, finished: CalibrationInfo, *, is_chosen: bool) -> str:
    """Describe how the settings of a finished calibration differ from the plan; empty if equal."""
    # The settings of an automatic choice are its result, so its starting point is compared instead.
    names = ["samples", "out_dtype", "sites", "sample_digests"]
    names += [] if is_chosen else ["method", "settings", "layers", "views"]
    before, now = (
        {name: getattr(info, name) for name in names} | {"interpolate": info.interpolation.get("asked")}
        for info in (finished, plan.manifest_entry)
    )
    before |= {"auto": finished.automatic, "layers": sorted(before.get("layers", ()))}
    now |= {"auto": is_chosen, "layers": now.get("layers", [])}
    if is_chosen:
        now["asked"] = plan.starting_point
        before["asked"] = finished.selection.get("asked", now["asked"])
    # Through JSON, because one side was read from a file: its tuples are lists.
    return first_difference(*(json.loads(json.dumps(side)) for side in (before, now)))


def _require_held_out_samples(plan: CalibrationPlan) -> None:
    """Refuse --auto for a trained calibrator, or with too few samples to hold some out."""
    if not plan.calibrator.takes_sites:
        raise SpecError(f"{plan.method} has no closed form, so --auto can't be used", hint="Leave out --auto.")
    for task, samples in plan.samples.items():
        fold_ranges(len(samples), task)


@dataclass
class _CalibrationJob:
    """Solves, saves and measures a calibration in an opened run."""

    request: CalibrationRequest
    opened: PreparedCalibration
    writer: RunWriter
    reporter: ProgressReporter
    is_named: bool

    def __post_init__(self) -> None:
        self.study, self.team = self.opened.study, self.opened.study.team
        self._follow_plan(self.opened.plan)

    def _follow_plan(self, plan: CalibrationPlan) -> None:
        """Take a plan: its name is that of the scratch folder and of the phases."""
        self.plan, self.scratch = plan, _SolvedLayerStore(self.opened.folder, plan.name)
        self.phases = AnalysisPhases(self.writer, self.study, self.reporter, f"{plan.phase}:")

    def solve_and_measure(self) -> None:
        """Solve the calibration, save the model, measure its drift and accuracy, then publish the variant."""
        writer, study = self.writer, self.study
        on_main_process(self.team, writer, self._remove_leftovers)
        if self.request.auto:
            run_phase(writer, f"{self.plan.phase}:choose", self._choose_settings, study, again=True, sums=True)
            if not self.is_named:
                on_main_process(self.team, writer, self._remove_leftovers)
        plan, name = self.plan, self.plan.name
        replaces = name in writer.manifest.calibrations
        identity = plan.solution_inputs(self.opened.manifest, study)
        begun = identity | {"selection": dict(plan.selection), COMMAND: list(self.opened.words)}
        self.team.run_on_main(lambda: self.scratch.write_settings(begun))
        if replaces:
            # Solve everything first: a failed solve must leave the old calibration.
            try:
                run_phase(writer, f"{plan.phase}:solve", self._solve_layers, study, again=True, sums=True)
            except DriftLensError as error:
                if self.team.is_main_process and not isinstance(error, Cancelled | RunError):
                    # The old one is kept, and resuming would only fail again.
                    self.scratch.remove()
                raise
            on_main_process(self.team, writer, self._remove_old_calibration)
        # From here until `finish_variants`, readers ignore the rows of these variants.
        writer.begin_variants(plan.variants)
        run_phase(writer, plan.phase, partial(self._solve_and_save, identity), study, sums=True)
        add_calibrated_models(study, self.opened.models, writer.folder, name, plan.method, plan.control)
        self.phases.measure_drift(plan.variants, attribution=self.request.attribution)
        self.phases.measure_scores(plan.variants)
        attached = attachment_tensors(study.pool.variant(plan.variant).attachments, len(study.pool.chain.layers))
        info = dataclasses.replace(
            self.team.run_on_main(lambda: with_saved_results(plan.manifest_entry, writer.folder, name)),
            attached=sum(tensor.numel() for tensor in attached.values() if tensor.dim()),
        )
        notices = [f"{plan.variant}: {text}" for text in info.notices]
        writer.finish_variants(plan.variants, calibrations={name: info}, notices=notices)

    def _remove_leftovers(self) -> None:
        if not (self.request.resume and self.scratch.is_started):
            # First, so that an interrupted removal is not resumed as a calibration.
            self.scratch.remove()
            if self.plan.name not in self.writer.manifest.calibrations:
                # Leftovers of an interrupted one.
                self.writer.remove_calibration(self.plan.name)

    def finish(self, export: CalibrationExport | None) -> None:
        """Run the phases after measurement: digests, task vectors, model card, export, attribution."""
        name, variant, folder = self.plan.name, self.plan.variant, self.writer.folder
        self.team.run_on_main(self.scratch.remove)
        info = self.writer.manifest.calibrations[name]
        variants = [info.control, variant] if info.control else [variant]
        # The calibration was solved by an earlier job.
        if variant not in self.study.pool:
            add_calibrated_models(self.study, self.opened.models, folder, name, info.method, info.control)
        self.phases.add_weight_statistics(variants)
        if self.request.save_adapter is not None:
            save = partial(_save_adapter, self.writer, self.study, self.opened.models, self.request, self.reporter)
            on_main_process(self.team, self.writer, save)
        on_main_process(self.team, self.writer, lambda: _write_model_card(self.writer, name))
        if export is not None:
            self.team.run_on_main(lambda: export.save(info))
        if self.request.attribution:
            self.phases.attribute_drift(variants)

    def _choose_settings(self) -> None:
        """Take the settings that cross-fitting chooses, or those that an interrupted calibration has chosen."""
        from driftlens.pipelines.model_selection import choose_calibrator

        plan, study, scratch = self.plan, self.study, self.scratch
        if begun := self.team.run_on_main(lambda: scratch.stored_settings if scratch.is_started else {}):
            kind, selection = calibrators[begun["method"]], begun["selection"]
            calibrator: Calibrator = kind(**resolve_settings(kind, begun["settings"], begun["method"]))
        else:
            calibrator, record = choose_calibrator(
                study.without_labels(plan.samples),
                plan.calibrator,
                plan.sites,
                self.reporter,
                others=self.request.method is None,
                existing=self.writer.manifest.calibrations,
                share=self.request.interpolate,
                on_score=partial(self.writer.event, CANDIDATE, of=plan.name),
            )
            selection = {**record, "preset": plan.manifest_entry.preset, "asked": plan.starting_point}
        if not self.is_named:
            plan = dataclasses.replace(plan, name=self._name_of_choice(calibrator, selection))
        self._follow_plan(plan.with_chosen_settings(calibrator, selection, study))

    def _name_of_choice(self, calibrator: Calibrator, selection: Mapping[str, Any]) -> str:
        """Return a free name for an automatic choice: its method's, or `auto` if a model was kept unchanged."""
        stem = selection.get("merge", {}).get("method", "")
        stem = stem or (AUTO if selection["kept"] else registered_method(calibrator))
        taken = self.writer.manifest.calibrations

        def _first_free_name() -> str:
            # An interrupted calibration has no entry yet, and may still be resumed.
            scratch = self.opened.folder / SCRATCH
            begun = {place.name.removeprefix("calibrate-") for place in scratch.glob("calibrate-*")}
            return next_free_name(stem, {*taken, *begun})

        return self.team.run_on_main(_first_free_name)

    def _remove_old_calibration(self) -> None:
        with self.scratch.hide_settings():
            self.writer.remove_calibration(self.plan.name)

    def _solve_and_save(self, identity: Mapping[str, Any]) -> None:
        plan, solution = self.plan, self._solve_layers()

        def _write_variants() -> None:
            seconds, notices = self.scratch.seconds or solution.seconds, _calibration_notices(plan, self.study)
            info = dataclasses.replace(plan.manifest_entry, seconds=seconds, notices=notices)
            save_variants(self.writer, self.opened.models, self.study, plan, solution, info, identity)

        on_main_process(self.team, self.writer, _write_variants)

    @torch.no_grad()
    def _solve_layers(self) -> CalibrationSolution:
        """Calibrate the layers in forward order; each is stored at once, stored ones are skipped."""
        plan, scratch = self.plan, self.scratch
        solution, started = CalibrationSolution(scratch.layers()), time.monotonic() - scratch.seconds
        # Of the last finished layer, for the curve that is plotted meanwhile.
        metrics: dict[str, float] = {}
        tasks, reached = sorted(plan.samples) if plan.sites else [], 0

        def _report_progress(progress: CalibrationProgress) -> None:
            nonlocal reached
            values = metrics if progress.loss is None else {"loss": progress.loss}
            # A layer may take minutes, so tasks are counted too: the remaining time can be estimated sooner.
            parts, place = max(1, len(tasks)), tasks.index(progress.task) if progress.task in tasks else 0
            reached = max(reached, parts * progress.done + place)
            self.reporter.step(_PHASE, reached, parts * progress.total, progress.label, **values)

        context = calibration_context(
            self.study,
            plan.samples,
            plan.sites,
            done={index: earlier.updates for index, earlier in solution.layers.items()},
            spill=scratch.spill,
            on_step=_report_progress,
            seed=plan.seed,
        )
        for layer in plan.calibrator.calibrate(context):
            solution.attachments |= layer.attachments
            if self.team.is_main_process and (layer.updates or layer.reports):
                solution.layers[layer.layer] = scratch.store_layer(layer, time.monotonic() - started)
            if layer.reports:
                drifts = layer.drift_l2_mean.values()
                metrics |= {
                    "layer": layer.layer,
                    "drift_l2_mean": sum(drifts) / len(drifts) if drifts else math.nan,
                    "objective_before": _sum_or_nan(report.objective_before for report in layer.reports),
                    "objective_after": _sum_or_nan(report.objective_after for report in layer.reports),
                }
                self.writer.event("layer", phase=_PHASE, name=plan.name, **metrics)
        solution.seconds = time.monotonic() - started
        return solution


def _sum_or_nan(values: Iterable[float | None]) -> float:
    return sum(math.nan if value is None else value for value in values)


def _calibration_notices(plan: CalibrationPlan, study: Study) -> list[str]:
    # Samples from files never overlap: splits are drawn without replacement.
    notices = _sample_overlap_notices(plan.samples, study) if study.architecture.get("loader") == "live" else []
    if plan.automatic and (overlap := training_overlap_text(plan.samples, study)):
        notices.append(f"{overlap}. The choice is unreliable; use other samples")
    notices += [
        f"task {task} has 1 different calibration sample among {len(drawn)}, and weights are fitted to it alone. "
        "Add samples"
        for task, drawn in plan.samples.items()
        if drawn.has_one_content
    ]
    if plan.sites:
        pool = study.pool
        share, text = parameter_coverage(pool.chain, pool.source("merged"), plan.sites, plan.calibrator.update)
        notices += [f"only a part is calibrated: {text}"] if share < 1 else []
        if plan.control:
            anchor = f"base + {plan.calibrator.anchor_rho:g} (merged - base)"
            notices.append(f"the anchor is {anchor}; {plan.control} measures it alone")
        return [*notices, *_uncalibrated_layer_notices(pool, plan.sites)]
    if plan.boundaries:
        return [*notices, "the weights are the merged model's; its adapters need the task of an input"]
    return [*notices, f"this is {plan.unchanged_text}"]


def _uncalibrated_layer_notices(pool: ModelPool, sites: Mapping[int, Collection[str]]) -> list[str]:
    """Return notices if stem or head differ between base and experts but are not calibrated."""
    # Exact comparison: weights that fine-tuning froze are stored bit-identical.
    experts = [name for name in pool.names if task_of_expert(name) is not None]
    reference, *others = [*(["base"] if "base" in pool else []), *experts]

    def _is_different_in_experts(key: str) -> bool:
        start = pool.source(reference).read(key).double()
        return any(not torch.equal(start, pool.source(other).read(key).double()) for other in others)

    notices = []
    for layer in (pool.chain.layers[0], pool.chain.layers[-1]):
        solved = {f"{site}.{part}" for site in sites.get(layer.index, ()) for part in ("weight", "bias")}
        keys = {slot.key for name, slot in pool.chain.own_parameters(layer).items() if name not in solved}
        if moved := ", ".join(filter(_is_different_in_experts, sorted(keys))):
            notices.append(
                f"the {layer.role} ({moved}) differs between {'base and ' * (reference == 'base')}experts and was not "
                "calibrated: it remains as merged"
            )
    return notices


def _sample_overlap_notices(samples: Mapping[str, SampleSet], study: Study) -> list[str]:
    """Return notices on tasks whose diagnosis samples are also calibration samples, compared by content."""
    notices = []
    for task, drawn in samples.items():
        solved_on, measured_on = set(drawn.digests), study.tasks[task].diagnosis.digests
        count = sum(sample in solved_on for sample in measured_on)
        if count:
            notices.append(
                f"task {task}: {count} of {len(measured_on)} diagnosis samples are calibration samples, so its results "
                "are too good. Pass other samples to calibrate on"
            )
    return notices


class _SolvedLayerStore:
    """The hidden folder of an unfinished calibration: its settings and the solved layers."""

    def __init__(self, run: pathlib.Path, name: str) -> None:
        self._settings = run / calibration_marker(name)
        self._folder = self._settings.parent
        self.spill = self._folder / "features"

    @property
    def is_started(self) -> bool:
        return self._settings.is_file()

    @property
    def stored_settings(self) -> dict[str, Any]:
        try:
            return dict(parse_json(self._settings.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{self._settings} can't be read: {error}", hint="Start again without --resume.") from error

    def remove(self) -> None:
        remove_tree(self._folder)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the calibration settings, or refuse if others are already stored."""
        if self.is_started:
            self.require_same_settings(settings)
        else:
            self.remove()
            write_json_atomic(self._settings, settings)

    def require_same_settings(self, settings: Mapping[str, Any], *, start: Mapping[str, Any] | None = None) -> None:
        """Refuse settings that differ from the stored ones; `start` are those before an automatic choice."""
        if not self.is_started:
            return
        # The command's words may differ although the settings are equal.
        then, now, skip = self.stored_settings, dict(settings), {"selection", COMMAND}
        if start and (chosen := then.get("selection")):
            then, now, skip = then | chosen["asked"], {**now, **start}, {*skip, "sites", "views"}
        sides = ({name: side[name] for name in side if name not in skip} for side in (then, now))
        if text := first_difference(*sides):
            raise SpecError(
                f"the interrupted calibration had {text}",
                hint="Resume with the same settings, models and samples, or start again without --resume.",
            )

    @contextmanager
    def hide_settings(self) -> Iterator[None]:
        """Hide the settings file inside a block, so that an interruption leaves nothing to resume."""
        settings = self.stored_settings
        self._settings.unlink()
        yield
        write_json_atomic(self._settings, settings)

    @property
    def seconds(self) -> float:
        """The seconds spent on solving the stored layers, including interrupted jobs."""
        files = sorted(self._folder.glob("*.safetensors"))
        return float(_safetensors_metadata(files[-1])["seconds"]) if files else 0.0

    def layers(self) -> dict[int, CalibratedLayer]:
        """Return the stored layers by index; their values are read from disk on demand."""
        return {int(path.stem): _read_solved_layer(path) for path in sorted(self._folder.glob("*.safetensors"))}

    def store_layer(self, layer: CalibratedLayer, seconds: float) -> CalibratedLayer:
        """Store one solved layer atomically and return it with values read from the file."""
        reports = json.dumps([vars(report) for report in layer.reports])
        file = self._folder / f"{layer.layer:03d}.safetensors"
        save_state_dict(file, layer.updates, {"reports": reports, "seconds": repr(seconds)})
        return _read_solved_layer(file)


def _read_solved_layer(path: pathlib.Path) -> CalibratedLayer:
    source, stored = open_checkpoint(path), parse_json(_safetensors_metadata(path)["reports"])
    reports = tuple(SiteReport(**report) for report in stored)
    return CalibratedLayer(int(path.stem), LazyTensors(source.headers, source.read), reports)


def _safetensors_metadata(path: pathlib.Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())
