"""What `--auto`, sweeps and comparisons of merges share: named methods, held-out scores, repeated calibrations."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.calibrating import CalibrationContext, ExpertFeatures, Step
from driftlens.engine.pool import Attachment
from driftlens.experiment.resume import seconds_in
from driftlens.experiment.study import Study
from driftlens.linalg.state import lengths
from driftlens.models.chain import ParameterKey
from driftlens.models.heads import ScoreMap
from driftlens.models.saving import save_state_dict
from driftlens.pipelines.calibration_plan import with_parameters
from driftlens.pipelines.evaluation import final_features
from driftlens.utils.devices import memory, wide
from driftlens.utils.distributed import ALONE, Team
from driftlens.utils.errors import Cancelled, CheckpointError, DriftLensError, RunError
from driftlens.utils.intervals import Interval, mean_interval
from driftlens.utils.progress import Reporter
from driftlens.utils.registry import resolve
from driftlens.utils.variants import expert_of

T = TypeVar("T")

Values = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""Scores of a model by task and measure, `hellinger` or `drift_rel`, one per sample."""

LANE = "lane"
"""Name in the study's pool of the candidate that is being scored."""


class NamedMethod(NamedTuple):
    """A method with settings over the published ones, and the name that its results have."""

    name: str
    method: str
    settings: Mapping[str, object]


def named_methods(
    asked: Sequence[tuple[str, Mapping[str, object]]],
    every: Iterable[str],
    owner_of: Callable[[str], Callable[..., Any]],
    name_of: Callable[[str, Mapping[str, object]], str],
    *,
    kind: str = "",
    beside: Collection[str] = (),
) -> list[NamedMethod]:
    """Return the methods that are asked for, each once; no file is opened.

    Args:
        asked: methods and settings; `all` without settings is every method.
        every: the names of all methods.
        owner_of: returns the callable whose parameters are a method's settings.
        name_of: makes a name of a method and its settings.
        kind: what messages call these methods.
        beside: settings that are not the method's, and stay as they are given.
    """
    expanded = [
        (method, settings)
        for name, settings in asked
        for method in (sorted(every) if name == "all" and not settings else (name,))
    ]
    by_name: dict[str, NamedMethod] = {}
    for method, settings in expanded:
        values = {key: value for key, value in settings.items() if key not in beside}
        resolved = {**settings, **resolve(owner_of(method), values, f"{kind} {method!r}" if kind else method)}
        # YAML reads `off` as false; a name contains what the method reads.
        named = {key: resolved[key] if isinstance(value, bool) else value for key, value in settings.items()}
        name = name_of(method, named)
        by_name[name] = NamedMethod(name, method, settings)
    return list(by_name.values())


def attempt(work: Callable[[], T], team: Team = ALONE) -> T | DriftLensError:
    """Return what `work` returns, or the error that rules one candidate out and leaves the others alone.

    What all candidates share is raised: a cancelled job, a run that can't be written, and an error that only one
    process of a team meets.
    """
    try:
        return work()
    except (Cancelled, RunError):
        raise
    except DriftLensError as error:
        if not team.agrees(error):
            raise
        return error


def require_any(results: Collection[object]) -> None:
    """Raise the first error if every candidate failed."""
    errors = [result for result in results if isinstance(result, DriftLensError)]
    if errors and len(errors) == len(results):
        raise errors[0]


class ResultStore:
    """Arrays by candidate in a folder, one file each, which the main process reads and writes.

    A failure is not stored, because its reason may be gone next time.
    """

    def __init__(
        self, folder: Path, team: Team = ALONE, require_there: Callable[[], None] = lambda: None
    ) -> None:
        """Read nothing yet; `require_there` is called before every write."""
        self._folder, self._team, self._require_there = folder, team, require_there
        self._started = time.perf_counter() - team.once(lambda: seconds_in(folder))

    @property
    def seconds(self) -> float:
        """Seconds of work until now, over all sittings."""
        return time.perf_counter() - self._started

    def read(self, name: str) -> dict[str, NDArray[np.float64]]:
        """Return what an earlier sitting has stored; nothing where there is none, or the file is damaged."""

        def stored() -> dict[str, NDArray[np.float64]]:
            try:
                source = open_checkpoint(self._file(name))
                return {key: source.read(key).clone().numpy() for key in source.headers}
            except CheckpointError:  # it is computed anew and replaces that file
                return {}

        return self._team.once(lambda: stored() if self._file(name).is_file() else {})

    def write(self, name: str, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Store arrays with the time that all work took until now."""
        if self._team.is_main:
            self._require_there()
            self._folder.mkdir(exist_ok=True)
            tensors = {key: torch.from_numpy(array).contiguous() for key, array in arrays.items()}
            save_state_dict(self._file(name), tensors, {"seconds": repr(self.seconds)})

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class HeldOutScorer:
    """Score models by how near they are to the experts, sample by sample; lower is better, and no label is read.

    What counts is the Hellinger distance of the model's class probabilities from the expert's, each through its own
    score map, and the relative final drift only where a task has no score map. It ranks models as the divergence does
    (docs/benchmarks.md), and as it is at most 1, no few samples make up most of mean and variance. Over 27 settings of
    four real tasks the divergence ranked nearly as test accuracy did, Spearman -0.91; relative drift did worse, -0.52,
    because it favours targets with more of the expert (alpha 0.6) that class decisions don't gain from. The two have no
    common mean, so relative drift is what counts for all tasks as soon as one of them lacks a score map.

    Attributes:
        study: the models, by their names in its pool.
        samples: by task, samples that the models were made without; experts are run once on them.
        watch: called with task and model before final features are computed.
    """

    study: Study
    samples: Mapping[str, SampleSet]
    watch: Callable[[str, str], None] = lambda task, model: None

    @property
    def without_head(self) -> list[str]:
        """Tasks without a score map."""
        return [task for task, data in self.study.tasks.items() if data.head is None]

    @property
    def measure(self) -> Literal["hellinger", "drift_rel"]:
        """The measure that models are compared by, as records call it."""
        return "drift_rel" if self.without_head else "hellinger"

    def of(self, model: str, positions: Mapping[str, Sequence[int]] | None = None) -> Values:
        """Return both measures of a model by task, on all samples or on those at some positions."""

        def scores(task: str, features: Tensor, expert: Tensor) -> dict[str, NDArray[np.float64]]:
            values = {"drift_rel": drift_scores(features, expert)}
            if not self.without_head:
                values["hellinger"] = self.by_class(distances, model, task, features, expert)
            return {name: value.cpu().numpy() for name, value in values.items()}

        return self.measured(model, scores, positions)

    @torch.no_grad()
    def measured(
        self,
        model: str,
        measure: Callable[[str, Tensor, Tensor], T],
        positions: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, T]:
        """Return what `measure` returns of a task, and of final features of model and expert, [n, d], by task."""

        def measured(task: str) -> T:
            expert, samples = self.expert(task), self.samples[task]
            if positions is not None:
                expert, samples = expert[list(positions[task])], part_of(samples, positions[task])
            return measure(task, self._features(model, samples), expert)

        return self.study.team.each(list(self.samples), measured)

    def by_class(
        self,
        measure: Callable[[Tensor, ScoreMap, Tensor, ScoreMap], Tensor],
        model: str,
        task: str,
        features: Tensor,
        expert: Tensor,
    ) -> Tensor:
        """Return a measure of class probabilities, [n].

        Args:
            measure: `distances` or `divergences`.
            model: whose score map reads the features.
            task: a task with a score map.
            features: final features of the model, [n, d].
            expert: those of the expert, [n, d].
        """
        data = self.study.tasks[task]
        head = data.own_heads.get("merged" if model == LANE else model, data.head)
        score_map, expert_map = self.study.pool.score_map(head, model), self.study.head(task, expert_of(task))
        assert score_map is not None and expert_map is not None
        return measure(features, score_map, expert, expert_map)

    def expert(self, task: str) -> Tensor:
        """Return the expert's final features, which are computed once."""
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
    """Return norms of final drift, [n], against the mean norm of the expert's features: their mean is `drift_rel`."""
    sizes = wide(lengths(expert))
    return wide(lengths(features - expert)) / sizes.mean()


def divergences(features: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """Return KL(expert || model) of each sample's class probabilities, [n], in nat; no label is needed."""
    expert_log = F.log_softmax(wide(expert_head.scores(expert)), dim=1)
    model_log = F.log_softmax(wide(head.scores(features)), dim=1)
    return (expert_log.exp() * (expert_log - model_log)).sum(dim=1)


def distances(features: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """Return the Hellinger distance of each sample's class probabilities from the expert's, [n], 0 to 1."""
    roots = [
        (F.log_softmax(wide(score_map.scores(final)), dim=1) / 2).exp()
        for score_map, final in ((expert_head, expert), (head, features))
    ]
    return ((roots[0] - roots[1]).square().sum(dim=1) / 2).sqrt()


def over_samples(values: NDArray[np.float64]) -> Interval:
    """Return the mean of numbers of samples, [n], with its interval."""
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
        """End the current part, and begin one that takes so much effort."""
        self._reached, self._effort = self._reached + self._effort, effort
        self._name = name

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """Report a step of the current part, see `Reporter.step`."""
        reached = self._reached + self._effort * done / (total or 1)
        named = f"{self._name}, {label}" if label else self._name
        self._reporter.step(phase, round(100 * reached), round(100 * self._total), named, **metrics)

    def finish(self, phase: str) -> None:
        """Report the end, whether all parts succeeded or not."""
        total = round(100 * self._total)
        self._reporter.step(phase, total, total)


@dataclass(frozen=True)
class Fitting:
    """Calibrates a study's merged model again and again; each model replaces the last one in the pool.

    Attributes:
        study: the models; its pool gains one called `LANE`.
        sites: returns the sites to calibrate, by the kinds of parameters that a calibrator updates.
        spill: folder for features beyond the feature budget.
        seed: of everything that is sampled while a calibrator is fitted.
    """

    study: Study
    sites: Callable[[Collection[str]], Mapping[int, Sequence[str]]]
    reporter: Reporter
    phase: str
    spill: Path
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
        pool, settings, updates = self.study.pool, self.study.settings, dict[ParameterKey, Tensor]()
        attached: dict[str, Attachment] = {}

        def step(progress: Step) -> None:
            metrics = {} if progress.loss is None else {"loss": progress.loss}
            self.reporter.step(self.phase, progress.done, progress.total, progress.label, **metrics)

        context = CalibrationContext(
            pool,
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
        started = time.perf_counter()
        for layer in calibrator.calibrate(context):
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
