"""From a finished run to a calibrated checkpoint in it: solved layer by layer, saved, measured like any variant."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from driftlens.base.access import Context
from driftlens.base.errors import Cancelled, DriftLensError, RunError, SpecError
from driftlens.base.files import PathLike
from driftlens.base.progress import Reporter
from driftlens.checkpoints.saving import require_target
from driftlens.diagnostics.drift import require_closed
from driftlens.engine.attached import attachment_tensors
from driftlens.engine.site_selection import coverage
from driftlens.jobs.analyze.evaluation import first_look
from driftlens.jobs.analyze.job import completing, explaining, measuring
from driftlens.jobs.calibrate.plan import (
    CalibrationPlan,
    Choice,
    diagnosed_too,
    plan_calibration,
    untouched_but_moved,
)
from driftlens.jobs.calibrate.solution import CalibrationScratch, calibration_info, record_solution, solve
from driftlens.jobs.calibrate.variants import save_for_others, save_variants
from driftlens.jobs.study.card import model_card
from driftlens.jobs.study.opening import OpenModels
from driftlens.jobs.study.reopening import (
    add_calibration,
    reopened,
    require_analyzed,
    require_same_models,
    require_same_samples,
    require_spec,
)
from driftlens.jobs.study.study import Study
from driftlens.jobs.study.writing import (
    Phase,
    deterministic_algorithms,
    lead,
    run_phases,
    suitable_threads,
    writing,
)
from driftlens.merging.method import merge_methods
from driftlens.runs import layout
from driftlens.runs.manifest import CalibrationInfo, Manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.standing import COMMAND, how_to_explain, how_to_resume
from driftlens.runs.writer import RunWriter
from driftlens.spec import load_spec
from driftlens.spec.requests import CalibrationRequest


def calibrate(
    path: PathLike,
    request: CalibrationRequest,
    context: Context = Context(),
    *,
    choose: Choice | None = None,
    on_first: Callable[[str], None] | None = None,
    on_measured: Callable[[DriftRun], None] | None = None,
) -> DriftRun:
    """Calibrate the merged model of a finished run; the run gains the variant `calibrated:NAME`, and its control.

    Rows that are there keep their exact values. Readers see the variant as soon as its drift and accuracy are
    measured, and nothing of it before; where its drift comes from is added behind that. `on_first` is told of a few
    samples as soon as the layers are solved, `on_measured` once when drift and accuracy are there.
    """
    folder = pathlib.Path(path)
    # All that can be refused is refused before the lock is taken: a finished run must not become a failed one.
    opened = open_calibration(folder, request, context)
    plan, is_chosen = opened.plan, choose is not None
    require_terms(request, opened, is_chosen=is_chosen)
    if request.save_weights is not None:
        require_target(opened.models.architecture, request.save_weights)
    if choose is not None:
        choose.outlook(plan.calibrator, plan.counts, has_base=opened.study.has_base)
    team = opened.study.team
    team.once(lambda: require_same_samples(opened.manifest, opened.study))
    team.once(lambda: require_same_models(opened.manifest, opened.study, context.reporter()))
    with writing(team, functools.partial(RunWriter.resume, folder)) as writer:
        # Somebody may have been faster while the models were being opened.
        require_free_name(request, plan, writer.manifest, is_chosen=is_chosen)
        reporter = context.reporter(writer.progress)
        scratch = CalibrationScratch(folder, plan.name)
        with deterministic_algorithms(opened.study.settings.deterministic):
            if request.replace or not (request.resume and plan.name in writer.manifest.calibrations):
                with _resumable(
                    lambda: scratch.is_there and how_to_resume(folder, plan.name, writer.manifest)
                ):
                    _calibrate(
                        writer, opened, scratch, reporter, choose, resume=request.resume, on_first=on_first
                    )
                if on_measured is not None and team.leads:
                    on_measured(open_run(folder))
            more = how_to_explain(folder)
            more = more if context.live is None else how_to_resume(folder, plan.name, opened.manifest)
            with _resumable(lambda: (folder / plan.weights[plan.variant]).is_file() and more):
                _complete(writer, opened, reporter, attribution=request.attribution)
    run = open_run(folder)
    if (place := request.save_weights) is not None:
        team.once(lambda: save_for_others(run, plan, opened.models, opened.study.pool, place))
    return run


def carry_out(writer: RunWriter, opened: OpenCalibration, reporter: Reporter, *, attribution: bool) -> None:
    """Calibrate in a run that is open, from the first layer to the last table; arguments as for `calibrate`."""
    scratch = CalibrationScratch(writer.folder, opened.plan.name)
    _calibrate(writer, opened, scratch, reporter, None, resume=False, on_first=None)
    _complete(writer, opened, reporter, attribution=attribution)


@dataclass(frozen=True)
class OpenCalibration:
    """A run reopened, and what a calibration will do to it; `words` are the options that ask for it once more."""

    folder: pathlib.Path
    manifest: Manifest
    study: Study
    models: OpenModels
    plan: CalibrationPlan
    words: Sequence[str] = ()


def open_calibration(
    folder: pathlib.Path, request: CalibrationRequest, context: Context = Context()
) -> OpenCalibration:
    """The run's models and samples with a request's plan; nothing is written. Arguments as for `calibrate`."""
    require_analyzed(folder)
    run = open_run(folder)
    if context.live is None:
        require_spec(folder, run.manifest)
    require_closed(run.layers(variant="merged").to_dict("records"), run.manifest.dtype)
    study, models = reopened(folder, context, num_calibration=request.samples, with_calibrations=False)
    spec = load_spec(folder / layout.SPEC) if context.live is None else None
    plan = plan_calibration(request, run, spec, study)
    asked = request.changed(resume=False, replace=False).words()
    words = [*(word for word in asked if not word.startswith("--name=")), *context.access.words]
    return OpenCalibration(folder, run.manifest, study, models, plan, words)


def require_terms(request: CalibrationRequest, opened: OpenCalibration, *, is_chosen: bool) -> None:
    """Refuse a name that is taken, or to go on with something else than what was begun."""
    plan = opened.plan
    require_free_name(request, plan, opened.manifest, is_chosen=is_chosen)
    if request.resume:
        identity = plan.identity(opened.manifest, opened.study) | {"automatic": is_chosen}
        scratch = CalibrationScratch(opened.folder, plan.name)
        scratch.require_begun(identity, asked=plan.asked if is_chosen else {})


def require_free_name(
    request: CalibrationRequest, plan: CalibrationPlan, manifest: Manifest, *, is_chosen: bool
) -> None:
    """Refuse a name that a finished calibration has, unless that is to be replaced or is the very same."""
    taken = manifest.calibrations.get(plan.name)
    if taken is None or request.replace:
        return
    if not request.resume:
        raise SpecError(
            f"the run has a calibration {plan.name!r} already",
            hint="Choose another --name, or --replace it.",
        )
    if not _is_same(plan, taken, is_chosen=is_chosen):
        raise SpecError(
            f"the calibration {plan.name!r} is finished, with other settings",
            hint="Choose another --name, or --replace it.",
        )


def _is_same(plan: CalibrationPlan, taken: CalibrationInfo, *, is_chosen: bool) -> bool:
    """Whether a finished calibration is what the plan would make; hyperparameters that were chosen are its own."""
    if is_chosen:
        is_asked = taken.selection.get("asked", plan.asked) == plan.asked
    else:
        is_asked = (
            plan.hyperparameters.items() <= dict(taken.settings).items()
            and plan.method == taken.method
            and plan.layers == sorted(taken.layers)
        )
    return (
        is_asked
        and taken.automatic == is_chosen
        and tuple(plan.patterns) == tuple(taken.sites)
        and plan.sample_digests == dict(taken.sample_digests)
    )


@contextmanager
def _resumable(how: Callable[[], str | Literal[False]]) -> Iterator[None]:
    """A block that, stopped by the user or by a full disk, says how to go on with what it has left behind."""
    try:
        yield
    except (Cancelled, RunError) as error:
        if found := how():
            told = f"What was finished is kept: {found}."
            error.hint = told if isinstance(error, Cancelled) else f"{error.hint} {told}".lstrip()
        raise


def _calibrate(
    writer: RunWriter,
    opened: OpenCalibration,
    scratch: CalibrationScratch,
    reporter: Reporter,
    choose: Choice | None,
    *,
    resume: bool,
    on_first: Callable[[str], None] | None,
) -> None:
    """Solve, save, and measure drift and accuracy; with that the variant is there for readers."""
    plan, study, team = opened.plan, opened.study, opened.study.team
    replaces = plan.name in writer.manifest.calibrations

    def clear() -> None:
        if not (resume and scratch.is_there):
            scratch.remove()  # first: with it, a removal that is stopped could be taken for one to go on with
            if not replaces:
                writer.remove_calibration(plan.name)  # what one that was stopped has left

    lead(team, writer, clear)
    if choose is not None:
        plan = _chosen(writer, opened, scratch, reporter, choose)
    identity = plan.identity(opened.manifest, study)
    begun = identity | {"selection": dict(plan.selection), COMMAND: list(opened.words)}
    team.once(lambda: scratch.go_on(begun))
    if replaces:
        _solve_and_make_room(writer, study, plan, scratch, reporter)
    notices = team.once(lambda: _notices(plan, study, opened.manifest))
    writer.begin_variants(plan.variants)

    def work() -> None:
        solution = solve(writer, study, plan, scratch, reporter)

        def save() -> None:
            info = calibration_info(plan, scratch.seconds, notices)
            save_variants(writer, opened.models, study, plan, solution, info)
            record_solution(writer, plan, solution.reports, identity, info)

        lead(team, writer, save)

    run_phases(writer, [Phase(plan.phase, work, study)])
    add_calibration(study, opened.models, writer.folder, plan.name, plan.method, plan.control)

    def look() -> None:
        said = first_look(open_run(writer.folder), study, plan.variant, plan.counts)
        reporter.step("look", 1, 1, said)
        if on_first is not None:
            on_first(said)

    measured = measuring(writer, study, plan.variants, reporter, prefix=f"{plan.phase}:")
    run_phases(writer, [Phase(f"{plan.phase}:look", look, study, leads=team), *measured])
    attached = attachment_tensors(study.pool.variant(plan.variant).attachments)
    seconds = team.once(lambda: scratch.seconds)
    numbers = sum(tensor.numel() for tensor in attached.values() if tensor.dim())
    info = calibration_info(plan, seconds, notices, numbers)
    said = [f"{plan.variant}: {text}" for text in notices]
    writer.finish_variants(plan.variants, calibrations={plan.name: info}, notices=said)


def _chosen(
    writer: RunWriter,
    opened: OpenCalibration,
    scratch: CalibrationScratch,
    reporter: Reporter,
    choose: Choice,
) -> CalibrationPlan:
    """The plan with what is chosen; what is tried on the way is kept, and so is the choice."""
    plan, study, team = opened.plan, opened.study, opened.study.team
    phase, identity = f"{plan.phase}:choose", plan.identity(opened.manifest, study) | {"automatic": True}
    start = identity | {"selection": {}, COMMAND: list(opened.words)}
    team.once(lambda: scratch.go_on(start, asked=plan.asked))
    begun = team.once(lambda: scratch.begun)
    with writer.phase(phase), suitable_threads(writer, phase, study):
        plan = plan.chosen(choose, study, reporter, begun, scratch.tried)
    if not begun["selection"]:
        settled = start | plan.identity(opened.manifest, study) | {"selection": dict(plan.selection)}
        team.once(lambda: scratch.settle(settled))
    return plan


def _solve_and_make_room(
    writer: RunWriter, study: Study, plan: CalibrationPlan, scratch: CalibrationScratch, reporter: Reporter
) -> None:
    """Only when all layers are solved does the calibration that has the name make room."""
    try:
        solve(writer, study, plan, scratch, reporter)
    except DriftLensError as error:
        if study.team.leads and not isinstance(error, Cancelled | RunError):
            scratch.remove()  # what has the name stays, and going on would fail once more
        raise

    def make_room() -> None:
        with scratch.hidden():
            writer.remove_calibration(plan.name)

    lead(study.team, writer, make_room)


def _notices(plan: CalibrationPlan, study: Study, manifest: Manifest) -> list[str]:
    """What a reader should know of a calibration, whatever comes of it."""
    # Those of files are drawn apart.
    seen = diagnosed_too(plan.samples, study) if study.architecture.get("loader") == "live" else []
    if plan.sites:
        pool = study.pool
        share, text = coverage(pool.chain, pool.source("merged"), plan.sites, plan.calibrator.update)
        partial = [f"only a part is calibrated: {text}"] if share < 1 else []
        return [*seen, *partial, *_anchor(plan, manifest), *untouched_but_moved(pool, plan.parameters)]
    if plan.boundaries and not plan.calibrator.needs_task_id:
        return seen
    if plan.boundaries:
        return [
            *seen,
            "weights are those of the merged model; what is attached wants to know the task of an input",
        ]
    if plan.kept == "base":
        return [
            "no calibration was clearly better than the base, so that this is the base as it is: don't use the merge"
        ]
    return [
        "no calibration was clearly better than the merged model, so that this is the merged model as it is"
    ]


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


def _complete(writer: RunWriter, opened: OpenCalibration, reporter: Reporter, *, attribution: bool) -> None:
    """Add what comes behind the first numbers, as far as it is missing, the model card among it."""
    plan, study = opened.plan, opened.study
    study.team.once(CalibrationScratch(writer.folder, plan.name).remove)
    control = writer.manifest.calibrations[plan.name].control
    variants = [control, plan.variant] if control else [plan.variant]
    if plan.variant not in study.pool:
        add_calibration(study, opened.models, writer.folder, plan.name, plan.method, control)
    run_phases(writer, completing(writer, study, variants, reporter, prefix=f"{plan.phase}:"))

    def describe() -> None:
        with writer.file(plan.card) as file:
            file.write_text(model_card(open_run(writer.folder), plan.name), encoding="utf-8")

    lead(study.team, writer, describe)
    if attribution:
        run_phases(writer, explaining(writer, study, variants, reporter, prefix=f"{plan.phase}:"))
