"""A calibration rehearsed: everything that would stop it, and what it will take; nothing is written."""

from __future__ import annotations

import dataclasses
import pathlib

from driftlens.base.access import Context
from driftlens.base.errors import RunError
from driftlens.base.files import PathLike, free_bytes
from driftlens.checkpoints.saving import require_target
from driftlens.engine.site_selection import coverage
from driftlens.jobs.calibrate.job import OpenCalibration, open_calibration, require_terms
from driftlens.jobs.calibrate.plan import Choice, untouched_but_moved
from driftlens.jobs.preflight.costs import Cost, TaskLoad, Workload, estimate, layer_costs, memory_bytes
from driftlens.jobs.preflight.outcome import Preflight
from driftlens.jobs.preflight.solving import solving
from driftlens.jobs.study.reopening import require_same_samples
from driftlens.runs.lock import require_unlocked
from driftlens.spec.requests import CalibrationRequest


def rehearse(
    path: PathLike, request: CalibrationRequest, context: Context = Context(), *, choose: Choice | None = None
) -> Preflight:
    """What would stop a calibration, what it would do, and what it would take. Arguments as for `calibrate`.

    Of the checkpoints, headers are read, and of stem and head the weights; whether files have changed since the run
    is only found out by the calibration itself, which hashes them.
    """
    folder, checks = pathlib.Path(path), Preflight()
    opened = checks.attempt("run", lambda: open_calibration(folder, request, context))
    if opened is None:
        return checks
    plan = opened.plan
    if not request.attribution:
        settings = dataclasses.replace(opened.study.settings, jacobian=None)
        opened = dataclasses.replace(opened, study=dataclasses.replace(opened.study, settings=settings))
    checks.attempt("lock", lambda: require_unlocked(folder))
    checks.attempt("name", lambda: require_terms(request, opened, is_chosen=choose is not None))
    checks.attempt("samples", lambda: require_same_samples(opened.manifest, opened.study))
    if (place := request.save_weights) is not None:
        checks.attempt("save-weights", lambda: require_target(opened.models.architecture, place))
    _describe(opened, checks)
    effort, look = plan.calibrator.effort, None if choose is None else choose.outlook
    given = plan.calibrator, plan.counts
    if look and (found := checks.attempt("auto", lambda: look(*given, has_base=opened.study.has_base))):
        titles, effort = found
        checks.ok("candidates", "; ".join(titles))
        checks.ok("choosing", f"takes about as long as {effort:.0f} calibrations by FeatCal, at most")
    if request.control and plan.calibrator.anchor_reach != 1:
        checks.ok("rho 1", "the same calibration is solved for once more")
        effort += 1
    checks.cost = _cost(opened, effort)
    free, need = free_bytes(folder), checks.cost.disk_bytes
    if free < need:
        text = f"{folder} is on a disk with {free / 1e6:,.0f} MB free; about {need / 1e6:,.0f} MB are needed"
        checks.problem("disk", RunError(text, hint="Free some space first."))
    return checks


def _describe(opened: OpenCalibration, checks: Preflight) -> None:
    plan = opened.plan
    settings = ", ".join(f"{name} {_shown(value)}" for name, value in plan.hyperparameters.items())
    checks.ok("settings", f"{plan.method}: {settings}")
    pool, where = opened.study.pool, f"in {len(plan.layers)} of {len(opened.study.pool.chain.layers)} layers"
    if plan.sites:
        _, text = coverage(pool.chain, pool.source("merged"), plan.sites, plan.calibrator.update)
        checks.ok("sites", f"{where}: {text}")
    else:
        what = "attachments" if plan.calibrator.needs_task_id else "all weights"
        checks.ok("sites", f"{what} {where}")
    checks.ok("leaves", plan.calibrator.leaves())
    checks.ok("samples", ", ".join(f"{task} {count}" for task, count in plan.counts.items()))
    if plan.control:
        checks.ok("control", f"{plan.control} shows what the anchor does by itself")
    changes_all = not plan.sites and not plan.calibrator.needs_task_id
    for text in () if changes_all else untouched_but_moved(pool, plan.parameters):
        checks.notice("sites", text)


def _shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _cost(opened: OpenCalibration, effort: float) -> Cost:
    """Of so many solving walks, and of the analysis of the new variants, as the run has the drift of the others."""
    study, plan, pool = opened.study, opened.plan, opened.study.pool
    first = next(iter(study.tasks.values())).diagnosis
    layers = layer_costs(opened.models.architecture, first.load([0]), pool.dtype, study.settings.pool)
    source = pool.source("merged") if opened.models.base is None else opened.models.base
    work = Workload(
        layers=layers,
        tasks={
            task: TaskLoad(len(at.diagnosis), 0 if at.test is None or at.head is None else len(at.test), 0)
            for task, at in study.tasks.items()
        },
        variants=len(plan.variants),
        explained=len(plan.variants),
        settings=study.settings,
        batch_size=first.batch_size,
        merged_bytes=len(plan.variants) * sum(header.nbytes for header in source.headers.values()),
        ahead=int(pool.device.type == "cuda"),
    )
    walk = solving(pool.chain, pool.source("merged").headers, plan.sites, plan.counts, layers)
    more_memory = walk.memory(work) - memory_bytes(work)
    return estimate(work, first, pool.device, more=walk.effort * effort, memory=max(0, more_memory))
