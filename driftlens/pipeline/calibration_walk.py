"""The solving walk of one calibration: layer after layer, kept on disk and reported as it goes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from driftlens.engine.forward_order import calibrate
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.pipeline.calibrated_weights import Key
from driftlens.pipeline.calibration_plan import CalibrationPlan
from driftlens.pipeline.calibration_scratch import CalibrationScratch, SolvedLayer
from driftlens.pipeline.study import Study
from driftlens.progress import Reporter
from driftlens.records.writer import RunWriter

PHASE = "calibrate"
"""What progress events of the solving walk are called."""


@dataclass
class Solution:
    """What a walk solved.

    Attributes:
        updates: (layer index, own parameter name) -> calibrated value, in the layer's layout.
        reports: one per site, with its layer's index.
    """

    updates: dict[Key, Tensor] = field(default_factory=dict)
    reports: list[tuple[int, SiteReport]] = field(default_factory=list)

    def add(self, layer: int, updates: Mapping[str, Tensor], reports: Sequence[SiteReport]) -> None:
        """Take one layer's solution in."""
        self.updates |= {(layer, name): value for name, value in updates.items()}
        self.reports += [(layer, report) for report in reports]


@torch.no_grad()
def solve(
    writer: RunWriter,
    study: Study,
    plan: CalibrationPlan,
    scratch: CalibrationScratch,
    solved: Mapping[int, SolvedLayer],
    reporter: Reporter,
) -> Solution:
    """All layers of a plan, in forward order; each is kept as soon as it is solved.

    Args:
        writer: of the run; told of every finished layer.
        study: the run, reopened.
        plan: what to solve for.
        scratch: keeps solved layers.
        solved: layers that an earlier sitting solved.
        reporter: told of every batch; may cancel.

    Raises:
        NumericsError: weights or features are NaN or infinite, or a system can't be solved as asked.
        Cancelled: somebody asked to stop; what was solved is kept.
    """
    solution, meter = Solution(), _Meter(writer, plan, reporter)
    for index, earlier in solved.items():
        solution.add(index, earlier.updates, earlier.reports)
    started = time.monotonic() - scratch.seconds
    for layer in calibrate(
        study.pool,
        {task: samples.batches for task, samples in plan.samples.items()},
        plan.calibrator,
        base="base" if study.has_base else None,
        sites=plan.sites,
        feature_budget=study.settings.feature_budget,
        spill=scratch.spill,
        done={index: earlier.updates for index, earlier in solved.items()},
        on_step=meter.step,
        ids={task: samples.ids for task, samples in plan.samples.items()},
        pooling=study.settings.pool,
    ):
        scratch.keep(layer, time.monotonic() - started)
        solution.add(layer.layer, layer.updates, layer.reports)
        meter.finished(layer)
    return solution


class _Meter:
    """Progress in layers, with the numbers of the last finished one: enough to draw a curve while it runs."""

    def __init__(self, writer: RunWriter, plan: CalibrationPlan, reporter: Reporter) -> None:
        self._writer = writer
        self._name = plan.name
        self._total = max(plan.sites)
        self._reporter = reporter
        self._metrics: dict[str, float] = {}

    def step(self, layer: int, task: str) -> None:
        what = f"layer {layer} of {self._total}" if layer else "reading samples"
        self._reporter.step(PHASE, max(0, layer - 1), self._total, f"{what}, task {task}", **self._metrics)

    def finished(self, layer: CalibratedLayer) -> None:
        drifts = layer.drift_l2_mean.values()
        self._metrics = {
            "layer": layer.layer,
            "drift_l2_mean": sum(drifts) / len(drifts) if drifts else math.nan,
            "objective_before": _total(report.objective_before for report in layer.reports),
            "objective_after": _total(report.objective_after for report in layer.reports),
        }
        self._writer.event("layer", phase=PHASE, name=self._name, **self._metrics)
        label = f"layer {layer.layer} of {self._total}"
        self._reporter.step(PHASE, layer.layer, self._total, label, **self._metrics)


def _total(values: Iterable[float | None]) -> float:
    """The sum; NaN where a value was not computed."""
    return sum(math.nan if value is None else value for value in values)
