"""The solving walk of one calibration: layer after layer, kept on disk and reported as it goes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from driftlens.base.progress import LayerSteps, Reporter
from driftlens.calibration.calibrator import Trained
from driftlens.checkpoints.sources import OnDemand
from driftlens.engine.forward_order import calibrate
from driftlens.engine.pool import Attachment, attachment_tensors, attachments_from
from driftlens.engine.problems import CalibratedLayer, ClosedForm, SiteReport
from driftlens.engine.training import (
    JointTrainer,
    LayerTrainer,
    WeightTrainer,
    train_attachments,
    train_weights,
)
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
    writer: RunWriter,
    study: Study,
    plan: CalibrationPlan,
    scratch: CalibrationScratch,
    solved: Mapping[int, SolvedLayer],
    reporter: Reporter,
) -> Solution:
    """All layers of a plan, in forward order; each is kept in `scratch` as soon as it is solved.

    Layers that an earlier sitting `solved` are applied and not solved again.

    Raises:
        NumericsError: weights or features are NaN or infinite, or a system can't be solved as asked.
        Cancelled: somebody asked to stop; what was solved is kept.
    """
    assert isinstance(plan.calibrator, ClosedForm)
    solution, started = Solution(dict(solved)), time.monotonic() - scratch.seconds
    last = max(plan.sites, default=0)
    steps = LayerSteps(last)
    metrics: dict[str, float] = {}  # of the last finished layer: enough to draw a curve while it runs

    def step(layer: int, task: str) -> None:
        what = f"layer {layer} of {last}" if layer > 0 else "weighing tokens"
        reporter.step(PHASE, steps.at(layer), steps.total, f"{what}, task {task}", **metrics)

    for layer in calibrate(
        study.pool,
        {task: samples.batches for task, samples in plan.samples.items()},
        plan.calibrator,
        base="base" if study.has_base else None,
        sites=plan.sites,
        feature_budget=study.settings.feature_budget,
        spill=scratch.spill,
        done={index: earlier.updates for index, earlier in solved.items()},
        on_step=step,
        ids={task: samples.ids for task, samples in plan.samples.items()},
        pooling=study.settings.pool,
        team=study.team,
        batch_sizes={task: samples.batch_size for task, samples in plan.samples.items()},
    ):
        if study.team.leads:
            solution.layers[layer.layer] = scratch.keep(layer, time.monotonic() - started)
        drifts = layer.drift_l2_mean.values()
        metrics |= {
            "layer": layer.layer,
            "drift_l2_mean": sum(drifts) / len(drifts) if drifts else math.nan,
            "objective_before": _total(report.objective_before for report in layer.reports),
            "objective_after": _total(report.objective_after for report in layer.reports),
        }
        writer.event("layer", phase=PHASE, name=plan.name, **metrics)
        reporter.step(
            PHASE, steps.at(layer.layer + 1), steps.total, f"layer {layer.layer} of {last}", **metrics
        )
    return solution


def train(study: Study, plan: CalibrationPlan, scratch: CalibrationScratch, reporter: Reporter) -> Solution:
    """What a trained calibrator attaches, task after task, or the weights that it learns; else as `solve`.

    Tasks are divided among the processes; weights, which serve all tasks, are learnt by the first one. A training that
    is stopped keeps how far it is in `scratch`, and goes on from there.
    """
    trainer: object = plan.calibrator
    team, label, started = study.team, "", time.monotonic() - scratch.seconds
    mine = sorted(task for task in plan.samples if study.owner(task) == team.rank)
    places = 1 if isinstance(trainer, WeightTrainer) else len(mine) * len(plan.boundaries)
    made: dict[tuple[str, int], Attachment] = {}

    def step(layer: int, task: str) -> None:
        nonlocal label
        label = f"layer {layer}, task {task}"
        reporter.step(PHASE, len(made), places, label)

    def epoch(number: int, total: int, loss: float) -> None:
        scratch.took(time.monotonic() - started)
        done, of = (number, total) if places == 1 else (len(made), places)
        reporter.step(PHASE, done, of, f"{label}: step {number} of {total}", loss=loss)

    given: dict[str, Any] = {
        "seed": plan.seed,
        "feature_budget": study.settings.feature_budget,
        "spill": scratch.spill,
        "memory": scratch,
        "on_step": step,
        "on_epoch": epoch,
    }
    if isinstance(trainer, WeightTrainer):

        def learn() -> None:
            parts = {task: [samples] for task, samples in plan.samples.items()}
            for layer, updates in train_weights(study.pool, parts, trainer, **given).items():
                if updates:
                    scratch.keep(CalibratedLayer(layer, updates, [], {}, 0.0), time.monotonic() - started)

        team.once(learn)
        solution = Solution(scratch.solved())
    else:
        assert isinstance(trainer, LayerTrainer | JointTrainer) and isinstance(plan.calibrator, Trained)
        given["make"] = make = plan.calibrator.attachment

        def attach() -> dict[str, Tensor]:
            own = {task: [plan.samples[task]] for task in mine}
            for task, boundary, attachment in train_attachments(study.pool, own, trainer, **given):
                made[task, boundary] = attachment
            return attachment_tensors(made) if team.size > 1 else {}

        for tensors in team.together(attach):
            made |= attachments_from(tensors.items(), make)
        solution = Solution(attachments=made)
    scratch.took(time.monotonic() - started)
    reporter.step(PHASE, places, places)
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
