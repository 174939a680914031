"""What `--auto`, sweeps and comparisons of merges share: one loop over candidates, and how models are judged.

A candidate is a calibration by some settings, a merge, or a model as it is. `try_each` makes and measures one after the
other; what is finished is kept, so that a job that was stopped resumes with the candidates that are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.calibration.calibrator import Calibrator
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.calibrating import ExpertFeatures, Ground, Step
from driftlens.engine.pool import Attachment
from driftlens.experiment.study import Study
from driftlens.linalg.state import lengths
from driftlens.models.chain import ParameterKey
from driftlens.models.heads import ScoreMap
from driftlens.pipelines.calibration_variants import with_parameters
from driftlens.pipelines.evaluation import final_features
from driftlens.utils.devices import memory, wide
from driftlens.utils.distributed import ALONE, Team
from driftlens.utils.errors import (
    Cancelled,
    DriftLensError,
    RunError,
)
from driftlens.utils.intervals import Interval, mean_interval
from driftlens.utils.progress import Reporter
from driftlens.utils.registry import resolve
from driftlens.utils.variants import expert_of

C = TypeVar("C")
T = TypeVar("T")
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
        by_name[name] = Candidate(name, method, settings)
    return list(by_name.values())


@dataclass(frozen=True)
class Outcome(Generic[Known]):
    """What became of one candidate: what was measured of it, in how many seconds it was made, or why it can't be."""

    value: Known | None = None
    seconds: float = 0.0
    error: DriftLensError | None = None


Scored = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""Numbers of one candidate by two names, for example a fold and a task; one per sample."""


def try_each(
    wanted: Iterable[C],
    attempt: Callable[[C], Outcome[T]],
    *,
    read: Callable[[C], Outcome[T] | None] = lambda candidate: None,
    write: Callable[[C, Outcome[T]], None] = lambda candidate, outcome: None,
    team: Team = ALONE,
) -> Iterator[tuple[C, Outcome[T]]]:
    """Yield every candidate with its outcome, in order; one that fails leaves the others alone.

    Args:
        wanted: the candidates.
        attempt: makes and measures one candidate.
        read: returns the outcome that an earlier sitting has kept, or None.
        write: keeps an outcome. A failure is not kept, because its reason may be gone next time.
        team: the processes that try the same candidates; an error that only one of them meets is raised.
    """
    for candidate in wanted:
        outcome = read(candidate)
        if outcome is None:
            try:
                outcome = attempt(candidate)
            except (Cancelled, RunError):  # the job's own trouble, which all candidates share
                raise
            except DriftLensError as error:
                if not team.agrees(error):
                    raise
                outcome = Outcome(error=error)
            else:
                write(candidate, outcome)
        yield candidate, outcome


def require_any(outcomes: Iterable[Outcome[Any]]) -> None:
    """Raise the first error where every candidate failed."""
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
    def of(self, model: str, positions: Mapping[str, Sequence[int]] | None = None) -> dict[str, T]:
        """Return what is measured of a model, by task, on all samples or on those at some positions."""

        def measured(task: str) -> T:
            expert, samples = self.expert(task), self.samples[task]
            if positions is not None:
                expert, samples = expert[list(positions[task])], part_of(samples, positions[task])
            return self.measure(model, task, self._features(model, samples), expert)

        return self.study.team.each(list(self.samples), measured)

    def expert(self, task: str) -> Tensor:
        """The expert's final features, which are taken once."""
        if task not in self._experts:
            self._experts[task] = self._features(expert_of(task), self.samples[task])
        return self._experts[task]

    @cached_property
    def _experts(self) -> dict[str, Tensor]:
        return {}

    def _features(self, model: str, samples: SampleSet) -> Tensor:
        self.watch(samples.task, model)
        return final_features(self.study.pool, model, samples.task, samples, self.study.settings.pool)


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


def unlabelled(study: Study) -> dict[str, SampleSet]:
    """Return the calibration samples by task, without labels, which no choice may see."""
    return {task: replace(samples, labels=None) for task, samples in study.calibration_sets.items()}


class Bar(Reporter):
    """Many calibrations as one bar of `total` efforts, in hundredths of one."""

    def __init__(self, reporter: Reporter, total: float) -> None:
        self._reporter, self._total = reporter, total
        self._reached = self._effort = 0.0
        self._name = ""

    def begin(self, effort: float, name: str) -> None:
        """What is at hand is over, and something begins that takes so much effort."""
        self._reached, self._effort = self._reached + self._effort, effort
        self._name = name

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """As of a `Reporter`, of what is at hand."""
        reached = self._reached + self._effort * done / (total or 1)
        named = f"{self._name}, {label}" if label else self._name
        self._reporter.step(phase, round(100 * reached), round(100 * self._total), named, **metrics)

    def finish(self, phase: str) -> None:
        """All is done, or has failed."""
        total = round(100 * self._total)
        self._reporter.step(phase, total, total)


@dataclass(frozen=True)
class Fitting:
    """Calibrates a study's merged model again and again; each model takes the place of the last in the pool.

    Attributes:
        study: the models; its pool gains one called `LANE`.
        sites: the sites to calibrate, by the kinds of parameters that a calibrator updates.
        spill: folder for features beyond the feature budget.
        seed: of everything that is drawn while a calibrator is fitted.
    """

    study: Study
    sites: Callable[[Collection[str]], Mapping[int, Sequence[str]]]
    reporter: Reporter
    phase: str
    spill: Path | None = None
    seed: int = 0

    def fit(
        self, calibrator: Calibrator, samples: Mapping[str, SampleSet], cache: ExpertFeatures | None = None
    ) -> float:
        """Calibrate on samples, add the model to the pool as `LANE`, and return the seconds that the fit took.

        Args:
            calibrator: the calibrator with its settings.
            samples: calibration samples by task.
            cache: what earlier fits to the very same samples have computed of the experts, to be used and added to.
        """
        pool, updates = self.study.pool, dict[ParameterKey, Tensor]()
        attached: dict[str, Attachment] = {}
        started = time.perf_counter()
        for layer in calibrator.calibrate(self._ground(calibrator, samples, cache)):
            updates |= {(layer.layer, name): value for name, value in layer.updates.items()}
            attached |= layer.attachments
        seconds, source = time.perf_counter() - started, pool.source("merged")
        if updates:
            source = with_parameters(pool.chain, source, self.study.like, updates)
        pool.add(LANE, source, attached)
        return seconds

    def cache(self, among: int = 1) -> ExpertFeatures:
        """Return an empty cache within the feature budget, which so many caches share."""
        budget, free = self.study.settings.feature_budget, memory(self.study.pool.device)
        return ExpertFeatures((budget if free is None else min(budget, free[0] // 4)) // among)

    def _ground(
        self, calibrator: Calibrator, samples: Mapping[str, SampleSet], cache: ExpertFeatures | None
    ) -> Ground:
        def step(progress: Step) -> None:
            metrics = {} if progress.loss is None else {"loss": progress.loss}
            self.reporter.step(self.phase, progress.done, progress.total, progress.label, **metrics)

        settings = self.study.settings
        return Ground(
            self.study.pool,
            samples,
            self.sites(calibrator.update) if calibrator.takes_sites else {},
            base="base" if self.study.has_base else None,
            objectives=False,
            feature_budget=settings.feature_budget,
            spill=self.spill,
            pooling=settings.pool,
            team=self.study.team,
            seed=self.seed,
            like=self.study.like,
            on_step=step,
            expert_features=cache or ExpertFeatures(),
        )
