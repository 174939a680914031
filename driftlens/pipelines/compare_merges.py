"""Ranking of merges of the same experts. Entry points: `resolve_merges`, then `compare_merges`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from driftlens.calibration.automatic import HeldOutScores, fold_ranges
from driftlens.config.spec import RunSpec
from driftlens.data.samples import SampleSet, select_samples
from driftlens.experiment.merging import merge_to_files
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import open_study
from driftlens.merging.method import merge_by_name, merge_methods
from driftlens.pipelines.evaluation import training_overlap_text
from driftlens.pipelines.model_selection import (
    CANDIDATE_MODEL,
    HeldOutScorer,
    NamedMethod,
    Values,
    expand_methods,
    mean_over_samples,
    require_one_result,
    result_or_error,
    samples_to_judge,
    settings_for_name,
    without_labels,
)
from driftlens.utils.devices import full_precision_matmul
from driftlens.utils.distributed import JobContext, ProgressReporter
from driftlens.utils.errors import DriftLensError
from driftlens.utils.files import temporary_folder
from driftlens.utils.intervals import Interval, mean_over_tasks

_PHASE = "compare"
_MEASURES = ("disagreement", "drift_rel")


class _ComparedMerge(NamedTuple):
    """A merge candidate: its scores, or its error, and the seconds that the merge took."""

    model: NamedMethod
    result: Values | DriftLensError
    seconds: float | None = None


def resolve_merges(requested: Sequence[tuple[str, Mapping[str, object]]]) -> list[NamedMethod]:
    """Parse requested merge methods with settings; `all` means every method."""

    def _named_merge(method: str, settings: Mapping[str, object]) -> NamedMethod:
        shown = settings_for_name(settings, merge_by_name(method, settings).settings)
        name = " ".join([method, *(f"{key}={value}" for key, value in shown.items())])
        return NamedMethod(name, method, settings)

    return expand_methods(requested, merge_methods, _named_merge)


@full_precision_matmul()
@torch.no_grad()
def compare_merges(spec: RunSpec, merges: Sequence[NamedMethod], context: JobContext = JobContext()) -> dict[str, Any]:
    """Rank merges by the distance of their final features and class probabilities from the experts'.

    No label is read. If a method reads calibration samples, methods get three quarters of them and are scored on the
    last quarter; otherwise all are scored on all samples. The base and the merge of the spec are compared, too.

    Args:
        spec: the experts and their data.
        merges: see `resolve_merges`.
        context: device, progress and cancellation.

    Returns:
        Plain values. `merges` has a row per model, best first: `behind` is the difference from the first model and
        `nearer` the gain over the `present` merge, both with intervals that hold for all pairs together (Bonferroni).
        A merge that failed has a `reason` instead of numbers. `trained_on` says that experts were probably trained on
        the samples; it is empty otherwise.
    """
    study, models = open_study(spec, access=context.access)
    merges, present = _with_spec_merge(spec, merges)
    held_out = any(merge_methods[merge.method].needs_samples for merge in merges)
    shown, samples = _method_and_scoring_samples(study, held_out=held_out)
    reporter, scorer, compared = context.reporter(), HeldOutScorer(study, samples), list[_ComparedMerge]()
    # The experts first, so that their time is not counted as that of the first model.
    for task in samples:
        reporter.step(_PHASE, 0, len(merges), f"expert of {task}")
        scorer.expert_features(task)
    for name in ("base", "merged"):
        if name in study.pool:
            reporter.step(_PHASE, 0, len(merges), name)
            compared.append(
                _ComparedMerge(NamedMethod(name, "", {}), result_or_error(partial(scorer.score_model, name)))
            )
    quiet, visible = ProgressReporter(cancel=context.cancel), study.without_labels(shown)
    with temporary_folder() as folder:
        for done, merge in enumerate(merges):
            started, seconds = time.perf_counter(), 0.0
            reporter.step(_PHASE, done, len(merges), merge.name)

            def _merge_and_score(merge: NamedMethod = merge, started: float = started) -> Values:
                nonlocal seconds
                method = merge_by_name(merge.method, merge.settings)
                source = merge_to_files(models, method, visible, beside=folder / "merged", reporter=quiet)
                seconds = round(time.perf_counter() - started, 3)
                study.pool.add(CANDIDATE_MODEL, source)
                return scorer.score_model(CANDIDATE_MODEL)

            compared.append(_ComparedMerge(merge, result_or_error(_merge_and_score), seconds))
    require_one_result([entry.result for entry in compared if entry.model.method])
    overlap = training_overlap_text(without_labels(study), study)
    reporter.step(_PHASE, len(merges), len(merges))
    return {
        "name": spec.name,
        "score": scorer.score_name,
        "samples": {task: len(judged.original or judged) for task, judged in samples.items()},
        "held_out": held_out,
        "present": present,
        "trained_on": overlap,
        "merges": _ranking_rows(compared, scorer.score_name, present),
    }


def _method_and_scoring_samples(study: Study, *, held_out: bool) -> tuple[dict[str, SampleSet], dict[str, SampleSet]]:
    """Return the samples that merge methods may read, and the samples to score merges on."""
    shown, judged = {}, {}
    for task, samples in without_labels(study).items():
        shown[task] = judged[task] = samples
        if held_out:
            # The same split for all methods, so that their scores can be paired sample by sample.
            *rest, last = fold_ranges(len(shown[task]), task, "judging on held-out samples")
            shown[task] = select_samples(shown[task], sorted(position for fold in rest for position in fold))
            judged[task] = select_samples(judged[task], last)
        judged[task] = samples_to_judge(judged[task])
    return shown, judged


def _with_spec_merge(spec: RunSpec, merges: Sequence[NamedMethod]) -> tuple[Sequence[NamedMethod], str]:
    """Add the spec's own merge to the candidates; return them and its name, "merged" if it is stored."""
    if spec.merge is None:
        return merges, "merged"
    present = spec.merge.method, spec.merge.parameters
    names = [merge.name for merge in merges if merge_by_name(merge.method, merge.settings) == merge_by_name(*present)]
    if names:
        return merges, names[0]
    added = resolve_merges([present])
    return [*merges, *added], added[0].name


def _ranking_rows(compared: Sequence[_ComparedMerge], measure: str, present: str) -> list[dict[str, Any]]:
    """Return a row per model, best first; models that failed come last."""
    ranking = {
        model.name: HeldOutScores({task: by_measure[measure] for task, by_measure in result.items()})
        for model, result, _ in compared
        if not isinstance(result, DriftLensError)
    }
    order = sorted(ranking, key=lambda name: ranking[name].mean)
    # Bonferroni over all pairs, because any two rows of the table may be compared.
    pairs = max(1, len(order) * (len(order) - 1) // 2)
    rows = []
    for model, result, seconds in compared:
        row: dict[str, Any] = {"place": None, "merge": model.name, "method": model.method}
        row |= {"settings": dict(model.settings), "reason": ""}
        rows.append(row)
        if isinstance(result, DriftLensError):
            # Errors name the model in the pool; the table names the merge.
            row["reason"] = result.message.replace(f"features of {CANDIDATE_MODEL} ", f"features of {model.name} ", 1)
            continue
        if seconds is not None:
            row["seconds"] = seconds
        scores = ranking[model.name]
        row["place"] = order.index(model.name) + 1
        row |= _mean_score_columns(result)
        behind = ranking[order[0]].compare_to(scores, among=pairs)
        row |= _interval_columns("behind", Interval(behind.advantage, behind.low, behind.high))
        row["is_tied"] = row["place"] > 1 and not behind.is_clear
        if present in ranking and model.name != present:
            gain = scores.compare_to(ranking[present], among=pairs)
            row |= _interval_columns("nearer", Interval(gain.advantage, gain.low, gain.high))
        row["n"] = sum(map(len, scores.by_task.values()))
    return sorted(rows, key=lambda row: row["place"] or math.inf)


def _mean_score_columns(scores: Values) -> dict[str, Any]:
    """Return means over tasks and the means of each task, with intervals."""
    row: dict[str, Any] = {}
    for name in _MEASURES:
        by_task = {task: mean_over_samples(values[name]) for task, values in scores.items() if name in values}
        row |= _interval_columns(name, mean_over_tasks([*by_task.values()]))
        row.setdefault("by_task", {})[name] = {
            task: _interval_columns("value", mean) for task, mean in by_task.items()
        }
    return row


def _interval_columns(name: str, interval: Interval) -> dict[str, float | None]:
    ends = {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: value if math.isfinite(value) else None for key, value in ends.items()}
