"""Calibrations tried side by side: candidates in, measurements on held-out samples out, and no model is kept.

Candidates walk together in groups that fit into memory; then one calibrated model at a time is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from driftlens.base.errors import DriftLensError, SingularGramError
from driftlens.base.progress import LayerSteps, Reporter
from driftlens.base.variants import expert_of
from driftlens.data.samples import SampleSet
from driftlens.engine.carried import Parts
from driftlens.engine.forward_order import Lane, calibrate, calibrate_side_by_side
from driftlens.engine.pool import Attachment
from driftlens.engine.problems import ClosedForm
from driftlens.engine.training import (
    JointTrainer,
    LayerTrainer,
    Trainer,
    WeightTrainer,
    train_attachments,
    train_weights,
)
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.calibrate.variants import with_parameters
from driftlens.jobs.contest.judge import LANE
from driftlens.jobs.study.study import Study
from driftlens.models.chain import ParameterKey

T = TypeVar("T")


@dataclass(frozen=True)
class Tried(Generic[T]):
    """What became of one candidate.

    Attributes:
        by_task: what was measured of its model; nothing where it can't be solved for.
        seconds: that its calibration took.
        error: why it can't be solved for.
    """

    by_task: Mapping[str, T]
    seconds: float = 0.0
    error: DriftLensError | None = None


@dataclass(frozen=True)
class Trials(Generic[T]):
    """Where candidates are calibrated, and how they are measured.

    Attributes:
        study: models and settings; its pool gains a model called `LANE`, which changes with every candidate.
        sites: layer index -> names of the sites that are calibrated.
        held_out: the samples to measure on, by task.
        measure: (model, task, its final features, the expert's) -> what is to be known; features are [n, d].
        reporter: told of every layer and every candidate; may cancel.
        phase: what progress events are called.
        spill: folder for features beyond the budget.
    """

    study: Study
    sites: Mapping[int, Sequence[str]]
    held_out: Mapping[str, SampleSet]
    measure: Callable[[str, str, Tensor, Tensor], T]
    reporter: Reporter
    phase: str
    spill: Path | None = None

    def run(self, parts: Parts, lanes: Sequence[Lane]) -> Iterator[Tried[T]]:
        """What became of every candidate, in their order, each as soon as it is known.

        Where one of those that walk together can't be solved for, all that are left walk alone. Each may read those of
        the parts that its lane names.

        Raises:
            NumericsError: features are NaN or infinite.
            Cancelled: somebody asked to stop.
        """
        left = list(lanes)
        try:
            for seconds in self.solved(parts, lanes):
                tried = Tried(self.of(LANE), seconds)
                left.pop(0)
                yield tried
        except SingularGramError as error:  # without a word on whose
            if len(left) == 1:
                yield Tried({}, error=error)
            else:
                for lane in left:
                    yield from self.run(parts, [lane])

    def trained(self, samples: Mapping[str, SampleSet], trainer: Trainer, seed: int) -> Tried[T]:
        """What became of one candidate that is trained, drawing from `seed`; errors as for `train_attachments`."""
        pool, started = self.study.pool, time.perf_counter()
        total = len(samples) * len(trainer.boundaries(len(pool.chain.layers)))
        attached: dict[tuple[str, int], Attachment] = {}
        parts = {task: [at] for task, at in samples.items()}
        given: dict[str, Any] = {
            "seed": seed,
            "feature_budget": self.study.settings.feature_budget,
            "spill": self.spill,
            "on_step": lambda layer, task: self.reporter.step(
                self.phase, len(attached), total, f"layer {layer}, task {task}"
            ),
            "on_epoch": lambda epoch, of, loss: self.reporter.step(
                self.phase, len(attached), total, f"epoch {epoch} of {of}", loss=loss
            ),
        }
        source = pool.source("merged")
        if isinstance(trainer, WeightTrainer):
            layers = train_weights(pool, parts, trainer, **given)
            updates = {(index, name): value for index, of in layers.items() for name, value in of.items()}
            source = with_parameters(pool.chain, source, self.study.like, updates)
        else:
            assert isinstance(trainer, LayerTrainer | JointTrainer)
            for task, boundary, attachment in train_attachments(pool, parts, trainer, **given):
                attached[task, boundary] = attachment
        seconds = time.perf_counter() - started
        pool.add(LANE, source, attached)
        return Tried(self.of(LANE), seconds)

    def alone(
        self, samples: Mapping[str, SampleSet], calibrator: ClosedForm, sites: Mapping[int, Sequence[str]]
    ) -> Tried[T]:
        """What became of one candidate that walks alone, perhaps with other sites; errors as for `calibrate`."""
        pool, last, updates = self.study.pool, max(sites, default=0), dict[ParameterKey, Tensor]()
        seconds, steps = 0.0, LayerSteps(last)
        for found in calibrate(
            pool,
            {task: at.batches for task, at in samples.items()},
            calibrator,
            base="base" if self.study.has_base else None,
            ids={task: at.ids for task, at in samples.items()},
            objectives=False,
            sites=sites,
            feature_budget=self.study.settings.feature_budget,
            spill=self.spill,
            pooling=self.study.settings.pool,
            team=self.study.team,
            on_step=lambda layer, task: self.reporter.step(
                self.phase, steps.at(layer), steps.total, f"layer {max(0, layer)} of {last}, task {task}"
            ),
        ):
            updates |= {(found.layer, name): value for name, value in found.updates.items()}
            seconds += found.seconds
        pool.add(LANE, with_parameters(pool.chain, pool.source("merged"), self.study.like, updates))
        return Tried(self.of(LANE), seconds)

    def of(self, model: str) -> dict[str, T]:
        """What is measured of a model of the study's pool, by task."""

        def measured(task: str) -> T:
            return self.measure(model, task, self._features(model, task), self._expert(task))

        return self.study.team.each(list(self.held_out), measured)

    def _expert(self, task: str) -> Tensor:
        """The expert's final features, which no candidate changes."""
        if task not in self._experts:
            self._experts[task] = self._features(expert_of(task), task)
        return self._experts[task]

    @cached_property
    def _experts(self) -> dict[str, Tensor]:
        return {}

    def _features(self, model: str, task: str) -> Tensor:
        return final_features(self.study.pool, model, task, self.held_out[task], self.study.settings.pool)

    def solved(self, parts: Parts, lanes: Sequence[Lane]) -> Iterator[float]:
        """The seconds that each lane took, while the study's pool holds its model as `LANE`.

        Raises:
            SingularGramError: one of the lanes that walk together can't be solved for.
        """
        pool, budget = self.study.pool, self.study.settings.feature_budget
        base = "base" if self.study.has_base else None
        size = max(1, budget // self._lane_bytes())
        last, num_groups = max(self.sites), -(-len(lanes) // size)
        total = num_groups * last + len(lanes)
        for group, first in enumerate(range(0, len(lanes), size)):
            done = group * last + first
            group_lanes = lanes[first : first + size]
            updates: list[dict[ParameterKey, Tensor]] = [{} for _ in group_lanes]
            seconds = [0.0] * len(group_lanes)
            for layers in calibrate_side_by_side(
                pool,
                parts,
                group_lanes,
                sites=self.sites,
                base=base,
                feature_budget=budget,
                spill=self.spill,
                team=self.study.team,
                on_step=lambda layer, task, done=done: self.reporter.step(  # type: ignore[misc]
                    self.phase, done + max(0, layer - 1), total, f"layer {layer} of {last}, task {task}"
                ),
            ):
                for index, found in enumerate(layers):
                    updates[index] |= {(found.layer, name): value for name, value in found.updates.items()}
                    seconds[index] += found.seconds
            for index, solution in enumerate(updates):
                lane = first + index
                label = f"calibration {lane + 1} of {len(lanes)}"
                self.reporter.step(self.phase, (group + 1) * last + lane, total, label)
                pool.add(LANE, with_parameters(pool.chain, pool.source("merged"), self.study.like, solution))
                yield seconds[index]
        self.reporter.step(self.phase, total, total)

    def _lane_bytes(self) -> int:
        """Bytes that one lane holds at most: its solution, and the moments of one layer in float64."""
        pool, solution, moments = self.study.pool, 0, 0
        headers = pool.source("merged").headers
        for layer in pool.chain.layers:
            shapes = [
                torch.Size(slot.shape(headers[slot.key].shape))
                for name, slot in layer.parameters.items()
                if name.rpartition(".")[0] in self.sites.get(layer.index, ())
            ]
            solution += sum(shape.numel() for shape in shapes) * pool.dtype.itemsize
            # A Gram matrix, its sum over tasks and its factor; likewise the cross moments.
            here = sum(3 * shape[-1] ** 2 + 2 * shape.numel() for shape in shapes if len(shape) == 2)
            moments = max(moments, 8 * here)
        return solution + moments
