"""What one calibration solves for or trains: layer after layer, kept on disk and reported as it goes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from driftlens.base.progress import Reporter
from driftlens.checkpoints.sources import OnDemand
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.pool import Attachment
from driftlens.engine.problems import SiteReport
from driftlens.jobs.calibrate.plan import CalibrationPlan
from driftlens.jobs.calibrate.scratch import CalibrationScratch, SolvedLayer
from driftlens.jobs.study.study import Study
from driftlens.models.chain import ParameterKey
from driftlens.runs import layout
from driftlens.runs.manifest import CalibrationInfo, versions
from driftlens.runs.schema import CALIBRATION
from driftlens.runs.writer import RunWriter

PHASE = "calibrate"
"""What progress events of the solving walk are called."""


@dataclass
class Solution:
    """What a walk solved.

    Attributes:
        layers: what was solved, by index.
        attachments: (task, boundary) -> what a trained calibrator attaches there.
    """

    layers: dict[int, SolvedLayer] = field(default_factory=dict)
    attachments: dict[tuple[str, int], Attachment] = field(default_factory=dict)

    @property
    def updates(self) -> OnDemand[ParameterKey]:
        """(layer index, own parameter name) -> calibrated value, in the layer's layout."""
        keys = [(index, name) for index, layer in self.layers.items() for name in layer.updates]
        return OnDemand(dict.fromkeys(keys), lambda key: self.layers[key[0]].updates[key[1]])

    @property
    def reports(self) -> list[tuple[int, SiteReport]]:
        """One per site, with its layer's index."""
        return [(index, report) for index, layer in self.layers.items() for report in layer.reports]


@torch.no_grad()
def solve(
    writer: RunWriter, study: Study, plan: CalibrationPlan, scratch: CalibrationScratch, reporter: Reporter
) -> Solution:
    """What a plan solves for or trains, in forward order; all of it is kept in `scratch` as soon as it is there.

    What earlier sittings have reached is not done again.

    Raises:
        NumericsError: weights or features are NaN or infinite, or a system can't be solved as asked.
        Cancelled: somebody asked to stop; what was solved is kept.
    """
    solution, started = Solution(scratch.solved()), time.monotonic() - scratch.seconds
    metrics: dict[str, float] = {}  # of the last finished layer: enough to draw a curve while it runs

    def step(now: Step) -> None:
        scratch.took(time.monotonic() - started)
        reporter.step(
            PHASE, now.done, now.total, now.label, **(metrics if now.loss is None else {"loss": now.loss})
        )

    ground = Ground(
        study.pool,
        {task: [samples] for task, samples in plan.samples.items()},
        plan.sites,
        base="base" if study.has_base else None,
        done={index: earlier.updates for index, earlier in solution.layers.items()},
        feature_budget=study.settings.feature_budget,
        spill=scratch.spill,
        on_step=step,
        pooling=study.settings.pool,
        team=study.team,
        seed=plan.seed,
        memory=scratch,
    )
    for layer in plan.calibrator.calibrate(ground):
        solution.attachments |= {(task, layer.layer): each for task, each in layer.attachments.items()}
        if study.team.leads and (layer.updates or layer.reports):
            solution.layers[layer.layer] = scratch.keep(layer, time.monotonic() - started)
        if layer.reports:
            drifts = layer.drift_l2_mean.values()
            metrics |= {
                "layer": layer.layer,
                "drift_l2_mean": sum(drifts) / len(drifts) if drifts else math.nan,
                "objective_before": _total(report.objective_before for report in layer.reports),
                "objective_after": _total(report.objective_after for report in layer.reports),
            }
            writer.event("layer", phase=PHASE, name=plan.name, **metrics)
    scratch.took(time.monotonic() - started)
    return solution


def _total(values: Iterable[float | None]) -> float:
    """The sum; NaN where a value was not computed."""
    return sum(math.nan if value is None else value for value in values)


def history_rows(name: str, reports: Sequence[tuple[int, SiteReport]]) -> list[dict[str, Any]]:
    """Rows of the calibration table: one per site, layer index first."""
    known = CALIBRATION.names
    return [
        {"name": name, "layer": layer}
        | {key: value for key, value in dataclasses.asdict(report).items() if key in known}
        for layer, report in reports
    ]


def record_solution(
    writer: RunWriter,
    plan: CalibrationPlan,
    reports: Sequence[tuple[int, SiteReport]],
    identity: dict[str, Any],
    info: CalibrationInfo,
) -> None:
    """Write the history of every site and `config.yaml`, in which all settings are resolved.

    Raises:
        RunError: the folder can't be written to.
    """
    import pandas as pd

    from driftlens.spec.yaml_text import to_yaml

    if reports:
        writer.append("calibration", pd.DataFrame(history_rows(plan.name, reports)), replace=True)
    config = {
        "name": plan.name,
        "variant": plan.variant,
        "control": plan.control or None,
        "selection": dict(plan.selection) or None,
        **identity,
        "num_samples": plan.counts,
        "seconds": round(info.seconds, 3),
        "notices": list(info.notices),
        "versions": versions(),
    }
    with writer.file(f"{layout.calibration_folder(plan.name)}/config.yaml") as path:
        path.write_text(to_yaml(config), encoding="utf-8")


def calibration_info(
    plan: CalibrationPlan, seconds: float, notices: Sequence[str], attached: int = 0
) -> CalibrationInfo:
    """The entry of the manifest."""
    return CalibrationInfo(
        method=plan.method,
        settings=plan.hyperparameters,
        control=plan.control,
        seconds=seconds,
        samples=plan.counts,
        sample_digests=plan.sample_digests,
        layers=plan.layers,
        automatic=plan.automatic,
        notices=tuple(notices),
        preset=plan.preset,
        sites=tuple(plan.patterns),
        seed=plan.seed,
        selection=plan.selection,
        attached=attached,
    )
