"""A calibration rehearsed: everything that would stop it, and what it will take; nothing is written."""

from __future__ import annotations

import dataclasses
import pathlib

from driftlens.access import Access
from driftlens.errors import RunError
from driftlens.files import PathLike, free_bytes
from driftlens.pipeline.calibrate.job import OpenCalibration, Terms, open_calibration
from driftlens.pipeline.calibrate.plan import untouched_but_moved
from driftlens.pipeline.calibrate.request import CalibrationRequest
from driftlens.pipeline.calibrate.variants import require_target
from driftlens.pipeline.preflight.costs import (
    Cost,
    LayerCost,
    TaskLoad,
    Workload,
    calibration_memory,
    calibration_operations,
    estimate,
    layer_costs,
    memory_bytes,
)
from driftlens.pipeline.preflight.outcome import Preflight
from driftlens.pipeline.study.reopening import require_same_samples
from driftlens.records.lock import require_unlocked


def rehearse(
    path: PathLike,
    request: CalibrationRequest,
    *,
    resume: bool = False,
    replace: bool = False,
    save_weights: PathLike | None = None,
    attribution: bool = True,
    access: Access = Access(),
) -> Preflight:
    """What would stop a calibration, what it would do, and what it would take. Arguments as for `calibrate`.

    Of the checkpoints, headers are read, and of stem and head the weights; whether files have changed since the run
    is only found out by the calibration itself, which hashes them.
    """
    folder, checks = pathlib.Path(path), Preflight()
    opened = checks.attempt("run", lambda: open_calibration(folder, request, access=access))
    if opened is None:
        return checks
    plan = opened.plan
    if not attribution:
        settings = dataclasses.replace(opened.study.settings, jacobian=None)
        opened = dataclasses.replace(opened, study=dataclasses.replace(opened.study, settings=settings))
    checks.attempt("lock", lambda: require_unlocked(folder))
    checks.attempt("name", lambda: Terms(resume=resume, replace=replace).require(plan, opened))
    checks.attempt("samples", lambda: require_same_samples(opened.manifest, opened.study))
    if save_weights is not None:
        checks.attempt("save-weights", lambda: require_target(opened.models, save_weights))
    _describe(opened, checks)
    cost = checks.cost = _cost(opened)
    checks.attempt("disk", lambda: _require_room(folder, cost))
    return checks


def _describe(opened: OpenCalibration, checks: Preflight) -> None:
    plan = opened.plan
    settings = ", ".join(f"{name} {_shown(value)}" for name, value in plan.hyperparameters.items())
    checks.ok("settings", f"{plan.method}: {settings}")
    count = sum(map(len, plan.sites.values()))
    what = f"{count} sites" if plan.sites else "attachments"
    checks.ok("sites", f"{what} in {len(plan.layers)} of {len(opened.study.pool.chain.layers)} layers")
    checks.ok("samples", ", ".join(f"{task} {count}" for task, count in plan.counts.items()))
    if plan.control:
        checks.ok("control", f"{plan.control} shows what the anchor does by itself")
    for text in untouched_but_moved(opened.study.pool, plan.parameters):
        checks.notice("sites", text)


def _shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _cost(opened: OpenCalibration) -> Cost:
    study, plan = opened.study, opened.plan
    first = next(iter(study.tasks.values())).diagnosis
    layers = layer_costs(opened.models.architecture, first.load([0]), study.pool.dtype, study.settings.pool)
    work = _analysis(opened, layers, first.batch_size)
    found = estimate(
        work,
        first,
        study.pool.device,
        study.pool.dtype,
        more_operations=calibration_operations(plan, study.pool, layers),
        more_samples=sum(plan.counts.values()),
    )
    budget = study.settings.feature_budget
    solving = calibration_memory(plan, study.pool, layers, budget, first.batch_size)
    return dataclasses.replace(
        found,
        memory_bytes=found.memory_bytes + max(0, solving - memory_bytes(work)),
    )


def _analysis(opened: OpenCalibration, layers: tuple[LayerCost, ...], batch_size: int) -> Workload:
    """The analysis behind the calibration: of its variants alone, as the run has the base's drift."""
    study, plan = opened.study, opened.plan
    source = study.pool.source("merged") if opened.models.base is None else opened.models.base
    size = sum(header.nbytes for header in source.headers.values())
    return Workload(
        layers=layers,
        tasks={
            task: TaskLoad(len(at.diagnosis), 0 if at.test is None or at.head is None else len(at.test), 0)
            for task, at in study.tasks.items()
        },
        variants=len(plan.variants),
        explained=len(plan.variants),
        settings=study.settings,
        batch_size=batch_size,
        merged_bytes=size * len(plan.variants),
    )


def _require_room(folder: pathlib.Path, cost: Cost) -> None:
    free = free_bytes(folder)
    if free < cost.disk_bytes:
        raise RunError(
            f"{folder} is on a disk with {free / 1e6:,.0f} MB free; about {cost.disk_bytes / 1e6:,.0f} MB are needed",
            hint="Free some space first.",
        )
