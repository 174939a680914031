"""Calibrations and protocols without their consequences: what would stop them, and about what they take."""

from __future__ import annotations

import time
from pathlib import Path

from driftlens.base.access import Context
from driftlens.base.errors import RunError
from driftlens.base.files import PathLike, free_bytes
from driftlens.engine.sites import coverage
from driftlens.jobs.calibrate.job import (
    OpenCalibration,
    only_saves,
    open_calibration,
    open_kept,
    require_terms,
)
from driftlens.jobs.calibrate.plan import Choice, untouched_but_moved
from driftlens.jobs.preflight.jobs import rehearsed_calibration
from driftlens.jobs.preflight.outcome import Preflight
from driftlens.jobs.study.reopening import require_same_samples
from driftlens.runs.status import require_unlocked
from driftlens.spec.requests import CalibrationRequest


def rehearse(
    path: PathLike,
    request: CalibrationRequest,
    context: Context = Context(),
    *,
    choose: Choice | None = None,
    estimate: bool = True,
) -> Preflight:
    """What would stop a calibration, what it would do and, if asked for an `estimate`, about what it would take.

    Other arguments are as for `calibrate`. Of the checkpoints, headers and the weights of some layers are read; whether
    files have changed since the run is only found out by the calibration itself, which hashes them.
    """
    folder, checks, started = Path(path), Preflight(), time.perf_counter()
    is_chosen = choose is not None and choose.choose is not None
    if only_saves(folder, request):
        if checks.attempt("save-weights", lambda: open_kept(folder, request, context, is_chosen=is_chosen)):
            checks.ok("save-weights", f"{request.name} is finished: what the run keeps is written at once")
        return checks
    opened = checks.attempt("run", lambda: open_calibration(folder, request, context))
    if opened is None:
        return checks
    plan = opened.plan
    checks.attempt("lock", lambda: require_unlocked(folder))
    checks.attempt("name", lambda: require_terms(request, opened, is_chosen=is_chosen))
    checks.attempt("samples", lambda: require_same_samples(opened.manifest, opened.study))
    if (export := opened.export(request)) is not None:
        checks.attempt("save-weights", export.require_place)
    _describe(opened, checks)
    if choose is not None:
        flags = {"has_base": opened.study.has_base, "has_views": opened.study.is_told_views}
        outlook = checks.attempt("auto", lambda: choose.outlook(plan.calibrator, plan.counts, **flags))
        if outlook is not None:
            checks.ok("candidates", "; ".join(outlook[0]))
    unpulled = plan.calibrator.at_merged() if request.control and plan.calibrator.anchor_reach != 1 else None
    if unpulled is not None:
        pulled = plan.calibrator.get_params()
        changed = [
            f"{name} {value}" for name, value in unpulled.get_params().items() if value != pulled[name]
        ]
        checks.ok(", ".join(changed), "the same calibration is solved for once more")
    if checks.problems or not estimate:
        return checks
    opening = time.perf_counter() - started
    checks.estimate(
        lambda: rehearsed_calibration(
            opened, choose, attribution=request.attribution, control=unpulled is not None, opening=opening
        )
    )
    if checks.cost is None:
        return checks
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
    copies = {task: samples.num_read - len(samples) for task, samples in plan.samples.items()}
    checks.ok(
        "samples",
        ", ".join(
            f"{task} {count}" + f" and {copies[task]} copies" * (copies[task] > 0)
            for task, count in plan.counts.items()
        ),
    )
    checks.ok("saved in", plan.out_dtype or "the number types of the base")
    if plan.control:
        checks.ok("control", f"{plan.control} shows what the anchor does by itself")
    changes_all = not plan.sites and not plan.calibrator.needs_task_id
    for text in () if changes_all else untouched_but_moved(pool, plan.parameters):
        checks.notice("sites", text)


def _shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
