"""Calibrations tried on parts of the calibration samples: settings in, measurements out, and no model is kept.

Those that can walk together do so, in groups that fit into memory; then one calibrated model at a time is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from driftlens.base.errors import DataError, NumericsError, SingularGramError
from driftlens.base.progress import LayerSteps, Reporter
from driftlens.calibration.calibrator import Calibrator
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.carried import Parts
from driftlens.engine.forward_order import Lane, calibrate, calibrate_side_by_side
from driftlens.engine.pool import Attachment
from driftlens.engine.problems import ClosedForm, Layerwise
from driftlens.engine.training import (
    JointTrainer,
    LayerTrainer,
    Trainer,
    WeightTrainer,
    train_attachments,
    train_weights,
)
from driftlens.jobs.calibrate.variants import with_parameters
from driftlens.jobs.contest.contest import Outcome
from driftlens.jobs.contest.judge import LANE
from driftlens.jobs.study.study import Study
from driftlens.models.chain import ParameterKey

T = TypeVar("T")
Sites = Mapping[int, Sequence[str]]


class Fit(NamedTuple):
    """One calibration to try: with these settings, on these of the parts of the samples."""

    calibrator: Calibrator
    parts: frozenset[int]


@dataclass(frozen=True)
class Trials:
    """Where calibrations are tried.

    Attributes:
        study: models and settings; its pool gains a model called `LANE`, which changes with every fit.
        samples: of which fits read some, by task.
        parts: by task the positions of the samples of every part.
        sites: kinds of parameters that a calibrator updates -> layer index -> names of the sites that it calibrates.
        reporter: told of every layer and every fit; may cancel.
        phase: what progress events are called.
        spill: folder for features beyond the budget.
        seed: what a trained calibrator draws from.
        begin: told of fits that walk together before they do.
    """

    study: Study
    samples: Mapping[str, SampleSet]
    parts: Mapping[str, Sequence[Sequence[int]]]
    sites: Callable[[Collection[str]], Sites]
    reporter: Reporter
    phase: str
    spill: Path | None = None
    seed: int = 0
    begin: Callable[[Sequence[Fit]], None] = lambda fits: None

    def outcomes(self, fits: Sequence[Fit], measure: Callable[[Fit], T]) -> Iterator[tuple[Fit, Outcome[T]]]:
        """Every fit with what is measured of it while the pool has its model, as soon as it is known.

        Those that walk alone come first, then those that walk together, in their order. Where one of the latter can't
        be solved for, all that are left walk alone.

        Raises:
            NumericsError: features of fits that walk together are NaN or infinite.
            Cancelled: somebody asked to stop.
        """
        together: dict[tuple[str, ...], list[Fit]] = {}
        for fit in fits:
            if isinstance(fit.calibrator, Layerwise):
                together.setdefault(tuple(fit.calibrator.update), []).append(fit)
                continue
            self.begin([fit])
            try:
                seconds = self._walked_alone(fit)
                yield fit, Outcome(measure(fit), seconds)
            except (DataError, NumericsError) as error:
                yield fit, Outcome(error=error)
        for update, group in together.items():
            self.begin(group)
            yield from self._side_by_side(group, self.sites(update), measure)

    def _side_by_side(
        self, fits: Sequence[Fit], sites: Sites, measure: Callable[[Fit], T]
    ) -> Iterator[tuple[Fit, Outcome[T]]]:
        left = list(fits)
        try:
            for seconds in self._walked_together(fits, sites):
                outcome = Outcome(measure(left[0]), seconds)
                yield left.pop(0), outcome
        except SingularGramError as error:  # without a word on whose
            if len(left) == 1:
                yield left[0], Outcome(error=error)
            else:
                for fit in left:
                    yield from self._side_by_side([fit], sites, measure)

    @cached_property
    def _sample_parts(self) -> Parts:
        return {
            task: [part_of(self.samples[task], positions) for positions in parts]
            for task, parts in self.parts.items()
        }

    def _samples_of(self, fit: Fit) -> dict[str, SampleSet]:
        """What a fit reads that walks alone, in the order of the samples."""
        return {
            task: part_of(self.samples[task], sorted(at for part in fit.parts for at in parts[part]))
            for task, parts in self.parts.items()
        }

    def _walked_alone(self, fit: Fit) -> float:
        """The seconds that a fit took; the study's pool has its model then."""
        if isinstance(fit.calibrator, Trainer):
            return self._trained(self._samples_of(fit), fit.calibrator)
        assert isinstance(fit.calibrator, ClosedForm)
        return self._solved(self._samples_of(fit), fit.calibrator, self.sites(fit.calibrator.update))

    def _trained(self, samples: Mapping[str, SampleSet], trainer: Trainer) -> float:
        pool, started = self.study.pool, time.perf_counter()
        total = len(samples) * len(trainer.boundaries(len(pool.chain.layers)))
        attached: dict[tuple[str, int], Attachment] = {}
        parts = {task: [at] for task, at in samples.items()}
        given: dict[str, Any] = {
            "seed": self.seed,
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
        return seconds

    def _solved(self, samples: Mapping[str, SampleSet], calibrator: ClosedForm, sites: Sites) -> float:
        pool, last, updates = self.study.pool, max(sites, default=0), dict[ParameterKey, Tensor]()
        seconds, steps = 0.0, LayerSteps(last)
        for layer in calibrate(
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
            updates |= {(layer.layer, name): value for name, value in layer.updates.items()}
            seconds += layer.seconds
        pool.add(LANE, with_parameters(pool.chain, pool.source("merged"), self.study.like, updates))
        return seconds

    def _walked_together(self, fits: Sequence[Fit], sites: Sites) -> Iterator[float]:
        """The seconds that each fit took, while the study's pool has its model.

        Raises:
            SingularGramError: one of those that walk together can't be solved for.
        """
        pool, budget = self.study.pool, self.study.settings.feature_budget
        size = max(1, budget // self._bytes_of_one(sites))
        last, num_groups = max(sites), -(-len(fits) // size)
        total = num_groups * last + len(fits)
        for group, first in enumerate(range(0, len(fits), size)):
            done = group * last + first
            lanes = [Lane(fit.calibrator, fit.parts) for fit in fits[first : first + size]]  # type: ignore[arg-type]
            updates: list[dict[ParameterKey, Tensor]] = [{} for _ in lanes]
            seconds = [0.0] * len(lanes)
            for layers in calibrate_side_by_side(
                pool,
                self._sample_parts,
                lanes,
                sites=sites,
                base="base" if self.study.has_base else None,
                feature_budget=budget,
                spill=self.spill,
                team=self.study.team,
                on_step=lambda layer, task, done=done: self.reporter.step(  # type: ignore[misc]
                    self.phase, done + max(0, layer - 1), total, f"layer {layer} of {last}, task {task}"
                ),
            ):
                for index, layer in enumerate(layers):
                    updates[index] |= {(layer.layer, name): value for name, value in layer.updates.items()}
                    seconds[index] += layer.seconds
            for index, solution in enumerate(updates):
                number = first + index
                label = f"calibration {number + 1} of {len(fits)}"
                self.reporter.step(self.phase, (group + 1) * last + number, total, label)
                pool.add(LANE, with_parameters(pool.chain, pool.source("merged"), self.study.like, solution))
                yield seconds[index]
        self.reporter.step(self.phase, total, total)

    def _bytes_of_one(self, sites: Sites) -> int:
        """Bytes that one fit holds at most: its solution, and the moments of one layer in float64."""
        pool, solution, moments = self.study.pool, 0, 0
        headers = pool.source("merged").headers
        for layer in pool.chain.layers:
            shapes = [
                torch.Size(slot.shape(headers[slot.key].shape))
                for name, slot in layer.parameters.items()
                if name.rpartition(".")[0] in sites.get(layer.index, ())
            ]
            solution += sum(shape.numel() for shape in shapes) * pool.dtype.itemsize
            # A Gram matrix, its sum over tasks and its factor; likewise the cross moments.
            here = sum(3 * shape[-1] ** 2 + 2 * shape.numel() for shape in shapes if len(shape) == 2)
            moments = max(moments, 8 * here)
        return solution + moments
