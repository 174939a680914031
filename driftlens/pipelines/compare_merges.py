"""Merges of the same experts side by side: which is nearest to them, on samples that no method has read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.calibration.automatic import Scores, folds_of
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.config.run import RunSpec
from driftlens.data.samples import SampleSet, part_of
from driftlens.experiment.loading import OpenModels, open_study
from driftlens.experiment.merging import merged_source
from driftlens.experiment.study import Study
from driftlens.merging.method import merge_called, merge_methods
from driftlens.pipelines.model_selection import (
    LANE,
    Candidate,
    HeldOut,
    Judge,
    Outcome,
    Scored,
    candidates,
    drift_scores,
    over_samples,
    require_any,
    try_each,
    unlabelled,
)
from driftlens.utils.access import Context
from driftlens.utils.devices import exact_products
from driftlens.utils.files import PathLike, temporary_folder
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens.utils.progress import CancelToken, Reporter
from driftlens.utils.variants import expert_of

PHASE = "compare"
MEASURES = ("hellinger", "drift_rel")

Values = NDArray[np.float64]


def wanted_merges(asked: Sequence[tuple[str, Mapping[str, object]]]) -> list[Candidate]:
    """The merges asked for by method and settings, `all` being every method; as `candidates`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        return " ".join([method, *(f"{key}={value}" for key, value in settings.items())])

    def owner_of(method: str) -> Callable[..., Any]:
        return merge_methods[method].function

    return candidates(asked, merge_methods, owner_of, name_of, kind="merge method")


@exact_products()
def compare_merges(
    spec: RunSpec,
    merges: Sequence[Candidate],
    context: Context = Context(),
    *,
    out: PathLike | None = None,
    write: Callable[[Mapping[str, Any], Path], object] = lambda comparison, folder: None,
) -> dict[str, Any]:
    """Merges ranked by how near their final features and class probabilities are to the experts', as plain values.

    No label is read. Where one of the methods reads calibration samples, they get three quarters and all are judged
    on the fourth; otherwise on all. `behind` is by how much one is farther from the experts than the first, with an
    interval over the same samples that holds for all pairs together (Bonferroni); where that reaches 0 it is tied.
    `nearer` is by how much one is nearer than the `present` one, which the spec names or makes.

    That is compared too, and so is the base. Of the `merges`, best first, one that can't be made has a `reason` instead
    of numbers. `write` puts the comparison into `out`.
    """
    study, models = open_study(spec, access=context.access)
    merges, present = _with_present(spec, merges)
    compared = _Compared(study, models, merges, context.reporter(), context.cancel)
    outcomes = compared.outcomes()
    comparison = {
        "name": spec.name,
        "score": compared.judge.measure,
        "samples": {task: len(samples) for task, samples in compared.judged.items()},
        "held_out": compared.held_out,
        "present": present,
        "merges": _ranked(outcomes, compared.judge.measure, present),
    }
    if out is not None:
        write(comparison, Path(out))
    return comparison


class _Compared:
    """One comparison: the merges, the samples that methods are `shown`, and those on which all are `judged`."""

    def __init__(
        self,
        study: Study,
        models: OpenModels,
        merges: Sequence[Candidate],
        reporter: Reporter,
        cancel: CancelToken | None,
    ) -> None:
        self._study, self._models, self._merges, self._reporter = study, models, merges, reporter
        self._quiet = Reporter(cancel=cancel)
        self.held_out = any(merge_methods[merge.method].runs_models for merge in merges)
        self.shown, self.judged = _samples(study, held_out=self.held_out)
        self.judge, self._done, self._name = Judge(study), 0, ""

    @torch.no_grad()
    def outcomes(self) -> list[tuple[Candidate, Outcome[Scored]]]:
        """What became of the models that are there, which have no method, and of every merge, in their order."""
        held_out = HeldOut(self._study, self.judged, self._measured, self._say)
        existing = [Candidate(name, "", {}) for name in ("base", "merged") if name in self._study.pool]

        def attempt(candidate: Candidate) -> Outcome[Scored]:
            self._name = candidate.name
            if not candidate.method:
                return Outcome(held_out.of(candidate.name))
            self._done = self._merges.index(candidate)
            self._reporter.step(PHASE, self._done, len(self._merges), candidate.name)
            source, seconds = self._made(candidate, folder)
            self._study.pool.add(LANE, source)
            return Outcome(held_out.of(LANE), seconds)

        with temporary_folder() as folder:
            for task in self.judged:
                held_out.expert(task)
            tried = try_each([*existing, *self._merges], attempt)
            met = {merge.name: outcome for merge, outcome in tried}
        require_any(met[merge.name] for merge in self._merges)
        self._reporter.step(PHASE, len(self._merges), len(self._merges))
        return [(candidate, met[candidate.name]) for candidate in (*existing, *self._merges)]

    def _made(self, merge: Candidate, folder: Path) -> tuple[StateSource, float]:
        """Return a merge and the seconds that it took."""
        started, shown = time.perf_counter(), self._study.blinded(self.shown)
        method = merge_called(merge.method, merge.settings)
        source = merged_source(self._models, method, shown, beside=folder / "merged", reporter=self._quiet)
        return source, round(time.perf_counter() - started, 3)

    def _measured(self, model: str, task: str, features: Tensor, expert: Tensor) -> dict[str, Values]:
        values = {"drift_rel": drift_scores(features, expert).cpu().numpy()}
        if not self.judge.bare:
            values["hellinger"] = self.judge(model, task, features, expert)
        return values

    def _say(self, task: str, model: str) -> None:
        label = f"expert of {task}" if model == expert_of(task) else f"{self._name} on {task}"
        self._reporter.step(PHASE, self._done, len(self._merges), label)


def _samples(study: Study, *, held_out: bool) -> tuple[dict[str, SampleSet], dict[str, SampleSet]]:
    """Return the samples that methods may read, and those to judge on; of texts these are the question alone."""
    shown, judged = {}, {}
    for task, samples in unlabelled(study).items():
        shown[task] = judged[task] = samples
        texts = samples.texts
        if texts is not None and texts.reader is not None and texts.shown != "none":
            judged[task] = shown[task].answering([""] * len(shown[task]))
        if held_out:
            *rest, last = folds_of(len(shown[task]), task, "judging on held-out samples")
            shown[task] = part_of(shown[task], sorted(position for fold in rest for position in fold))
            judged[task] = part_of(judged[task], last)
    return shown, judged


def _with_present(spec: RunSpec, merges: Sequence[Candidate]) -> tuple[Sequence[Candidate], str]:
    """The merges wanted, the spec's own among them, and what that one is called: "merged" where it is stored."""
    if spec.merge is None:
        return merges, "merged"
    asked = spec.merge.method, spec.merge.parameters
    present = merge_called(*asked)
    names = [merge.name for merge in merges if merge_called(merge.method, merge.settings) == present]
    if names:
        return merges, names[0]
    added = wanted_merges([asked])
    return [*merges, *added], added[0].name


def _ranked(
    outcomes: Sequence[tuple[Candidate, Outcome[Scored]]], deciding: str, present: str
) -> list[dict[str, Any]]:
    """A row for each that was compared with its numbers, best first; those that can't be made come last."""
    ranking = {
        merge.name: Scores({task: numbers[deciding] for task, numbers in outcome.value.items()})
        for merge, outcome in outcomes
        if outcome.value is not None
    }
    order = sorted(ranking, key=lambda name: ranking[name].mean)
    pairs = max(1, len(order) * (len(order) - 1) // 2)
    rows = []
    for merge, outcome in outcomes:
        row: dict[str, Any] = {"place": None, "merge": merge.name, "method": merge.method}
        row |= {"settings": dict(merge.settings), "reason": ""}
        if outcome.error is not None:
            reason = outcome.error.message
            row["reason"] = reason.replace(f"features of {LANE} ", f"features of {merge.name} ", 1)
        elif merge.method:
            row["seconds"] = outcome.seconds
        if outcome.value is not None:
            scores = ranking[merge.name]
            row["place"] = order.index(merge.name) + 1
            row |= _measures(outcome.value)
            behind = ranking[order[0]].compared_with(scores, among=pairs)
            row |= _ends("behind", Interval(behind.advantage, behind.low, behind.high))
            row["is_tied"] = row["place"] > 1 and not behind.is_clear
            if present in ranking and merge.name != present:
                gain = scores.compared_with(ranking[present], among=pairs)
                row |= _ends("nearer", Interval(gain.advantage, gain.low, gain.high))
            row["n"] = sum(map(len, scores.by_task.values()))
        rows.append(row)
    return sorted(rows, key=lambda row: row["place"] or math.inf)


def _measures(scores: Scored) -> dict[str, Any]:
    """Means over tasks with their intervals, and those by task."""
    row: dict[str, Any] = {}
    for name in MEASURES:
        by_task = {task: over_samples(values[name]) for task, values in scores.items() if name in values}
        row |= _ends(name, mean_over_tasks([*by_task.values()]))
        row.setdefault("by_task", {})[name] = {task: _ends("value", mean) for task, mean in by_task.items()}
    return row


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    ends = {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: value if math.isfinite(value) else None for key, value in ends.items()}
