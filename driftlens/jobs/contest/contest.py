"""One contest: candidates are tried in turn or side by side, and each that is finished is kept before the next one.

The arena, comparisons of merges, sweeps and `--auto` differ in what a candidate is, in how some of them are tried (an
`Attempts`) and in where what became of them is kept (a `Ledger`); what was stopped goes on with those that are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.base.devices import wide
from driftlens.base.errors import (
    Cancelled,
    DataError,
    DriftLensError,
    NumericsError,
    RunError,
    SingularGramError,
    SpecError,
)
from driftlens.base.intervals import Interval, mean_interval
from driftlens.base.progress import Reporter
from driftlens.base.settings import resolve
from driftlens.base.team import ALONE, Team
from driftlens.base.variants import expert_of
from driftlens.calibration.calibrator import Calibrator
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.attached import Attachment
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.snapshot import calibrate_side_by_side
from driftlens.engine.walk import Parts
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.calibrate.variants import with_parameters
from driftlens.jobs.study.reopening import Kept
from driftlens.jobs.study.study import Study
from driftlens.linalg.gram import solve_bytes
from driftlens.linalg.state import lengths
from driftlens.models.chain import ParameterKey
from driftlens.models.heads import ScoreMap

C = TypeVar("C")
T = TypeVar("T")
Asked = TypeVar("Asked", contravariant=True)
Known = TypeVar("Known", covariant=True)


class Candidate(NamedTuple):
    """What was asked for by a method and settings over the published ones, and what it is called."""

    name: str
    method: str
    settings: Mapping[str, object]


def candidates(
    asked: Sequence[tuple[str, Mapping[str, object]]],
    every: Iterable[str],
    owner_of: Callable[[str], Callable[..., Any]],
    name_of: Callable[[str, Mapping[str, object]], str],
    *,
    kind: str = "",
    beside: Collection[str] = (),
) -> list[Candidate]:
    """The candidates asked for by method and settings, `all` being every method; no file is opened.

    Settings called as those `beside` are none of the method's, and stay as they are given.
    """
    expanded = [
        (method, settings)
        for name, settings in asked
        for method in (sorted(every) if name == "all" and not settings else (name,))
    ]
    by_name: dict[str, Candidate] = {}
    for method, settings in expanded:
        values = {key: value for key, value in settings.items() if key not in beside}
        resolved = {**settings, **resolve(owner_of(method), values, f"{kind} {method!r}" if kind else method)}
        # YAML reads `off` as false; a name says what the method reads.
        named = {key: resolved[key] if isinstance(value, bool) else value for key, value in settings.items()}
        name = name_of(method, named)
        if name in by_name:
            raise SpecError(f"{name} is asked for twice", hint="Name every candidate once.")
        by_name[name] = Candidate(name, method, settings)
    return list(by_name.values())


@dataclass(frozen=True)
class Outcome(Generic[Known]):
    """What became of one candidate: what was measured of it, in how many seconds it was made, or why it can't be."""

    value: Known | None = None
    seconds: float = 0.0
    error: DriftLensError | None = None


Attempts = Callable[[Sequence[C]], Iterable[tuple[C, Outcome[T]]]]
"""Tries some candidates, and gives each with what became of it as soon as that is known, in any order."""


class Ledger(Protocol[Asked, T]):
    """Where outcomes are kept beyond the end of the process."""

    def read(self, candidate: Asked) -> Outcome[T] | None:
        """What an earlier sitting has kept of a candidate; None where it is still to be tried."""
        ...

    def write(self, candidate: Asked, outcome: Outcome[T]) -> None:
        """Keep what became of a candidate, whole or not at all."""
        ...


Scored = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""Numbers of one candidate by two names, for example a fold and a task; one per sample."""


class KeptScores(Generic[Asked]):
    """A `Ledger` of numbers in a folder, which the first process writes; a candidate is known again by a name."""

    def __init__(self, kept: Kept, name_of: Callable[[Asked], str], team: Team = ALONE) -> None:
        self._kept, self._name_of, self._team = kept, name_of, team
        self._started = time.perf_counter() - team.once(lambda: kept.seconds)

    @property
    def seconds(self) -> float:
        """What the work took until now, over all sittings."""
        return time.perf_counter() - self._started

    def read(self, candidate: Asked) -> Outcome[Scored] | None:
        """As of a `Ledger`."""
        tensors = self._team.once(lambda: self._kept.read(self._name_of(candidate)))
        if not tensors:
            return None
        value, seconds = dict[str, dict[str, NDArray[np.float64]]](), float(tensors.pop(_SECONDS))
        for name, tensor in tensors.items():
            outer, inner = json.loads(name)
            value.setdefault(outer, {})[inner] = tensor.numpy()
        return Outcome(value, seconds)

    def write(self, candidate: Asked, outcome: Outcome[Scored]) -> None:
        """As of a `Ledger`."""
        assert outcome.value is not None
        if self._team.leads:
            tensors = {
                json.dumps([outer, inner]): torch.from_numpy(numbers)
                for outer, by_name in outcome.value.items()
                for inner, numbers in by_name.items()
            }
            tensors[_SECONDS] = torch.tensor(outcome.seconds, dtype=torch.float64)
            self._kept.write(self._name_of(candidate), tensors, self.seconds)


_SECONDS = "seconds"


def contest(
    entered: Iterable[C], attempts: Attempts[C, T], ledger: Ledger[C, T] | None = None
) -> Iterator[tuple[C, Outcome[T]]]:
    """Every candidate with what became of it: first those that are kept, then the others, each kept when it is known.

    What failed is not kept: a later sitting tries it once more, for the reason may be gone. Without a ledger the
    attempts know by themselves what is there.
    """
    missing = []
    for candidate in entered:
        outcome = None if ledger is None else ledger.read(candidate)
        if outcome is None:
            missing.append(candidate)
        else:
            yield candidate, outcome
    for candidate, outcome in attempts(missing) if missing else ():
        if ledger is not None and outcome.error is None:
            ledger.write(candidate, outcome)
        yield candidate, outcome


def one_by_one(attempt: Callable[[C], Outcome[T]], team: Team = ALONE) -> Attempts[C, T]:
    """Attempts at one candidate after the other, in which one that can't be made leaves the others alone."""

    def attempts(entered: Sequence[C]) -> Iterator[tuple[C, Outcome[T]]]:
        for candidate in entered:
            outcome: Outcome[T]
            try:
                outcome = attempt(candidate)
            except (Cancelled, RunError):  # the job's own trouble, which all candidates share
                raise
            except DriftLensError as error:
                if not team.agrees(error):
                    raise
                outcome = Outcome(error=error)
            yield candidate, outcome

    return attempts


def require_any(outcomes: Iterable[Outcome[Any]]) -> None:
    """Refuse to go on where every candidate failed."""
    errors = [outcome.error for outcome in outcomes]
    if errors and None not in errors:
        raise next(error for error in errors if error is not None)


LANE = "lane"
"""Name in the study's pool of the calibrated model at hand: the merged model with other weights."""


@dataclass(frozen=True)
class Judge:
    """How near models are to the experts on given samples, sample by sample; lower is better, and no label is read.

    What counts is the Hellinger distance of the model's class probabilities from the expert's, each through its own
    score map, and the relative final drift only where a task has no score map. It ranks models as the divergence does
    (docs/benchmarks.md), and as it is at most 1, no few samples make up most of mean and variance. Over 27 settings of
    four real tasks the divergence ranked nearly as test accuracy did, Spearman -0.91; relative drift did worse, -0.52,
    because it favours targets with more of the expert (alpha 0.6) that class decisions don't gain from. The two have no
    common mean, so relative drift is what counts for all tasks as soon as one of them lacks a score map.
    """

    study: Study

    @property
    def bare(self) -> list[str]:
        """Tasks without a score map."""
        return [task for task, data in self.study.tasks.items() if data.head is None]

    @property
    def score(self) -> str:
        """What is compared, in words."""
        if self.bare:
            return f"relative final drift of all tasks, as there is no head for {', '.join(self.bare)}"
        return "Hellinger distance of class probabilities from the expert's"

    @property
    def measure(self) -> Literal["hellinger", "drift_rel"]:
        """The same, as records call it."""
        return "drift_rel" if self.bare else "hellinger"

    def __call__(self, model: str, task: str, features: Tensor, expert: Tensor) -> NDArray[np.float64]:
        """One value per sample of a task, [n], from final features of a model and of the expert, [n, d] each."""
        if self.bare:
            return drift_scores(features, expert).cpu().numpy()
        return self._by(distances, model, task, features, expert)

    def with_drift(
        self, model: str, task: str, features: Tensor, expert: Tensor
    ) -> dict[str, NDArray[np.float64]]:
        """The `score` of every sample, [n], and its relative final drift as `drift`."""
        drift = drift_scores(features, expert).cpu().numpy()
        return {"score": self(model, task, features, expert), "drift": drift}

    def divergence(self, model: str, task: str, features: Tensor, expert: Tensor) -> NDArray[np.float64]:
        """KL(expert || model) of every sample, [n], in nat, which decides nothing; every task has a head."""
        return self._by(divergences, model, task, features, expert)

    def _by(
        self,
        measure: Callable[[Tensor, ScoreMap, Tensor, ScoreMap], Tensor],
        model: str,
        task: str,
        features: Tensor,
        expert: Tensor,
    ) -> NDArray[np.float64]:
        data = self.study.tasks[task]
        head = data.own_heads.get("merged" if model == LANE else model, data.head)
        score_map, expert_map = self.study.pool.score_map(head, model), self.study.head(task, expert_of(task))
        assert score_map is not None and expert_map is not None
        return measure(features, score_map, expert, expert_map).cpu().numpy()


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


def drift_scores(features: Tensor, expert: Tensor) -> Tensor:
    """Norms of final drift, [n], against the mean norm of the expert's features: their mean is `drift_rel`."""
    sizes = wide(lengths(expert))
    return wide(lengths(features - expert)) / sizes.mean()


def divergences(features: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """KL(expert || model) of each sample's class probabilities, [n], in nat; no label is needed."""
    expert_log = F.log_softmax(wide(expert_head.scores(expert)), dim=1)
    model_log = F.log_softmax(wide(head.scores(features)), dim=1)
    return (expert_log.exp() * (expert_log - model_log)).sum(dim=1)


def distances(features: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """Hellinger distance of each sample's class probabilities from the expert's, [n], 0 to 1; no label is needed."""
    roots = [
        (F.log_softmax(wide(score_map.scores(final)), dim=1) / 2).exp()
        for score_map, final in ((expert_head, expert), (head, features))
    ]
    return ((roots[0] - roots[1]).square().sum(dim=1) / 2).sqrt()


def over_samples(values: NDArray[np.float64]) -> Interval:
    """The mean of numbers of samples, [n], with its interval."""
    return mean_interval(float(values.mean()), float(values.std()), len(values))


Sites = Mapping[int, Sequence[str]]


class Fit(NamedTuple):
    """One calibration to try: with these settings, on these of the parts of the samples."""

    calibrator: Calibrator
    parts: frozenset[int]


def unlabelled(study: Study) -> dict[str, SampleSet]:
    """The calibration samples by task, without labels, which no choice may see; refuses a task without samples."""
    samples: dict[str, SampleSet] = {}
    for task, data in study.tasks.items():
        if data.calibration is None:
            raise DataError(f"task {task} has no calibration samples")
        samples[task] = replace(data.calibration, labels=None)
    return samples


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
        waiting = list(fits)
        try:
            for seconds in self._walked_together(fits, sites):
                outcome = Outcome(measure(waiting[0]), seconds)
                yield waiting.pop(0), outcome
        except SingularGramError as error:  # without a word on whose
            if len(waiting) == 1:
                yield waiting[0], Outcome(error=error)
            else:
                for fit in waiting:
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
            task: part_of(self.samples[task], sorted(index for part in fit.parts for index in parts[part]))
            for task, parts in self.parts.items()
        }

    def _walked_alone(self, fit: Fit) -> float:
        """The seconds that a fit took; the study's pool has its model then."""
        pool, updates = self.study.pool, dict[ParameterKey, Tensor]()
        attached: dict[str, Attachment] = {}
        sites = self.sites(fit.calibrator.update) if fit.calibrator.takes_sites else {}
        parts: Parts = {task: [samples] for task, samples in self._samples_of(fit).items()}
        started = time.perf_counter()
        for layer in fit.calibrator.calibrate(self.ground(parts, sites)):
            updates |= {(layer.layer, name): value for name, value in layer.updates.items()}
            attached |= layer.attachments
        seconds, source = time.perf_counter() - started, pool.source("merged")
        if updates:
            source = with_parameters(pool.chain, source, self.study.like, updates)
        pool.add(LANE, source, attached)
        return seconds

    def ground(self, parts: Parts, sites: Sites) -> Ground:
        """What a walk over these parts of samples is done on."""

        def step(progress: Step) -> None:
            metrics = {} if progress.loss is None else {"loss": progress.loss}
            self.reporter.step(self.phase, progress.done, progress.total, progress.label, **metrics)

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
            like=self.study.like,
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

            def step(progress: Step, done: int = done) -> None:
                self.reporter.step(self.phase, done + progress.done, total, progress.label)

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
            moments = max(moments, sum(solve_bytes(*shape) for shape in shapes if len(shape) == 2))
        return solution + moments
