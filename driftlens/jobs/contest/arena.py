"""Several repairs of one run: the arena, a suite's protocols, and what fits on other features lose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlens.base.access import Context
from driftlens.base.errors import Cancelled, SpecError, did_you_mean
from driftlens.base.files import PathLike
from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.featcal import FeatCal
from driftlens.engine.problems import LinearProblem, Problem, SiteUpdate
from driftlens.engine.snapshot import Lane, calibrate_side_by_side
from driftlens.engine.walk import Parts
from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.calibrate.job import calibrate, open_calibration
from driftlens.jobs.contest.automatic import choice_of
from driftlens.jobs.contest.contest import (
    Candidate,
    Outcome,
    Trials,
    candidates,
    contest,
    one_by_one,
    require_any,
)
from driftlens.jobs.contest.sweep import sweep
from driftlens.jobs.study import reopening
from driftlens.runs import layout
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.spec import load_spec
from driftlens.spec.requests import AnalysisRequest, CalibrationRequest, SweepRequest
from driftlens.suites.reproduce import Protocol, Suite, protocol_called


def entrants(asked: Sequence[tuple[str, Mapping[str, object]]]) -> list[Candidate]:
    """The repairs asked for by method and settings, under names that calibrations can have; as `candidates`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")

    repairs = candidates(asked, calibrators, calibrators.__getitem__, name_of, beside=BESIDE)
    for entrant in repairs:
        request_of(entrant)
    return repairs


BESIDE = ("views", "shrink")
"""What an entrant may be asked for beside its method's own settings, as a calibration is."""


def request_of(entrant: Candidate, **more: Any) -> CalibrationRequest:
    """The calibration that an entrant is; a SpecError where that can't be asked for."""
    settings = dict(entrant.settings)
    beside: dict[str, Any] = {name: settings.pop(name) for name in BESIDE if name in settings}
    return CalibrationRequest(name=entrant.name, method=entrant.method, parameters=settings, **beside, **more)


def compete(
    run: PathLike,
    repairs: Sequence[Candidate],
    context: Context = Context(),
    *,
    samples: int | None = None,
    attribution: bool = True,
    against: str | None = None,
) -> dict[str, str]:
    """Calibrate a run with every repair in turn, on the same samples; those that are there are left as they are.

    `views` and `shrink` among an entrant's settings are the calibration's. Settings are those published for models of
    the run's kind, over which the entrant's own count; those of the spec's `calibration` take their place where it is
    of the same method and says some. One that was interrupted goes on where it stopped. Given is why those that could
    not be made could not, by name. A repair that all will be compared with, `against`, has to be among them or in the
    run.
    """
    manifest = open_run(run).manifest
    known = [*manifest.calibrations, *(entrant.name for entrant in repairs)]
    if against is not None and against not in known:
        raise SpecError(
            f"no repair is called {against!r}; there will be {', '.join(dict.fromkeys(known))}",
            hint=did_you_mean(against, known),
        )
    loader = str(manifest.architecture.get("loader"))
    section = None
    if context.live is None:
        reopening.require_spec(Path(run), manifest)
        section = load_spec(Path(run) / layout.SPEC).calibration

    def attempt(entrant: Candidate) -> Outcome[None]:
        kind = calibrators[entrant.method]
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if (
            section is not None
            and section.method == entrant.method
            and (section.preset or section.parameters)
        ):
            preset = None
        request = request_of(entrant, preset=preset, samples=samples, resume=True, attribution=attribution)
        calibrate(run, request, context, choose=choice_of(request), is_compared=True)
        return Outcome()

    try:
        results = contest(repairs, one_by_one(attempt, context.access.team))
        outcomes = {entrant.name: outcome for entrant, outcome in results}
    except Cancelled as error:
        error.hint = "What was finished is kept; the same command goes on where it stopped."
        raise
    require_any(outcomes.values())
    return {name: outcome.error.message for name, outcome in outcomes.items() if outcome.error is not None}


def reproduce(
    name: str,
    suite: Suite,
    folder: Path,
    out: Path,
    context: Context = Context(),
    *,
    protocol: str = "main",
) -> tuple[dict[str, DriftRun], dict[str, str]]:
    """The runs of a protocol by merge method, each under `out`, and why repairs are missing."""
    study = protocol_called(protocol)
    repairs = entrants([*study.repairs(suite).items()])
    specs = {merger: suite.run_spec(name, merger, folder) for merger in study.of(suite)}
    runs, failed = dict[str, DriftRun](), dict[str, str]()
    for merger, spec in specs.items():
        place = out / merger
        analyze(spec, AnalysisRequest(out=place, resume=True, attribution=study.traces), context)
        if study.is_excess:
            measure_excess(place, study.repairs(suite)["featcal"], context, resume=True)
        elif study.vary is None:
            missing = compete(place, repairs, context, attribution=study.traces)
            failed |= {f"{merger} {repair}": why for repair, why in missing.items()}
        else:
            sweep(place, sweep_of(study, suite), context)
        runs[merger] = open_run(place)
    return runs, failed


def sweep_of(protocol: Protocol, suite: Suite) -> SweepRequest:
    """What a protocol that varies something sweeps on each of its runs, whose specs may have published settings."""
    assert protocol.vary is not None
    repairs = {name: dict(settings) for name, settings in protocol.repairs(suite).items()}
    return SweepRequest(
        param={name: [*values] for name, values in protocol.vary(suite).items()},
        method=tuple(repairs),
        settings=repairs,
        seeds=protocol.seeds,
        ablate=protocol.ablate,
        resume=True,
    )


PHASE = "excess"
INPUTS = ("deployed", "merged", "expert")
"""Whose features a layer is fitted on; the first is what it will be fed."""


def quadratic(gram: Tensor, shift: float, change: Tensor) -> float:
    """tr(change (gram + shift I) change') of a change of weights [o, k]."""
    return float(((change @ gram) * change).sum() + shift * change.square().sum())


class _Heard(FeatCal):
    """FeatCal whose solves are listened to; lanes are solved in their order, the deployed one first.

    They share `deployed`, the objective and its minimum by the sites of the layer at hand, and its `rows` so far.
    """

    deployed: dict[str, tuple[Tensor, float, Tensor, float]]
    rows: list[dict[str, Any]]

    def solve(self, problem: Problem) -> list[SiteUpdate]:
        updates = super().solve(problem)
        if not isinstance(problem, LinearProblem) or "linear" not in self.update:
            return updates
        for site, update in zip(problem.sites, updates, strict=True):
            name = f"{site.name}.weight"
            weight = update.parameters[name]
            if self.inputs == INPUTS[0]:
                gram = problem.moments.weight_sum * problem.moments.gram
                gain = quadratic(gram, self.pull, problem.merged[name].to(weight) - weight)
                self.deployed[site.name] = gram, self.pull, weight, gain
                continue
            gram, pull, best, gain = self.deployed[site.name]
            excess = quadratic(gram, pull, weight - best)
            self.rows.append({"inputs": self.inputs, "site": site.name, "excess": excess, "gain": gain})
        return updates


def measure_excess(
    path: PathLike,
    settings: Mapping[str, Any],
    context: Context = Context(),
    *,
    resume: bool = False,
) -> DriftRun:
    """The run with its table `excess`: FeatCal fitted on deployed, merged and expert features, side by side.

    What a layer's fit loses when it is made on other features than those that the calibrated model will feed it, by the
    proposition on source and deployed objectives of FeatCal (arXiv:2605.13030, appendix on forward order): of the
    ridge objectives J_dep and J_src of one linear site, whose minimisers are W_dep and W_src, the excess

        J_dep(W_src) - J_dep(W_dep) = tr((W_src - W_dep) H_dep (W_src - W_dep)'),  H_dep = omega G_dep + lam I,

    which is exact, as J_dep is a quadratic with its minimum at W_dep.
    """
    import pandas as pd

    folder = Path(path)
    if resume and len(open_run(folder).excess()):
        return open_run(folder)
    request = CalibrationRequest(name=PHASE, method="featcal", parameters=dict(settings))
    opened = open_calibration(folder, request, context)
    plan, study = opened.plan, opened.study
    reopening.require_same_samples(opened.manifest, study)
    reopening.require_same_models(opened.manifest, study, context.reporter())
    lanes, rows, last = list[Lane](), list[dict[str, Any]](), max(plan.sites)
    deployed, heard = dict[str, tuple[Tensor, float, Tensor, float]](), list[dict[str, Any]]()
    for inputs in INPUTS:
        calibrator = _Heard(**plan.calibrator.get_params() | {"inputs": inputs})
        calibrator.check(has_base=study.has_base)
        calibrator.deployed, calibrator.rows = deployed, heard
        lanes.append(Lane(calibrator))
    with RunWriter.resume(folder) as writer:
        reporter = context.reporter(writer.progress)
        spill = folder / layout.SCRATCH / PHASE
        spill.parent.mkdir(exist_ok=True)
        trials = Trials(study, plan.samples, {}, lambda _: plan.sites, reporter, PHASE, spill)
        parts: Parts = {task: [samples] for task, samples in plan.samples.items()}

        @torch.no_grad()
        def work() -> None:
            rows.clear()
            for layers in calibrate_side_by_side(trials.ground(parts, plan.sites), lanes):
                columns = {"layer": layers[0].layer, "seed": study.seed, "n": min(plan.counts.values())}
                rows.extend({**columns, **row} for row in heard)
                heard.clear()
            writer.append("excess", pd.DataFrame(rows), replace=True)

        with reopening.deterministic_algorithms(study.settings.deterministic):
            reopening.run_phases(writer, [reopening.Phase(PHASE, work, study, again=True, sums=True)])
        reporter.step(PHASE, last, last)
    return open_run(folder)
