"""Calibrations tried on parts of the calibration samples: settings in, measurements out, and no model is kept.

Those that can walk together do so, in groups that fit into memory; then one calibrated model at a time is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.base.errors import DataError, NumericsError, SingularGramError
from driftlens.base.progress import Reporter
from driftlens.base.variants import expert_of
from driftlens.calibration.calibrator import Calibrator
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.attached import Attachment
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.snapshot import calibrate_side_by_side
from driftlens.engine.walk import Parts
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.calibrate.variants import with_parameters
from driftlens.jobs.contest.contest import Outcome
from driftlens.jobs.study.study import Study
from driftlens.models.chain import ParameterKey
from driftlens.models.heads import ScoreMap

T = TypeVar("T")

LANE = "lane"
"""Name in the study's pool of the calibrated model at hand: the merged model with other weights."""


@dataclass(frozen=True)
class Judge:
    """How near models are to the experts on given samples, sample by sample; lower is better, and no label is read.

    What counts is the divergence of the expert's class probabilities from the model's, each through its own score map,
    and the relative final drift only where a task has no score map. Over 27 settings of four real tasks
    (docs/benchmarks.md) held-out divergence ranked the settings nearly as test accuracy did, Spearman -0.91; relative
    drift did worse, -0.52, because it favours targets with more of the expert (alpha 0.6) that class decisions don't
    gain from. Nats and relative drift have no common mean, so relative drift is what counts for all tasks as soon as
    one of them lacks a score map.
    """

    study: Study

    @property
    def bare(self) -> list[str]:
        """Tasks without a score map."""
        return [task for task, at in self.study.tasks.items() if at.head is None]

    @property
    def score(self) -> str:
        """What is compared, in words."""
        drift = f"relative final drift of all tasks, as there is no head for {', '.join(self.bare)}"
        return drift if self.bare else "KL(expert || calibrated) of class probabilities, nat"

    def __call__(self, model: str, task: str, found: Tensor, expert: Tensor) -> NDArray[np.float64]:
        """One value per sample of a task, [n], from final features of a model and of the expert, [n, d] each."""
        given, wanted = self._head(model, task), self.study.head(task, expert_of(task))
        if self.bare or given is None or wanted is None:
            return drift_scores(found, expert).cpu().numpy()
        return divergences(found, given, expert, wanted).cpu().numpy()

    def _head(self, model: str, task: str) -> ScoreMap | None:
        at = self.study.tasks[task]
        own = at.own_heads.get("merged" if model == LANE else model, at.head)
        return self.study.pool.score_map(own, model)


@dataclass(frozen=True)
class HeldOut(Generic[T]):
    """Samples on which models are measured that were made without them; experts are run once.

    `measure` gets a model, a task, and final features of model and expert, [n, d]; `watch` hears before any are taken.
    """

    study: Study
    samples: Mapping[str, SampleSet]
    measure: Callable[[str, str, Tensor, Tensor], T]
    watch: Callable[[str, str], None] = lambda task, model: None

    @torch.no_grad()
    def of(self, model: str) -> dict[str, T]:
        """What is measured of a model, by task."""

        def measured(task: str) -> T:
            expert = self.expert(task)
            return self.measure(model, task, self._features(model, task), expert)

        return self.study.team.each(list(self.samples), measured)

    def expert(self, task: str) -> Tensor:
        """The expert's final features, which are taken once."""
        if task not in self._experts:
            self._experts[task] = self._features(expert_of(task), task)
        return self._experts[task]

    @cached_property
    def _experts(self) -> dict[str, Tensor]:
        return {}

    def _features(self, model: str, task: str) -> Tensor:
        self.watch(task, model)
        return final_features(self.study.pool, model, task, self.samples[task], self.study.settings.pool)


def drift_scores(found: Tensor, expert: Tensor) -> Tensor:
    """Norms of final drift, [n], against the mean norm of the expert's features: their mean is `drift_rel`."""
    sizes = torch.linalg.vector_norm(expert, dim=1).double()
    return torch.linalg.vector_norm(found - expert, dim=1).double() / sizes.mean()


def divergences(found: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """KL(expert || model) of each sample's class probabilities, [n], in nat; no label is needed."""
    wanted = F.log_softmax(expert_head.scores(expert).double(), dim=1)
    given = F.log_softmax(head.scores(found).double(), dim=1)
    return (wanted.exp() * (wanted - given)).sum(dim=1)


Sites = Mapping[int, Sequence[str]]


class Fit(NamedTuple):
    """One calibration to try: with these settings, on these of the parts of the samples."""

    calibrator: Calibrator
    parts: frozenset[int]


@dataclass(frozen=True)
class Trials:
    """Where calibrations are tried: on some `parts` of the samples, by the positions of each.

    The study's pool gains a model called `LANE`, which changes with every fit. `sites` says what a calibrator that
    updates some kinds of parameters calibrates; `begin` is told of fits that walk together before they do.
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
        """
        together: dict[tuple[str, ...], list[Fit]] = {}
        for fit in fits:
            if fit.calibrator.lane() is not None:
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
        pool, updates = self.study.pool, dict[ParameterKey, Tensor]()
        attached: dict[tuple[str, int], Attachment] = {}
        sites = self.sites(fit.calibrator.update) if fit.calibrator.takes_sites else {}
        parts, started = (
            {task: [samples] for task, samples in self._samples_of(fit).items()},
            time.perf_counter(),
        )
        for layer in fit.calibrator.calibrate(self.ground(parts, sites)):
            updates |= {(layer.layer, name): value for name, value in layer.updates.items()}
            attached |= {(task, layer.layer): each for task, each in layer.attachments.items()}
        seconds, source = time.perf_counter() - started, pool.source("merged")
        if updates:
            source = with_parameters(pool.chain, source, self.study.like, updates)
        pool.add(LANE, source, attached)
        return seconds

    def ground(self, parts: Parts, sites: Sites) -> Ground:
        """What a walk over these parts of samples is done on."""

        def step(now: Step) -> None:
            metrics = {} if now.loss is None else {"loss": now.loss}
            self.reporter.step(self.phase, now.done, now.total, now.label, **metrics)

        settings = self.study.settings
        return Ground(
            self.study.pool,
            parts,
            sites,
            base="base" if self.study.has_base else None,
            objectives=False,
            feature_budget=settings.feature_budget,
            spill=self.spill,
            pooling=settings.pool,
            team=self.study.team,
            seed=self.seed,
            on_step=step,
        )

    def _walked_together(self, fits: Sequence[Fit], sites: Sites) -> Iterator[float]:
        """The seconds that each fit took, while the study's pool has its model."""
        pool, budget = self.study.pool, self.study.settings.feature_budget
        size = max(1, budget // self._bytes_of_one(sites))
        last, num_groups = max(sites), -(-len(fits) // size)
        total = num_groups * last + len(fits)
        for group, first in enumerate(range(0, len(fits), size)):
            done = group * last + first
            walking = (fit.calibrator.lane(fit.parts) for fit in fits[first : first + size])
            lanes = [lane for lane in walking if lane is not None]
            updates: list[dict[ParameterKey, Tensor]] = [{} for _ in lanes]
            seconds = [0.0] * len(lanes)

            def step(now: Step, done: int = done) -> None:
                self.reporter.step(self.phase, done + now.done, total, now.label)

            ground = replace(self.ground(self._sample_parts, sites), on_step=step)
            for layers in calibrate_side_by_side(ground, lanes):
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
