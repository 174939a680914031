"""A calibration without its consequences: what would stop it, and about what it takes; nothing is written."""

from __future__ import annotations

import pathlib
import time

from driftlens.base.access import Context
from driftlens.base.errors import RunError
from driftlens.base.files import PathLike, free_bytes
from driftlens.engine.sites import coverage
from driftlens.jobs.calibrate.job import OpenCalibration, open_calibration, require_terms
from driftlens.jobs.calibrate.plan import Choice, untouched_but_moved
from driftlens.jobs.preflight.jobs import rehearsed_calibration
from driftlens.jobs.preflight.outcome import Preflight
from driftlens.jobs.study.reopening import require_same_samples
from driftlens.models.saving import require_target
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
    folder, checks, started = pathlib.Path(path), Preflight(), time.perf_counter()
    opened = checks.attempt("run", lambda: open_calibration(folder, request, context))
    if opened is None:
        return checks
    plan = opened.plan
    checks.attempt("lock", lambda: require_unlocked(folder))
    checks.attempt("name", lambda: require_terms(request, opened, is_chosen=choose is not None))
    checks.attempt("samples", lambda: require_same_samples(opened.manifest, opened.study))
    if (place := request.save_weights) is not None:
        checks.attempt("save-weights", lambda: require_target(opened.models.architecture, place))
    _describe(opened, checks)
    if choose is not None:
        look, given = choose.outlook, (plan.calibrator, plan.counts)
        outlook = checks.attempt("auto", lambda: look(*given, has_base=opened.study.has_base))
        if outlook is not None:
            checks.ok("candidates", "; ".join(outlook[0]))
    repeats = request.control and plan.calibrator.anchor_reach != 1
    if repeats:
        checks.ok("rho 1", "the same calibration is solved for once more")
    if checks.problems or not estimate:
        return checks
    opening = time.perf_counter() - started
    checks.estimate(
        lambda: rehearsed_calibration(
            opened, choose, attribution=request.attribution, control=repeats, opening=opening
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
    checks.ok("samples", ", ".join(f"{task} {count}" for task, count in plan.counts.items()))
    if plan.control:
        checks.ok("control", f"{plan.control} shows what the anchor does by itself")
    changes_all = not plan.sites and not plan.calibrator.needs_task_id
    for text in () if changes_all else untouched_but_moved(pool, plan.parameters):
        checks.notice("sites", text)


def _shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
