"""Model selection on held-out samples, for `calibrate --auto` (`choose_calibrator`), sweeps and merge comparisons."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.calibration.automatic import LEVEL, HeldOutScores, ModelChoice, choose_model, fold_ranges
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.checkpoints.tensor_sources import InMemorySource, InterpolatedSource, StateSource
from driftlens.config.data import Views
from driftlens.config.requests import CalibrationRequest
from driftlens.data.altered import append_views
from driftlens.data.samples import SampleSet, select_samples, sort_by_length
from driftlens.engine.calibrating import CalibrationProgress
from driftlens.engine.pool import Attachment
from driftlens.engine.sites import ExpertFeatureCache, select_sites, sites_to_update
from driftlens.experiment.merging import merge_study
from driftlens.experiment.study import Study
from driftlens.linalg.state import row_norms
from driftlens.merging.method import MergeConfig, merge_by_name
from driftlens.models.chain import ParameterKey
from driftlens.models.heads import ScoreMap
from driftlens.pipelines.calibration_plan import (
    calibration_context,
    matching_preset,
    registered_method,
    replace_parameters,
    settings_as_json,
)
from driftlens.pipelines.evaluation import final_features
from driftlens.runs.manifest import CalibrationInfo
from driftlens.utils.devices import device_memory, to_float64
from driftlens.utils.distributed import ALONE, ProcessGroup, ProgressReporter
from driftlens.utils.errors import Cancelled, DataError, DriftLensError, RunError, SpecError, pluralize
from driftlens.utils.files import temporary_folder
from driftlens.utils.intervals import Interval, mean_interval, mean_over_tasks
from driftlens.utils.registry import resolve_settings
from driftlens.utils.variants import expert_name

T = TypeVar("T")

# Scores of a model by task and measure, `disagreement` or `drift_rel`, one per sample.
Values = Mapping[str, Mapping[str, NDArray[np.float64]]]

# Name in the study's pool of the model that is being scored.
CANDIDATE_MODEL = "candidate"
_PHASE = "choose"
# Interpolation factors between the base, 0, and a model, 1.
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
# Candidates are made from one half of the samples and judged on the other.
_NUM_PARTS = 2
# Other merges of the same experts that are compared, with their default settings.
_MERGES = ("average",)
# Cost of scoring a model at all interpolation factors on half of the samples, in FeatCal calibrations.
_SCORING_COST = 0.35
# Samples per task from which three views are as good as seven.
_MANY_SAMPLES = 32
# Seed of copies for judging, other than the default of calibrations.
_JUDGING_SEED = 1
_UNCHANGED = {"merged": "the unchanged merged model", "base": "the base"}


class NamedMethod(NamedTuple):
    """A merge or calibration method with its settings, and the name of its results."""

    name: str
    method: str
    settings: Mapping[str, object]


def expand_methods(
    requested: Sequence[tuple[str, Mapping[str, object]]],
    every: Iterable[str],
    named: Callable[[str, Mapping[str, object]], NamedMethod],
) -> list[NamedMethod]:
    """Return the requested methods without duplicates; `all` expands to every method.

    Args:
        requested: methods and settings.
        every: the names of all methods.
        named: checks a method and its settings, and names its results.
    """
    methods = [
        named(method, settings)
        for name, settings in requested
        for method in (sorted(every) if name == "all" and not settings else [name])
    ]
    return list({method.name: method for method in methods}.values())


def settings_for_name(settings: Mapping[str, object], resolved: Mapping[str, object]) -> dict[str, object]:
    """Return settings as used in a method's name; booleans show the value that the method receives."""
    return {key: resolved[key] if isinstance(value, bool) else value for key, value in settings.items()}


def result_or_error(work: Callable[[], T], team: ProcessGroup = ALONE) -> T | DriftLensError:
    """Return the result of `work`, or its error if only this candidate failed; other errors are raised."""
    try:
        return work()
    except (Cancelled, RunError):
        raise
    except DriftLensError as error:
        if not team.is_raised_on_all(error):
            raise
        return error


def require_one_result(results: Collection[object]) -> None:
    """Raise the first error if every candidate failed."""
    errors = [result for result in results if isinstance(result, DriftLensError)]
    if errors and len(errors) == len(results):
        raise errors[0]


@dataclass(frozen=True)
class HeldOutScorer:
    """Scores models of a pool by distance from the experts without labels; lower is better.

    The score is the expected disagreement: the model's probability of all classes but the expert's most probable one.
    With augmented copies, see `samples_to_judge`, that of a sample is the mean over the sample and its copies. If any
    task has no score map, relative final drift, without copies, is the score of all tasks.
    """

    study: Study
    samples: Mapping[str, SampleSet]
    _experts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tasks_without_head(self) -> list[str]:
        """The tasks without a classification head."""
        return [task for task, data in self.study.tasks.items() if data.head is None]

    @property
    def score_name(self) -> Literal["disagreement", "drift_rel"]:
        """The score that models are compared by: expected disagreement, or relative drift without heads."""
        # Unlike distances of class probabilities, it does not ask a model to be as confident as the expert. It chose
        # best over the sub-suites of `python -m benchmarks.criteria` (docs/benchmarks.md). One measure serves all
        # tasks, because the two have no common mean.
        return "drift_rel" if self.tasks_without_head else "disagreement"

    def score_model(self, model: str) -> Values:
        """Return expected disagreement and relative drift of a model by task, per sample."""

        def _task_measures(task: str, features: Tensor, expert: Tensor) -> dict[str, NDArray[np.float64]]:
            count = len(self.samples[task].original or self.samples[task])
            values = {"drift_rel": relative_drift(features[:count], expert[:count])}
            if not self.tasks_without_head:
                found = self.class_distances(expected_disagreements, model, task, features, expert)
                values["disagreement"] = found.reshape(-1, count).mean(dim=0)
            return {name: value.cpu().numpy() for name, value in values.items()}

        return self.map_final_features(model, _task_measures)

    @torch.no_grad()
    def map_final_features(self, model: str, measure: Callable[[str, Tensor, Tensor], T]) -> dict[str, T]:
        """Apply a function to the final features of model and expert of every task; return results by task.

        Args:
            model: name in the study's pool.
            measure: called with a task, and the final features [n, d] of model and expert.
        """

        def _measure_task(task: str) -> T:
            return measure(task, self._final_features(model, self.samples[task]), self.expert_features(task))

        return self.study.team.map(list(self.samples), _measure_task)

    def class_distances(
        self,
        measure: Callable[[Tensor, ScoreMap, Tensor, ScoreMap], Tensor],
        model: str,
        task: str,
        features: Tensor,
        expert: Tensor,
    ) -> Tensor:
        """Return `expected_disagreements` or `kl_divergences` of class probabilities [n] between model and expert.

        Args:
            measure: `expected_disagreements` or `kl_divergences`.
            model: the model whose score map is applied.
            task: a task with a score map.
            features: final features of the model, [n, d].
            expert: final features of the expert, [n, d].
        """
        score_map, expert_map = self.study.head(task, model), self.study.head(task, expert_name(task))
        assert score_map is not None and expert_map is not None
        return measure(features, score_map, expert, expert_map)

    def expert_features(self, task: str) -> Tensor:
        """Return the expert's final features [n, d], computed once per task."""
        if task not in self._experts:
            self._experts[task] = self._final_features(expert_name(task), self.samples[task])
        return self._experts[task]

    def _final_features(self, model: str, samples: SampleSet) -> Tensor:
        return final_features(self.study.pool, model, samples.task, samples, self.study.settings.pool)


def relative_drift(features: Tensor, expert: Tensor) -> Tensor:
    """Return the final drift norms [n] divided by the mean norm of the expert's features."""
    return to_float64(row_norms(features - expert)) / to_float64(row_norms(expert)).mean()


def kl_divergences(features: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """Return KL(expert || model) of each sample's class probabilities in nats, [n]."""
    expert_log, model_log = _log_probabilities(expert_head, expert), _log_probabilities(head, features)
    return (expert_log.exp() * (expert_log - model_log)).sum(dim=1)


def expected_disagreements(features: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """Return the probabilities [n], by the model, of all classes but the expert's most probable one."""
    log_probabilities = _log_probabilities(head, features)  # on the host where the device has no float64
    decisions = expert_head.scores(expert).argmax(dim=1, keepdim=True).to(log_probabilities.device)
    return 1 - log_probabilities.gather(1, decisions)[:, 0].exp()


def _log_probabilities(head: ScoreMap, features: Tensor) -> Tensor:
    return F.log_softmax(to_float64(head.scores(features)), dim=1)


def mean_over_samples(values: NDArray[np.float64]) -> Interval:
    """Return the mean of per-sample values [n] with its interval."""
    return mean_interval(float(values.mean()), float(values.std()), len(values))


def without_labels(study: Study) -> dict[str, SampleSet]:
    """Return the calibration samples by task with labels removed."""
    return {task: replace(samples, labels=None) for task, samples in study.calibration_sets.items()}


def samples_to_judge(samples: SampleSet) -> SampleSet:
    """Return held-out samples as models are judged on them: without answers, by length, with a copy of each.

    Augmented copies halve the influence of samples that the experts were trained on. A spec without views (`none`)
    has none.
    """
    kind = "auto" if samples.views is None else samples.views.kind
    bare = sort_by_length(samples.without_answers)
    try:
        return append_views(replace(bare, views=Views(kind=kind, seed=_JUDGING_SEED, copies=1)))
    except DataError:
        # No augmentation fits these inputs.
        return replace(bare, views=None)


class CombinedProgress(ProgressReporter):
    """One progress bar over several calibrations; `total` is the sum of their estimated costs."""

    def __init__(self, reporter: ProgressReporter, total: float) -> None:
        self._reporter, self._total = reporter, total
        self._reached = self._effort = 0.0
        self._name = ""

    def begin_part(self, effort: float, name: str) -> None:
        """Finish the current calibration on the bar and begin the next one with its cost."""
        self._reached, self._effort = self._reached + self._effort, effort
        self._name = name

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """Report a step of the current calibration, see `Reporter.step`."""
        # In hundredths, because a bar counts whole steps and efforts are fractions.
        reached = self._reached + self._effort * done / (total or 1)
        named = f"{self._name}, {label}" if label else self._name
        self._reporter.step(phase, round(100 * reached), round(100 * self._total), named, **metrics)

    def finish(self, phase: str) -> None:
        """Complete the bar, also if some calibrations failed."""
        total = round(100 * self._total)
        self._reporter.step(phase, total, total)


@dataclass(frozen=True)
class CandidateFitter:
    """Calibrates a study's merged model repeatedly; each result replaces the last one in the pool."""

    study: Study
    sites: Callable[[Collection[str]], Mapping[int, Sequence[str]]]
    reporter: ProgressReporter
    phase: str
    spill: Path
    seed: int = 0

    def fit(
        self,
        calibrator: Calibrator,
        samples: Mapping[str, SampleSet],
        cache: ExpertFeatureCache | None = None,
    ) -> float:
        """Calibrate, add the model to the pool as `CANDIDATE_MODEL`, and return the seconds it took.

        Args:
            calibrator: the calibrator with its settings.
            samples: calibration samples by task.
            cache: the experts' features from earlier fits to the same samples; it is used and extended.
        """
        pool, updates, attached = self.study.pool, dict[ParameterKey, Tensor](), dict[str, Attachment]()

        def _report_progress(progress: CalibrationProgress) -> None:
            metrics = {} if progress.loss is None else {"loss": progress.loss}
            self.reporter.step(self.phase, progress.done, progress.total, progress.label, **metrics)

        context = calibration_context(
            self.study,
            samples,
            self.sites(calibrator.update) if calibrator.takes_sites else {},
            objectives=False,
            spill=self.spill,
            seed=self.seed,
            on_step=_report_progress,
            expert_features=cache or ExpertFeatureCache(),
        )
        # Without the final write: comparisons of methods report the time of the fit alone.
        started = time.perf_counter()
        for layer in calibrator.calibrate(context):
            updates |= {(layer.layer, name): value for name, value in layer.updates.items()}
            attached |= layer.attachments
        seconds, source = time.perf_counter() - started, pool.source("merged")
        if updates:
            source = replace_parameters(pool.chain, source, self.study.dtype_template, updates)
        pool.add(CANDIDATE_MODEL, source, attached)
        return seconds

    def feature_cache(self, among: int = 1) -> ExpertFeatureCache:
        """Return an empty cache of expert features with its share of the feature budget."""
        # At most a quarter of the free memory: the models and one layer's statistics need the rest.
        budget, free = self.study.settings.feature_budget, device_memory(self.study.pool.device)
        return ExpertFeatureCache((budget if free is None else min(budget, free[0] // 4)) // among)


class _Candidate(NamedTuple):
    """A candidate model: made by a calibrator, on samples with these augmentations, or by a merge.

    `cost` is in FeatCal calibrations of all samples; `share` is the only interpolation factor to try, if not None.
    """

    name: str
    title: str
    calibrator: Calibrator | None
    cost: float
    views: Views | None = None
    merge: MergeConfig | None = None
    share: float | None = None

    @property
    def work(self) -> float:
        """The cost of making and scoring the candidate."""
        return self.cost / _NUM_PARTS + _SCORING_COST


@torch.no_grad()
def choose_calibrator(
    study: Study,
    start: Calibrator,
    sites: Mapping[int, Sequence[str]],
    reporter: ProgressReporter,
    *,
    others: bool = False,
    existing: Mapping[str, CalibrationInfo] = MappingProxyType({}),
    share: float | None = None,
    on_score: Callable[..., object] = lambda **_: None,
) -> tuple[Calibrator, dict[str, Any]]:
    """Select calibrator settings on held-out calibration samples, without labels.

    Every model is made from one half of the samples and scored on the other. The most expensive candidate is taken
    whose score is within a standard error of the best: repairs with views, which did best on all measured suites.

    Args:
        study: the opened models and samples.
        start: the requested calibrator.
        sites: names of its sites by layer.
        reporter: receives every candidate's score.
        others: include other merges and the candidates of other calibrators.
        existing: the run's calibrations by name; their settings are candidates, too. Each that is not a candidate
            already takes half the time of its fit, and scoring.
        share: the only interpolation factor to try; None tries several.
        on_score: called with `name`, `score` and `share` of every candidate.

    Returns:
        The calibrator, and a record of the choice as plain values. If its `kept` is not empty, that model is kept and
        no layer is solved.
    """
    started = time.perf_counter()
    counts = {task: len(data.calibration or ()) for task, data in study.tasks.items()}
    # The spec or a request sets the augmented copies, even to none.
    has_views = any(samples.views is not None for samples in study.calibration_sets.values())
    candidates = _candidate_models(start, counts, others=others, has_base=study.has_base, has_views=has_views)
    shares = (1.0,) if not study.has_base else _SHARES if share is None else (share,)
    added = _existing_candidates(study, start, sites, existing, candidates, shares, others=others)
    candidates = [*added, *candidates]
    total = sum(candidate.work for candidate in candidates)
    progress = CombinedProgress(reporter, total)
    measured, failures = dict[str, Mapping[float, Values]](), dict[str, str]()
    with temporary_folder() as folder:
        trials = _HeldOutTrials(study, sites, shares, progress, folder)
        measure = trials.scorer.score_name
        for candidate in candidates:
            result = result_or_error(partial(trials.score, candidate), study.team)
            if isinstance(result, DriftLensError):
                if candidate.name == "start":
                    raise result
                failures[candidate.name] = result.message
                continue
            measured[candidate.name] = result
            best, at_best = _best_interpolation(result, measure)
            progress.step(_PHASE, 1, 1, score=at_best.mean, share=best)
            on_score(name=candidate.title, score=at_best.mean, share=best)
        progress.finish(_PHASE)
        record = _selection_record(trials, candidates, measured, failures)
    choice = next((candidate for candidate in candidates if candidate.name == record["choice"]), None)
    chosen = start if choice is None or choice.calibrator is None else choice.calibrator
    score = "expected disagreement: the model's probability of all classes but the expert's decision"
    if without := trials.scorer.tasks_without_head:
        score = f"relative final drift of all tasks, because {', '.join(without)} has no head"
    return chosen, record | {
        "score": score,
        "judged_by": measure,
        "start": settings_as_json(start),
        "chosen": None if record["kept"] else settings_as_json(chosen),
        "num_held_out": {task: len(samples.original or samples) for task, samples in trials.scorer.samples.items()},
        "num_calibrations": sum(candidate.calibrator is not None for candidate in candidates),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _candidate_models(
    start: Calibrator,
    counts: Mapping[str, int],
    *,
    others: bool,
    has_base: bool,
    has_views: bool = False,
) -> list[_Candidate]:
    """Return all candidates: the start, those that calibrators declare and, with `others`, other merges.

    Unless views were requested, the most expensive calibrator with settings for views is also tried with them.
    """
    repairs = {"start": start}
    for method, kind in calibrators.items():
        # Inherited ones belong to the parent method.
        declared = vars(kind).get("candidates", ())
        for settings in declared if others != isinstance(start, kind) else ():
            repair = start.changed(**settings) if isinstance(start, kind) else kind(**settings)
            try:
                repair.check(has_base=has_base)
            except SpecError:
                # It needs a base.
                continue
            if all(_is_different_calibrator(other, repair) for other in repairs.values()):
                repairs[" ".join([method, *(f"{key}={value}" for key, value in settings.items())])] = repair
    viewable = [repair for repair in repairs.values() if repair.with_views and not has_views]
    viewed: list[_Candidate] = []
    if viewable:
        costly = max(viewable, key=lambda repair: repair.effort)
        costly = costly.changed(**costly.with_views)
        is_few = min(counts.values(), default=_MANY_SAMPLES) < _MANY_SAMPLES
        views = Views(copies=7 if is_few else 3)
        viewed = [_repair_candidate(f"{registered_method(costly)} views={views.copies}", start, costly, views)]
        # The same method was better without views on no suite of docs/benchmarks.md.
        repairs = {key: kept for key, kept in repairs.items() if kept is start or type(kept) is not type(costly)}
    candidates = [_repair_candidate(key, start, repair) for key, repair in repairs.items()] + viewed
    if not others:
        return candidates
    title = "the merged model, interpolated with the base"
    shrunk = [_Candidate("shrunk", title, None, 0.0)] if has_base else []
    merged = [
        _Candidate(f"merge {merge.method.name}", f"a merge by {merge.method.title}", None, 1.0, merge=merge)
        for merge in map(merge_by_name, _MERGES)
    ]
    return [*shrunk, *merged, *candidates]


def _existing_candidates(
    study: Study,
    start: Calibrator,
    sites: Mapping[int, Sequence[str]],
    existing: Mapping[str, CalibrationInfo],
    candidates: Sequence[_Candidate],
    shares: Sequence[float],
    *,
    others: bool,
) -> list[_Candidate]:
    """Return candidates with the settings of existing calibrations of the same modules, if they are not among others.

    They are fitted anew like any candidate: the saved weights may have been fitted to the held-out samples. To save
    time, each is scored at its own interpolation factor only.
    """
    chain, added = study.pool.chain, list[_Candidate]()
    present = {task: str(drawn.views or "none") for task, drawn in study.calibration_sets.items()}
    for name, info in existing.items():
        by_task = {task: info.views.get(task, "none") for task in present}
        share = float(info.interpolation.get("share", 1.0)) if len(shares) > 1 else shares[0]
        if info.kept or (by_task != present and len({*by_task.values()}) > 1):
            continue
        try:
            kind = calibrators[info.method]
            repair = kind(**resolve_settings(kind, info.settings, info.method))
            repair.check(has_base=study.has_base)
            solved = select_sites(chain, layers=info.layers, sites=info.sites or None, update=repair.update)
        except DriftLensError:
            # Saved by a version or plug-in with other settings.
            continue
        text = next(iter(by_task.values()))
        views = None if by_task == present else CalibrationRequest.model_validate({"views": text}).views
        is_new = all(
            other.calibrator is None
            or other.views != views
            or _is_different_calibrator(other.calibrator, repair)
            or share not in (shares if other.share is None else [other.share])
            for other in [*candidates, *added]
        )
        is_asked = others or isinstance(repair, type(start))
        if is_new and is_asked and kind.takes_sites and solved == sites_to_update(chain, sites, repair.update):
            found = _repair_candidate(f"calibration {name}", start, repair, views)
            added.append(found._replace(title=f"{found.title} (from {found.name})", share=share))
    return added


def _repair_candidate(name: str, start: Calibrator, calibrator: Calibrator, views: Views | None = None) -> _Candidate:
    copies = 0 if views is None else views.count
    title = _candidate_title(name, calibrator, start)
    title += f" and {pluralize(copies, 'view')} of every sample" * bool(copies)
    return _Candidate(name, title, calibrator, calibrator.effort * (1 + copies), views)


def _is_different_calibrator(one: Calibrator, other: Calibrator) -> bool:
    return type(one) is not type(other) or one.get_params() != other.get_params()


def _candidate_title(name: str, calibrator: Calibrator, start: Calibrator) -> str:
    kind, method, preset = type(calibrator), registered_method(calibrator), matching_preset(calibrator)
    # What a method declares is told by its settings: their preset may be for another kind of models.
    if preset and not name.startswith(method):
        return f"{method} ({preset})"
    reference = (start if kind is type(start) and name != "start" else kind()).get_params()
    changed = [f"{key} {value}" for key, value in calibrator.get_params().items() if value != reference[key]]
    return f"{method} with {', '.join(changed)}" if changed else method


class _HeldOutTrials:
    """Makes candidates from one half of the samples and scores them on the other.

    Both halves do not take turns: a second fit of the most expensive candidate would cost as much again, and the choice
    would be as good (docs/benchmarks.md).
    """

    def __init__(
        self,
        study: Study,
        sites: Mapping[int, Sequence[str]],
        shares: Sequence[float],
        progress: CombinedProgress,
        folder: Path,
    ) -> None:
        self.study, self._shares, self._progress = study, shares, progress
        self._shown, judged = dict[str, SampleSet](), dict[str, SampleSet]()
        for task, samples in without_labels(study).items():
            held_out, fitted = fold_ranges(len(samples), task, parts=_NUM_PARTS)
            self._shown[task] = select_samples(samples, fitted)
            judged[task] = samples_to_judge(select_samples(samples, held_out))
        self.scorer = HeldOutScorer(study, judged)
        self._fitter = CandidateFitter(
            study,
            lambda update: sites_to_update(study.pool.chain, sites, update),
            progress,
            _PHASE,
            folder / "features",
        )
        self._cache = self._fitter.feature_cache()

    def score(self, candidate: _Candidate) -> dict[float, Values]:
        """Return held-out scores of a candidate by interpolation factor."""
        pool, scores = self.study.pool, dict[float, Values]()
        self._progress.begin_part(candidate.work, candidate.title)
        self._make_candidate_model(candidate)
        model = pool.source(CANDIDATE_MODEL)
        shares = self._shares if candidate.share is None else [candidate.share]
        # Merges of the same experts by averages differ little from the interpolated merged model.
        for share in shares if candidate.merge is None else shares[-1:]:
            mixed = InterpolatedSource(pool.source("base"), model, share)
            pool.add(CANDIDATE_MODEL, model if share == 1 else self._load_if_within_budget(mixed))
            scores[share] = self.scorer.score_model(CANDIDATE_MODEL)
        return scores

    def unchanged_model_scores(self) -> dict[str, Values]:
        names = [name for name in _UNCHANGED if name == "merged" or self.study.has_base]
        return {name: self.scorer.score_model(name) for name in names}

    def _make_candidate_model(self, candidate: _Candidate) -> None:
        """Make a candidate from the samples that are not held out and add it to the pool."""
        pool = self.study.pool
        shown = {task: replace(drawn, views=candidate.views or drawn.views) for task, drawn in self._shown.items()}
        if candidate.calibrator is None:
            source = pool.source("merged")
            if candidate.merge is not None:
                source = merge_study(self.study.without_labels(shown), candidate.merge)
            pool.add(CANDIDATE_MODEL, replace_parameters(pool.chain, source, self.study.dtype_template, {}))
            return
        self._fitter.fit(candidate.calibrator, shown, self._cache if candidate.views is None else None)

    def _load_if_within_budget(self, source: StateSource) -> StateSource:
        # Interpolating anew for every task would read both models from disk each time.
        size = sum(math.prod(header.shape) * header.dtype.itemsize for header in source.headers.values())
        if size > self.study.settings.feature_budget:
            return source
        return InMemorySource(source.name, {key: source.read(key) for key in source.headers})


def _held_out_scores(values: Values, measure: str) -> HeldOutScores:
    return HeldOutScores({task: by_measure[measure] for task, by_measure in values.items()})


def _best_interpolation(by_share: Mapping[float, Values], measure: str) -> tuple[float, HeldOutScores]:
    """Return the interpolation factor with the lowest mean score (largest if tied) and its scores."""
    scores = {share: _held_out_scores(by_share[share], measure) for share in sorted(by_share, reverse=True)}
    # `min` takes the first of equals: the largest factor, as they are sorted in reverse.
    best = min(scores, key=lambda share: scores[share].mean)
    return best, scores[best]


def _selection_record(
    trials: _HeldOutTrials,
    candidates: Sequence[_Candidate],
    measured: Mapping[str, Mapping[float, Values]],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    measure, unchanged = trials.scorer.score_name, trials.unchanged_model_scores()
    # `choose_model` takes the last of equally good ones, so the most expensive comes last.
    by_cost = sorted(candidates, key=lambda candidate: candidate.cost)
    best = {
        candidate.name: _best_interpolation(measured[candidate.name], measure)
        for candidate in by_cost
        if candidate.name in measured
    }
    scores = {name: _held_out_scores(values, measure) for name, values in unchanged.items()}
    scores |= {name: at_best for name, (_, at_best) in best.items()}
    decision = choose_model(scores, among=len(unchanged) + len(candidates) - 1)
    compared = [
        {"name": name, "title": _UNCHANGED[name]} | _score_entry(name, scores[name], decision) for name in unchanged
    ]
    for candidate in candidates:
        entry: dict[str, Any] = {"name": candidate.name, "title": candidate.title}
        if candidate.calibrator is not None:
            settings = settings_as_json(candidate.calibrator)
            entry |= {"method": registered_method(candidate.calibrator), "settings": settings}
        if candidate.name in best:
            share, at_best = best[candidate.name]
            entry |= {"share": share} | _score_entry(candidate.name, at_best, decision)
        else:
            entry["error"] = failures[candidate.name]
        compared.append(entry)
    record: dict[str, Any] = {
        "kept": decision.name if decision.name in _UNCHANGED else "",
        "choice": decision.name,
        "best": decision.best,
        "base_stands": decision.base_stands,
        "compared": compared,
        "level": LEVEL,
        "correction": f"Bonferroni, {decision.among} comparisons",
    }
    if decision.name not in best:
        return record
    [chosen] = (candidate for candidate in candidates if candidate.name == decision.name)
    if trials.study.has_base:
        record["share"] = best[decision.name][0]
    # A single factor was not chosen by its score.
    if trials.study.has_base and chosen.share is None:
        curve = {0.0: unchanged["base"], **measured[decision.name]}
        entries = [_interpolation_entry(share, values, measure) for share, values in sorted(curve.items())]
        record["curve"] = entries
    if chosen.calibrator is None:
        record["kept"] = "merged" if chosen.merge is None else "merge"
    if chosen.merge is not None:
        record["merge"] = chosen.merge.record
    return record | ({} if chosen.views is None else {"views": chosen.views.model_dump()})


def _score_entry(name: str, scores: HeldOutScores, decision: ModelChoice) -> dict[str, Any]:
    """Return the score of a candidate, and by how much it is lower than the merged model's."""
    numbers = {"score": _finite_or_none(scores.mean), "n": sum(map(len, scores.by_task.values()))}
    if name == "merged":
        return numbers
    over = dataclasses.asdict(decision.over_merged[name])
    return numbers | {key: _finite_or_none(value) for key, value in over.items()}


def _finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON can't store."""
    return value if math.isfinite(value) else None


def _interpolation_entry(share: float, by_task: Values, measure: str) -> dict[str, Any]:
    """Return mean scores over tasks with intervals, by interpolation factor."""
    entry: dict[str, Any] = {"share": share, "judged_by": measure}
    for name, values in (("score", measure), ("drift", "drift_rel")):
        mean = mean_over_tasks([mean_over_samples(by_measure[values]) for by_measure in by_task.values()])
        entry |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    return entry | {"n": sum(len(by_measure[measure]) for by_measure in by_task.values())}


def candidate_titles(start: Calibrator) -> list[str]:
    """Return the titles of all candidates that `calibrate --auto` compares."""
    candidates = _candidate_models(start, {}, others=True, has_base=True)
    return [*_UNCHANGED.values(), *(candidate.title for candidate in candidates)]
