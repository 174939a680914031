"""What a layer's fit loses when it is made on other features than those that the calibrated model will feed it.

The proposition on source and deployed objectives of FeatCal (arXiv:2605.13030, appendix on forward order): of the
ridge objectives J_dep and J_src of one linear site, whose minimisers are W_dep and W_src, the excess

    J_dep(W_src) - J_dep(W_dep) = tr((W_src - W_dep) H_dep (W_src - W_dep)'),  H_dep = omega G_dep + lam I,

which is exact, as J_dep is a quadratic with its minimum at W_dep.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from driftlens.base.access import Context
from driftlens.base.files import PathLike
from driftlens.calibration.featcal import FeatCal
from driftlens.engine.calibrating import Ground
from driftlens.engine.problems import LinearProblem, Problem, SiteUpdate
from driftlens.engine.snapshot import Lane, calibrate_side_by_side
from driftlens.jobs.calibrate.job import open_calibration
from driftlens.jobs.study.reopening import (
    deterministic_algorithms,
    require_same_models,
    require_same_samples,
    suitable_threads,
)
from driftlens.runs import layout
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.spec.requests import CalibrationRequest

PHASE = "excess"
INPUTS = ("deployed", "merged", "expert")
"""Whose features a layer is fitted on; the first is what it will be fed."""


def quadratic(gram: Tensor, shift: float, change: Tensor) -> float:
    """tr(change (gram + shift I) change') of a change of weights [o, k]."""
    return float(((change @ gram) * change).sum() + shift * change.square().sum())


@dataclass
class _Layer:
    """The fits of the layer at hand: by its sites the deployed objective and its minimum, and the rows so far."""

    deployed: dict[str, tuple[Tensor, float, Tensor, float]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def hear(self, problem: LinearProblem, found: list[SiteUpdate], pull: float, inputs: str) -> None:
        gram = problem.moments.weight_sum * problem.moments.gram if inputs == INPUTS[0] else None
        for site, update in zip(problem.sites, found, strict=True):
            name = f"{site.name}.weight"
            weight = update.parameters[name]
            if gram is not None:
                gain = quadratic(gram, pull, problem.merged[name].to(weight) - weight)
                self.deployed[site.name] = gram, pull, weight, gain
                continue
            objective, shift, best, gain = self.deployed[site.name]
            excess = quadratic(objective, shift, weight - best)
            self.rows.append({"inputs": inputs, "site": site.name, "excess": excess, "gain": gain})


class _Heard(FeatCal):
    """FeatCal whose solves are listened to; lanes are solved in their order, the deployed one first."""

    layer: _Layer

    def solve(self, problem: Problem) -> list[SiteUpdate]:
        found = super().solve(problem)
        if isinstance(problem, LinearProblem) and "linear" in self.update:
            self.layer.hear(problem, found, self.pull, self.inputs)
        return found


def measure_excess(
    path: PathLike,
    settings: Mapping[str, Any],
    context: Context = Context(),
    *,
    resume: bool = False,
) -> DriftRun:
    """The run with its table `excess`: FeatCal fitted on deployed, merged and expert features, side by side."""
    import pandas as pd

    folder = pathlib.Path(path)
    if resume and len(open_run(folder).excess()):
        return open_run(folder)
    request = CalibrationRequest(name=PHASE, method="featcal", parameters=dict(settings))
    opened = open_calibration(folder, request, context)
    plan, study, layer = opened.plan, opened.study, _Layer()
    require_same_samples(opened.manifest, study)
    require_same_models(opened.manifest, study, context.reporter())
    lanes = []
    for inputs in INPUTS:
        calibrator = _Heard(**plan.calibrator.get_params() | {"inputs": inputs})
        calibrator.check(has_base=study.has_base)
        calibrator.layer = layer
        lanes.append(Lane(calibrator))
    rows, last = list[dict[str, Any]](), max(plan.sites)
    with RunWriter.resume(folder) as writer:
        reporter = context.reporter(writer.progress)
        (folder / layout.SCRATCH).mkdir(exist_ok=True)
        with (
            deterministic_algorithms(study.settings.deterministic),
            writer.phase(PHASE),
            suitable_threads(writer, PHASE, study),
            torch.no_grad(),
        ):
            ground = Ground(
                study.pool,
                {task: [samples] for task, samples in plan.samples.items()},
                plan.sites,
                base="base" if study.has_base else None,
                objectives=False,
                feature_budget=study.settings.feature_budget,
                spill=folder / layout.SCRATCH / PHASE,
                on_step=lambda now: reporter.step(PHASE, now.done, now.total, now.label),
            )
            for layers in calibrate_side_by_side(ground, lanes):
                known = {"layer": layers[0].layer, "seed": study.seed, "n": min(plan.counts.values())}
                rows += [{**known, **row} for row in layer.rows]
                layer.rows, layer.deployed = [], {}
            writer.append("excess", pd.DataFrame(rows), replace=True)
        reporter.step(PHASE, last, last)
    return open_run(folder)
