"""Calibrations and protocols without their consequences: what would stop them, and about what they take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftlens.base.access import Access, Context
from driftlens.base.errors import CheckpointError, RunError
from driftlens.base.files import PathLike, free_bytes
from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import hub_folder, repository_of
from driftlens.data.hf_datasets import repository_folder
from driftlens.engine.sites import coverage
from driftlens.jobs.calibrate.job import (
    OpenCalibration,
    only_saves,
    open_calibration,
    open_kept,
    require_terms,
)
from driftlens.jobs.calibrate.plan import Choice, untouched_but_moved
from driftlens.jobs.preflight.job import checked
from driftlens.jobs.preflight.jobs import rehearsed_calibration
from driftlens.jobs.preflight.outcome import Preflight
from driftlens.jobs.preflight.rehearsal import Cost, Rehearsed, shares_of, size_text
from driftlens.jobs.study.reopening import require_same_samples
from driftlens.runs.status import require_unlocked
from driftlens.spec import RunSpec
from driftlens.spec.requests import CalibrationRequest
from driftlens.suites.reproduce import Protocol, Suite, hub_ids, protocol_called


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


def plan(
    suite: Suite, specs: Mapping[str, RunSpec], protocol: str, *, access: Access = Access()
) -> dict[str, Any]:
    """The plan of a protocol as plain values; nothing is downloaded or written.

    `models` and `data` say of each repository the bytes that it takes in the local cache, None where it is not there;
    the Hub isn't asked how large others are. Once all models are there, `runs` holds what each analysis takes
    (`cost`, by preflight) and what its repairs or sweeps take (`more`), or else problems.
    """
    first, study = next(iter(specs.values())), protocol_called(protocol)
    models = {name: _cached_bytes(name) for name in hub_ids(first)}
    data = {name: _bytes(repository_folder(*repository_of(name))) for name in hub_ids(first, "data")}
    missing = [name for name, size in models.items() if size is None]
    runs = {}
    repairs: dict[str, Rehearsed] = {}  # they take as long whatever the merge
    for merger, spec in specs.items() if not missing else ():
        if not study.traces:
            spec = spec.model_copy(update={"metrics": spec.metrics.model_copy(update={"jacobian": False})})
        trials, more = list(trials_of(study, suite, spec)), None
        checks, opened = checked(spec, Access(access.device, True, access.trust))
        if opened is not None and checks.estimate(opened.analysis) is not None:
            for trial in trials:
                if trial.method not in repairs:
                    request = CalibrationRequest(
                        name="plan",
                        method=trial.method,
                        parameters=dict(study.repairs(suite)[trial.method]),
                        attribution=study.traces,
                    )
                    repairs[trial.method] = opened.calibration(request)
            more = _together(trials, repairs)
        remarks = [finding.text for finding in checks.findings if finding.level != "ok"]
        runs[merger] = {
            "cost": checks.cost and vars(checks.cost),
            "more": more and vars(more),
            "calibrations": sum(trial.times for trial in trials),
            "text": checks.cost.text() if checks.cost else "; ".join(remarks),
            "more_text": more.text() if more else "",
        }
    return {
        **{"title": suite.title, "protocol": protocol, "about": study.about, "merges": [*specs]},
        **{"repairs": [*study.repairs(suite)], "models": models, "missing": missing, "data": data},
        **{"runs": runs, "note": suite.note},
    }


class Trial(NamedTuple):
    """So many calibrations by one method, on so many samples a task; `is_kept` if each leaves models in the run."""

    method: str
    times: int
    samples: int
    is_kept: bool = False


def trials_of(protocol: Protocol, suite: Suite, spec: RunSpec) -> Iterator[Trial]:
    """The calibrations that a protocol makes on one of the suite's runs."""
    count = max(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    for method in protocol.repairs(suite):
        if protocol.is_excess:
            yield Trial(
                method, 3, count
            )  # on features of the merged model, of the expert and of the deployed one
        elif protocol.vary is None:
            yield Trial(method, 1, count, is_kept=True)
        elif protocol.ablate:
            yield Trial(method, protocol.seeds * (1 + len(calibrators[method].ablations)), count)
        else:
            for name, values in protocol.vary(suite).items():
                for value in values:
                    yield Trial(method, protocol.seeds, int(value) if name == "n" else count)


def _together(trials: Sequence[Trial], repairs: Mapping[str, Rehearsed]) -> Cost:
    """About what all of them take, one after the other; what is not kept is only solved and scored."""
    seconds, disk, memory = 0.0, 0, 0
    for method, times, samples, is_kept in trials:
        rehearsal = repairs[method]
        count = max(len(task.calibration or ()) for task in rehearsal.study.tasks.values())
        shares = {
            task: dataclasses.replace(share, calibration=share.calibration * samples / max(1, count))
            for task, share in shares_of(rehearsal.study).items()
        }
        phases = rehearsal.seconds if is_kept else {"calibrate", "evaluate"} & rehearsal.seconds.keys()
        seconds += times * sum(rehearsal.phase_seconds(phase, shares) for phase in phases)
        disk += times * is_kept * rehearsal.cost.disk_bytes
        memory = max(memory, rehearsal.cost.memory_bytes)
    return Cost(memory, disk, seconds)


def plan_text(planned: Mapping[str, Any]) -> str:
    """The plan in lines."""
    lines = [f"{planned['title']}, protocol {planned['protocol']}: {planned['about']}"]
    lines += [f"merges: {', '.join(planned['merges'])}", f"repairs: {', '.join(planned['repairs'])}"]
    for kind, sizes in (("model", planned["models"]), ("data", planned["data"])):
        lines += [
            f"{kind} {name}: {'to be downloaded' if size is None else f'in the cache, {size_text(size)}'}"
            for name, size in sizes.items()
        ]
    for merger, run in planned["runs"].items():
        lines.append(f"analysis of {merger}: {run['text']}")
        if run["more_text"]:
            count = run["calibrations"]
            lines.append(f"{count} calibration{'s' if count > 1 else ''} of {merger}: {run['more_text']}")
    if planned["missing"]:
        lines.append(f"The cost is known once {len(planned['missing'])} models are in the cache.")
    return "\n".join([*lines, planned["note"]]).strip()


def _cached_bytes(repository: str) -> int | None:
    try:
        return _bytes(hub_folder(repository, offline=True))
    except CheckpointError:
        return None


def _bytes(folder: Path | None) -> int | None:
    if folder is None:
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
