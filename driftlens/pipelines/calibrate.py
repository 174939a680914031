"""From a finished run to a calibrated checkpoint in it: solved layer by layer, saved, measured like any variant."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from driftlens.calibration.calibrator import require_task_id
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import OnDemand
from driftlens.config.requests import CalibrationRequest
from driftlens.config.run import load_spec
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.pool import attachment_tensors
from driftlens.engine.sites import coverage
from driftlens.engine.solver_types import CalibratedLayer, SiteReport
from driftlens.engine.walk import require_closed
from driftlens.experiment import resume as reopening
from driftlens.experiment.loading import OpenModels, all_in, open_models
from driftlens.experiment.resume import (
    Kept,
    deterministic_algorithms,
    lead,
    resumable,
    run_phase,
    writing,
)
from driftlens.experiment.study import Study
from driftlens.merging.method import merge_methods
from driftlens.models.saving import save_state_dict
from driftlens.pipelines.analyze import Phases
from driftlens.pipelines.calibration_plan import (
    CalibrationPlan,
    Choice,
    diagnosed_too,
    plan_calibration,
    trained_on,
    untouched_but_moved,
)
from driftlens.pipelines.calibration_variants import (
    Export,
    Solution,
    kept_change,
    lost_of,
    save_variants,
    unreached,
)
from driftlens.runs import layout
from driftlens.runs.manifest import CalibrationInfo, Manifest, read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.run_state import COMMAND, how_to_explain, how_to_resume, how_to_save, require_analyzed
from driftlens.runs.writer import RunWriter, remove_tree
from driftlens.utils.access import Context
from driftlens.utils.distributed import ALONE
from driftlens.utils.errors import Cancelled, DriftLensError, RunError, SpecError
from driftlens.utils.files import PathLike, from_json, write_json_atomic
from driftlens.utils.progress import Reporter

PHASE = "calibrate"
"""What progress events of the solving walk are called."""


def calibrate(
    path: PathLike,
    request: CalibrationRequest,
    context: Context = Context(),
    *,
    choose: Choice | None = None,
    on_measured: Callable[[DriftRun], None] | None = None,
) -> DriftRun:
    """Calibrate the merged model of a finished run; the run gains the variant `calibrated:NAME`, and its control.

    Rows that are there keep their exact values. Readers see the variant as soon as its drift and accuracy are
    measured, and nothing of it before; where its drift comes from is added after that. `on_measured` is called
    with the run as soon as drift and accuracy are there.
    """
    folder, is_chosen = pathlib.Path(path), choose is not None
    target, begins = request.save_weights, request.replace or request.resume
    if target is not None and not begins and request.name in read_manifest(folder).calibrations:
        context.access.team.once(lambda: _save_kept(folder, target, request, context, is_chosen=is_chosen))
        return open_run(folder)
    # All that can be refused is refused before the lock is taken: a finished run must not become a failed one.
    opened = open_calibration(folder, request, context)
    plan, study = opened.plan, opened.study
    require_terms(request, opened, is_chosen=is_chosen)
    export = opened.export(request)
    if export is not None:
        study.team.once(export.require_place)
    if choose is not None:
        plan.require_choosable()
    study.team.once(lambda: reopening.require_same_samples(opened.manifest, study))
    study.team.once(lambda: reopening.require_same_models(opened.manifest, study, context.reporter()))
    resumed = functools.partial(RunWriter.resume, folder)
    with writing(study.team, resumed) as writer, deterministic_algorithms(study.settings.deterministic):
        # Somebody may have been faster while the models were being opened.
        require_free_name(request, opened, writer.manifest, is_chosen=is_chosen)
        work = _Work(writer, opened, context.reporter(writer.progress), export)
        if request.replace or not (request.resume and plan.name in writer.manifest.calibrations):
            with resumable(
                lambda: work.scratch.is_there and how_to_resume(folder, plan.name, writer.manifest)
            ):
                work.first_numbers(choose, resume=request.resume)
            if on_measured is not None and study.team.is_main:
                on_measured(open_run(folder))
        is_live = context.live is not None
        more = how_to_resume(folder, plan.name, opened.manifest) if is_live else how_to_explain(folder)
        with resumable(lambda: (folder / plan.weights[plan.variant]).is_file() and more):
            work.complete(attribution=request.attribution)
    return open_run(folder)


@dataclass(frozen=True)
class OpenCalibration:
    """A run reopened, and what a calibration will do to it; `words` are the options that ask for it once more."""

    folder: pathlib.Path
    manifest: Manifest
    study: Study
    models: OpenModels
    plan: CalibrationPlan
    words: Sequence[str] = ()

    def export(self, request: CalibrationRequest) -> Export | None:
        """Where else the model is saved."""
        if request.save_weights is None:
            return None
        # What has the name is no sitting of what is to replace it.
        is_new = not request.resume or (request.replace and self.plan.name in self.manifest.calibrations)
        return Export(
            self.folder, self.plan.name, self.plan.method, self.models, request.save_weights, is_new
        )


def _save_kept(
    folder: pathlib.Path,
    target: pathlib.Path,
    request: CalibrationRequest,
    context: Context,
    *,
    is_chosen: bool,
) -> None:
    """Save what a finished calibration made from what the run keeps, if it is what is asked for.

    A request of the name alone opens no samples, and no models other than the one that gives the form.
    """
    manifest, access = read_manifest(folder), dataclasses.replace(context.access, team=ALONE)
    if request.changed(save_weights=None, attribution=True) != CalibrationRequest(name=request.name):
        opened = open_calibration(folder, request, dataclasses.replace(context, access=access))
        require_free_name(request.changed(resume=True), opened, manifest, is_chosen=is_chosen)
        models = opened.models
    elif context.live is not None:
        _, models = context.live(None)
    else:
        reopening.require_spec(folder, manifest)
        models = open_models(load_spec(folder / layout.SPEC), access)
    info = manifest.calibrations[request.name]
    export = Export(folder, request.name, info.method, all_in(models, info.out_dtype), target)
    export.require_kept(manifest)
    export.require_place()
    export.save(info)


def open_calibration(
    folder: pathlib.Path,
    request: CalibrationRequest,
    context: Context = Context(),
) -> OpenCalibration:
    """The run's models and samples with a request's plan; nothing is written."""
    require_analyzed(folder, scored=True)
    run = open_run(folder)
    if context.live is None:
        reopening.require_spec(folder, run.manifest)
    # Nothing can be built on drift that is not that of ordinary forward passes.
    require_closed(run.layers(variant="merged").to_dict("records"), run.manifest.dtype)
    study, models = reopening.reopened(
        folder, context, num_calibration=request.samples, with_calibrations=False
    )
    models = all_in(models, request.out_dtype)
    study = dataclasses.replace(study, out_dtype=models.out_dtype).viewing(request.views)
    spec = load_spec(folder / layout.SPEC) if context.live is None else None
    plan = plan_calibration(request, run, spec, study)
    if spec is not None:
        require_task_id(spec.task_id, plan.method)
    options = request.changed(resume=False, replace=False).words()
    words = [*(word for word in options if not word.startswith("--name=")), *context.access.words]
    return OpenCalibration(folder, run.manifest, study, models, plan, words)


def require_terms(request: CalibrationRequest, opened: OpenCalibration, *, is_chosen: bool) -> None:
    """Refuse a name that is taken, or to go on with something else than what was begun."""
    plan = opened.plan
    require_free_name(request, opened, opened.manifest, is_chosen=is_chosen)
    if request.resume:
        identity = plan.identity(opened.manifest, opened.study) | {"automatic": is_chosen}
        scratch = CalibrationScratch(opened.folder, plan.name)
        scratch.require_begun(identity, asked=plan.asked if is_chosen else {})


def require_free_name(
    request: CalibrationRequest, opened: OpenCalibration, manifest: Manifest, *, is_chosen: bool
) -> None:
    """Refuse a name that a finished calibration has, unless that is to be replaced or is the very same."""
    plan, finished = opened.plan, manifest.calibrations.get(opened.plan.name)
    if finished is None or request.replace:
        return
    hint = f"Choose another --name, or replace it with --replace; {how_to_save(opened.folder, plan.name, manifest)}."
    if not request.resume:
        raise SpecError(f"the run has a calibration {plan.name!r} already", hint=hint)
    if text := _difference(plan, finished, is_chosen=is_chosen):
        raise SpecError(f"the calibration {plan.name!r} is finished, with other settings: {text}", hint=hint)


def _difference(plan: CalibrationPlan, finished: CalibrationInfo, *, is_chosen: bool) -> str:
    """Say in what a finished calibration is not what the plan would make; chosen hyperparameters are its own."""
    names = ["samples", "out_dtype", "sites", "sample_digests"]
    names += [] if is_chosen else ["method", "settings", "layers", "views"]
    before, now = (
        {name: getattr(info, name) for name in names} | {"shrink": info.shrink.get("asked")}
        for info in (finished, plan.info(0.0, ()))
    )
    before |= {"auto": finished.automatic, "layers": sorted(before.get("layers", ()))}
    now |= {"auto": is_chosen, "layers": now.get("layers", [])}
    if is_chosen:
        before["asked"], now["asked"] = finished.selection.get("asked", plan.asked), plan.asked
    return reopening.difference(*(json.loads(json.dumps(side)) for side in (before, now)))


class _Work:
    """One calibration of a run that is open for writing."""

    def __init__(
        self, writer: RunWriter, opened: OpenCalibration, reporter: Reporter, export: Export | None = None
    ) -> None:
        self.writer, self.opened, self.reporter, self.plan = writer, opened, reporter, opened.plan
        self.export = export
        self.study, self.team = opened.study, opened.study.team
        self.scratch = CalibrationScratch(writer.folder, opened.plan.name)
        self.phases = Phases(writer, self.study, reporter, f"{self.plan.phase}:")

    def first_numbers(self, choose: Choice | None, *, resume: bool = False) -> None:
        """Solve, save, and measure drift and accuracy; with that the variant is there for readers."""
        replaces = self.opened.plan.name in self.writer.manifest.calibrations

        def clear() -> None:
            if not (resume and self.scratch.is_there):
                self.scratch.remove()  # first: with it, a removal that is stopped could be taken for one to go on with
                if not replaces:
                    self.writer.remove_calibration(self.plan.name)  # what one that was stopped has left

        lead(self.team, self.writer, clear)
        if choose is not None:
            self._choose(choose)
        identity, plan = self.plan.identity(self.opened.manifest, self.study), self.plan
        begun = identity | {"selection": dict(plan.selection), COMMAND: list(self.opened.words)}
        self.team.once(lambda: self.scratch.go_on(begun))
        if replaces:
            self._make_room()
        notices = self.team.once(lambda: _notices(plan, self.study, self.opened.manifest))
        self.writer.begin_variants(plan.variants)
        run_phase(self.writer, plan.phase, lambda: self._save(identity, notices), self.study, sums=True)
        change = self.team.once(lambda: kept_change(self.writer.folder, plan.name))
        notices = [
            *notices,
            *lost_of(change),
            *self.team.once(lambda: unreached(Solution(self.scratch.solved()))),
        ]
        reopening.add_calibration(
            self.study, self.opened.models, self.writer.folder, plan.name, plan.method, plan.control
        )
        self.phases.measure(plan.variants)
        maps = self.study.pool.variant(plan.variant).attachments
        attached = attachment_tensors(maps, len(self.study.pool.chain.layers))
        numbers = sum(tensor.numel() for tensor in attached.values() if tensor.dim())
        info = plan.info(self.team.once(lambda: self.scratch.seconds), notices, numbers, change)
        run_notices = [f"{plan.variant}: {text}" for text in notices]
        self.writer.finish_variants(plan.variants, calibrations={plan.name: info}, notices=run_notices)

    def _choose(self, choose: Choice) -> None:
        """Go on with the plan that has what is chosen; what is tried on the way is kept, and so is the choice."""
        plan, writer, scratch = self.plan, self.writer, self.scratch
        phase, begins = f"{plan.phase}:choose", {"selection": {}, COMMAND: list(self.opened.words)}
        start = plan.identity(self.opened.manifest, self.study) | {"automatic": True} | begins
        self.team.once(lambda: scratch.go_on(start, asked=plan.asked))
        begun = self.team.once(lambda: scratch.begun)

        def tried() -> None:
            reporter = _Candidates(self.reporter, writer, plan.name)
            self.plan = plan.chosen(choose, self.study, reporter, begun, scratch.tried)

        run_phase(writer, phase, tried, self.study, again=True, sums=True)
        if not begun["selection"]:
            identity = self.plan.identity(self.opened.manifest, self.study)
            settled = start | identity | {"selection": dict(self.plan.selection)}
            self.team.once(lambda: scratch.settle(settled))

    def _make_room(self) -> None:
        """Only when all layers are solved does the calibration that has the name make room."""
        plan = self.plan

        def work() -> None:
            solve(self.writer, self.study, plan, self.scratch, self.reporter)

        try:
            run_phase(self.writer, f"{plan.phase}:solve", work, self.study, again=True, sums=True)
        except DriftLensError as error:
            if self.team.is_main and not isinstance(error, Cancelled | RunError):
                self.scratch.remove()  # what has the name stays, and going on would fail once more
            raise

        def remove() -> None:
            with self.scratch.hidden():
                self.writer.remove_calibration(self.plan.name)

        lead(self.team, self.writer, remove)

    def _save(self, identity: Mapping[str, Any], notices: Sequence[str]) -> None:
        plan, writer = self.plan, self.writer
        solution = solve(writer, self.study, plan, self.scratch, self.reporter)

        def save() -> None:
            info = plan.info(self.scratch.seconds, notices)
            save_variants(writer, self.opened.models, self.study, plan, solution, info, identity)

        lead(self.team, writer, save)

    def complete(self, *, attribution: bool) -> None:
        """Add what comes behind the first numbers, as far as it is missing, the model card among it."""
        plan, writer, study, folder = self.plan, self.writer, self.study, self.writer.folder
        self.team.once(self.scratch.remove)
        info = writer.manifest.calibrations[plan.name]
        control = info.control
        variants = [control, plan.variant] if control else [plan.variant]
        if plan.variant not in study.pool:
            reopening.add_calibration(study, self.opened.models, folder, plan.name, plan.method, control)
        self.phases.complete(variants)

        def describe() -> None:
            from driftlens.experiment.model_card import model_card

            with writer.file(f"{layout.calibration_folder(plan.name)}/README.md") as file:
                file.write_text(model_card(open_run(folder), plan.name), encoding="utf-8")

        lead(self.team, writer, describe)
        if (export := self.export) is not None:
            self.team.once(lambda: export.save(info))
        if attribution:
            self.phases.explain(variants)


def _notices(plan: CalibrationPlan, study: Study, manifest: Manifest) -> list[str]:
    """What a reader should know of a calibration, whatever comes of it."""
    # Those of files are drawn apart.
    notices = diagnosed_too(plan.samples, study) if study.architecture.get("loader") == "live" else []
    notices += trained_on(plan.samples, study) if plan.automatic else []
    if plan.sites:
        pool = study.pool
        share, text = coverage(pool.chain, pool.source("merged"), plan.sites, plan.calibrator.update)
        partial = [f"only a part is calibrated: {text}"] if share < 1 else []
        return [*notices, *partial, *_anchor(plan, manifest), *untouched_but_moved(pool, plan.parameters)]
    if plan.boundaries:
        return [
            *notices,
            "weights are those of the merged model; what is attached wants to know the task of an input",
        ]
    return [*notices, f"this is {plan.unchanged}"]


def _anchor(plan: CalibrationPlan, manifest: Manifest) -> list[str]:
    """What the anchor is where it is not the merged model, by the method that merged it."""
    if not plan.control:
        return []
    reach, merge = plan.calibrator.anchor_reach, manifest.merge or {}
    text = f"the anchor is base + {reach:g} (merged - base)"
    scaling = merge.get("parameters", {}).get("scaling")
    name = str(merge.get("method"))
    laws = merge_methods[name].laws if name in merge_methods else frozenset()
    if isinstance(scaling, int | float) and {"affine_in_scaling", "zero_scaling_is_base"} <= laws:
        text += f": {merge['title']} with scaling {reach * scaling:g} in place of {scaling:g}"
    elif merge:
        text += f": {reach:g} times the step that {merge['title']} makes from the base"
    return [f"{text}; {plan.control} measures it alone"]


class _Candidates(Reporter):
    """Keeps what is measured of every candidate among the run's events, for whoever watches."""

    def __init__(self, reporter: Reporter, writer: RunWriter, name: str) -> None:
        self._reporter, self._writer, self._calibration = reporter, writer, name

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """As of a `Reporter`."""
        if "score" in metrics:
            self._writer.event(layout.CANDIDATE, of=self._calibration, name=label, **metrics)
        self._reporter.step(phase, done, total, label, **metrics)


class CalibrationScratch:
    """The folder of one unfinished calibration inside a run; it belongs to nothing that a reader sees.

    It holds what the calibration began with, from its beginning to its end, and the layers that are solved.
    """

    untold = 0.0
    """Seconds that work took of which nothing is kept."""

    def __init__(self, run: pathlib.Path, name: str) -> None:
        """Nothing is read or written yet."""
        self._settings = run / layout.begun_calibration(name)
        self._folder = self._settings.parent

    @property
    def is_there(self) -> bool:
        """Whether the calibration was begun and is not finished."""
        return self._settings.is_file()

    @property
    def begun(self) -> dict[str, Any]:
        """What it began with; nothing where nothing was begun."""
        if not self.is_there:
            return {}
        try:
            return dict(from_json(self._settings.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(
                f"{self._settings} can't be read: {error}", hint="Start afresh without --resume."
            ) from error

    def require_there(self) -> None:
        """Refuse to write where the calibration is not any more, which would bring a folder back."""
        if not self.is_there:
            raise RunError(
                f"{self._folder} was removed while it was being written to",
                hint="Nothing more was written there. Start again with a run that is in its place.",
            )

    def remove(self) -> None:
        """Throw everything away."""
        remove_tree(self._folder)

    def go_on(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Begin, unless that was done before, with the same settings; `asked` is what a choice begins with."""
        if self.is_there:
            self.require_begun(settings, asked=asked)
        else:
            self.remove()
            write_json_atomic(self._settings, settings)

    def require_begun(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Refuse what `go_on` would, if anything was begun."""
        if not self.is_there:
            return
        then, now, skip = self.begun, dict(settings), {"selection", COMMAND}
        if asked and (chosen := then.get("selection")):
            then, now, skip = then | chosen["asked"], {**now, **asked}, {*skip, "sites", "views"}
        sides = ({name: side[name] for name in side if name not in skip} for side in (then, now))
        if text := reopening.difference(*sides):
            raise SpecError(
                f"the interrupted calibration had {text}",
                hint="Resume with the same settings, models and samples, or start afresh without --resume.",
            )

    def solved(self) -> dict[int, CalibratedLayer]:
        """The layers that are kept, by index; their values stay on disk until they are asked for."""
        return {int(path.stem): _read(path) for path in self._files()}

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """A block that, stopped in the middle, leaves nothing to go on with."""
        settings = self.begun
        self._settings.unlink()
        yield
        write_json_atomic(self._settings, settings)

    @property
    def spill(self) -> pathlib.Path:
        """A folder for features that don't fit into memory."""
        return self._folder / "features"

    @property
    def tried(self) -> Kept:
        """What became of the candidates that a choice has tried; nothing any more once it is `settled`."""
        return Kept(self._folder / "tried", self.require_there)

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Go on with what was chosen: `settings` take the place of those that the choice began with."""
        self.require_there()
        write_json_atomic(self._settings, settings)
        remove_tree(self._folder / "tried")

    @property
    def seconds(self) -> float:
        """What was solved so far took, over all sittings."""
        return Kept(self._folder).seconds or self.untold

    def keep(self, layer: CalibratedLayer, seconds: float) -> CalibratedLayer:
        """Store one layer's solution, whole or not at all; returns what was stored."""
        self.require_there()
        reports = json.dumps([dataclasses.asdict(report) for report in layer.reports])
        file = self._folder / f"{layer.layer:03d}.safetensors"
        save_state_dict(file, layer.updates, {"reports": reports, "seconds": repr(seconds)})
        return _read(file)

    def _files(self) -> list[pathlib.Path]:
        return sorted(self._folder.glob("*.safetensors"))


def _read(path: pathlib.Path) -> CalibratedLayer:
    source = open_checkpoint(path)
    with safe_open(path, framework="pt") as file:
        stored = from_json(file.metadata()["reports"])
    reports = tuple(SiteReport(**report) for report in stored)
    return CalibratedLayer(int(path.stem), OnDemand(source.headers, source.read), reports)


@torch.no_grad()
def solve(
    writer: RunWriter, study: Study, plan: CalibrationPlan, scratch: CalibrationScratch, reporter: Reporter
) -> Solution:
    """What a plan solves for or trains, in forward order; it is kept at once, and not done again when resumed."""
    solution, started = Solution(scratch.solved()), time.monotonic() - scratch.seconds

    def elapsed() -> float:
        return time.monotonic() - started

    metrics: dict[str, float] = {}  # of the last finished layer: enough to draw a curve while it runs

    tasks, reached = sorted(plan.samples) if plan.sites else [], 0

    def step(progress: Step) -> None:
        nonlocal reached
        values = metrics if progress.loss is None else {"loss": progress.loss}
        # A layer may take minutes: the tasks that it goes through are counted too, so that the time left is known soon.
        parts, place = max(1, len(tasks)), tasks.index(progress.task) if progress.task in tasks else 0
        reached = max(reached, parts * progress.done + place)
        reporter.step(PHASE, reached, parts * progress.total, progress.label, **values)

    ground = Ground(
        study.pool,
        plan.samples,
        plan.sites,
        base="base" if study.has_base else None,
        done={index: earlier.updates for index, earlier in solution.layers.items()},
        feature_budget=study.settings.feature_budget,
        spill=scratch.spill,
        on_step=step,
        pooling=study.settings.pool,
        team=study.team,
        seed=plan.seed,
        like=study.like,
    )
    for layer in plan.calibrator.calibrate(ground):
        solution.attachments |= layer.attachments
        if study.team.is_main and (layer.updates or layer.reports):
            solution.layers[layer.layer] = scratch.keep(layer, elapsed())
        if layer.reports:
            drifts = layer.drift_l2_mean.values()
            metrics |= {
                "layer": layer.layer,
                "drift_l2_mean": sum(drifts) / len(drifts) if drifts else math.nan,
                "objective_before": _total(report.objective_before for report in layer.reports),
                "objective_after": _total(report.objective_after for report in layer.reports),
            }
            writer.event("layer", phase=PHASE, name=plan.name, **metrics)
    scratch.untold = elapsed()
    return solution


def _total(values: Iterable[float | None]) -> float:
    """The sum; NaN where a value was not computed."""
    return sum(math.nan if value is None else value for value in values)
