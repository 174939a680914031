"""The best of several models, chosen from calibration samples alone, by their scores on held-out ones.

Candidates are the merged model and the base as they are, and models that are made: by the calibrator that was asked
for, by what calibrators declare as their `candidates`, and by other merges; each at several shares of the way from the
base. Samples fall into two halves. Every model is made from one half and scored on the other, both ways. So no two
models that are scored share a sample, and expensive models are made twice from half of the samples. The merged model
stays, or else the base, unless something is clearly better; of what is made the most expensive is taken whose score is
within a standard error of the best: repairs with views are, and did best wherever they were measured. Where the merged
model or the base stays, the calibration solves no module, and its variant is that very model under the name that was
asked for. Entry point: `choose_settings`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.calibration.automatic import LEVEL, Decision, Scores, decide, folds_of
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.checkpoints.tensor_sources import Between, StateSource, TensorsSource
from driftlens.config.data import Views
from driftlens.data.samples import part_of
from driftlens.engine.sites import updated_sites
from driftlens.experiment.merging import merged_within
from driftlens.experiment.study import Study
from driftlens.merging.method import Merge, merge_called
from driftlens.pipelines.calibration_plan import method_called, plain_settings, preset_of, with_parameters
from driftlens.pipelines.model_selection import (
    LANE,
    Bar,
    Fitting,
    HeldOutScorer,
    ResultStore,
    Values,
    attempt,
    over_samples,
    unlabelled,
)
from driftlens.utils.errors import DriftLensError, SpecError
from driftlens.utils.files import temporary_folder
from driftlens.utils.intervals import mean_over_tasks
from driftlens.utils.progress import Reporter

_PHASE = "choose"
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the way from the base to a model: 0 is the base, 1 the model."""
_NUM_PARTS = 2
"""Halves of the samples."""
_MERGES = ("average", "tsv_m", "regmean_pp")
"""Other merges of the same experts that are compared, with their default settings."""
_SCORING = 0.35
"""Effort of scoring a model at some shares, in calibrations by FeatCal: forward passes of half of the samples."""
_MANY = 32
"""Samples of a task from which three views are as good as seven."""
_PLAIN = {"merged": "the merged model as it is", "base": "the base"}


class _Candidate(NamedTuple):
    """A model that can be made: by a calibrator, on samples with these views, or by a merge.

    `cost` is in calibrations by FeatCal, of all samples.
    """

    name: str
    title: str
    calibrator: Calibrator | None
    cost: float
    views: Views | None = None
    merge: Merge | None = None

    @property
    def cost_of_part(self) -> float:
        """The effort of making it from a part of the samples and scoring it on the others."""
        return self.cost / _NUM_PARTS + _SCORING

    @property
    def key(self) -> str:
        """What its scores are stored under: its settings, not its name."""
        return f"scores of {self.calibrator or self.name!r} {self.views}"


@torch.no_grad()
def choose_settings(
    study: Study,
    start: Calibrator,
    sites: Mapping[int, Sequence[str]],
    reporter: Reporter,
    store: ResultStore,
    *,
    others: bool = False,
    share: float | None = None,
) -> tuple[Calibrator, dict[str, Any]]:
    """Return a calibrator for a study's calibration samples, and how it was chosen, as plain values.

    Where the record has `kept`, the calibrator is the start, and nothing is to be solved with it. Of the study models,
    calibration samples and heads are used; no label and no other sample is read.

    Args:
        study: the opened models and samples.
        start: the calibrator that was asked for.
        sites: names of its sites by layer.
        reporter: receives every candidate's score.
        store: keeps the scores of every candidate, and may have some of an earlier sitting.
        others: admits other merges, and candidates of other calibrators.
        share: fixes the share of the way from the base.
    """
    counts = {task: len(data.calibration or ()) for task, data in study.tasks.items()}
    flags = {"has_base": study.has_base, "has_views": study.is_told_views}
    candidates = _candidates(start, counts, others=others, **flags)
    shares = (1.0,) if not study.has_base else _SHARES if share is None else (share,)
    bar = Bar(reporter, sum(_NUM_PARTS * candidate.cost_of_part for candidate in candidates))
    measured, failures = dict[str, Mapping[float, Values]](), dict[str, str]()
    with temporary_folder() as folder:
        trials = _Trials(study, sites, shares, bar, folder)
        measure = trials.scorer.measure
        for candidate in candidates:
            if stored := store.read(candidate.key):
                bar.begin(_NUM_PARTS * candidate.cost_of_part, candidate.title)
                by_share = _by_share(stored)
            else:
                result = attempt(partial(trials.measure, candidate), study.team)
                if isinstance(result, DriftLensError):
                    if candidate.name == "start":
                        raise result
                    failures[candidate.name] = result.message
                    continue
                by_share = result
                store.write(candidate.key, _flat(by_share))
            measured[candidate.name] = by_share
            best, at_best = _best(by_share, measure)
            bar.step(_PHASE, 1, 1, score=at_best.mean, share=best)
        bar.finish(_PHASE)
        plain = trials.as_they_are()
    record = _record(study, candidates, plain, measured, failures, measure)
    choice = next((candidate for candidate in candidates if candidate.name == record["choice"]), None)
    chosen = start if choice is None or choice.calibrator is None else choice.calibrator
    score = "Hellinger distance of class probabilities from the expert's"
    if bare := trials.scorer.without_head:
        score = f"relative final drift of all tasks, as there is no head for {', '.join(bare)}"
    return chosen, record | {
        "score": score,
        "judged_by": measure,
        "start": plain_settings(start),
        "chosen": None if record["kept"] else plain_settings(chosen),
        "num_held_out": {task: len(samples) for task, samples in trials.samples.items()},
        "num_calibrations": _NUM_PARTS * len(candidates),
        "seconds": round(store.seconds, 3),
    }


def _candidates(
    start: Calibrator, counts: Mapping[str, int], *, others: bool, has_base: bool, has_views: bool = False
) -> list[_Candidate]:
    """The start, what calibrators declare as candidates but the start itself, and with `others` other merges.

    Where nobody has said which views samples have, the dearest that declares settings for them has some, too.
    """
    repairs = {"start": start}
    for method, kind in calibrators.items():
        declared = vars(kind).get("candidates", ())  # what a method inherits is the other one's
        for settings in declared if others or isinstance(start, kind) else ():
            repair = start.changed(**settings) if isinstance(start, kind) else kind(**settings)
            try:
                repair.check(has_base=has_base)
            except SpecError:  # it takes a base, and there is none
                continue
            if all(_is_other(other, repair) for other in repairs.values()):
                repairs[" ".join([method, *(f"{key}={value}" for key, value in settings.items())])] = repair
    viewable = [repair for repair in repairs.values() if repair.with_views and not has_views]
    viewed: list[_Candidate] = []
    if viewable:
        dearest = max(viewable, key=lambda repair: repair.effort)
        dearest = dearest.changed(**dearest.with_views)
        is_few = min(counts.values(), default=_MANY) < _MANY
        views = Views(copies=7 if is_few else 3)
        name = f"{method_called(dearest)} views={views.copies}"
        title = f"{_title(name, dearest, start)} and {views.copies} views of every sample"
        viewed = [_Candidate(name, title, dearest, dearest.effort * (1 + views.copies), views)]
        # On no suite of docs/benchmarks.md were the same settings better without views, and they are dear.
        repairs = {key: kept for key, kept in repairs.items() if kept is start or _is_other(kept, dearest)}
    candidates = [
        _Candidate(key, _title(key, repair, start), repair, repair.effort) for key, repair in repairs.items()
    ] + viewed
    if not others:
        return candidates
    shrunk = (
        [_Candidate("shrunk", "the merged model, shrunk towards the base", None, 0.0)] if has_base else []
    )
    merged = [
        _Candidate(f"merge {merge.method.name}", f"a merge by {merge.method.title}", None, 1.0, merge=merge)
        for merge in map(merge_called, _MERGES)
    ]
    return [*shrunk, *merged, *candidates]


def _is_other(one: Calibrator, other: Calibrator) -> bool:
    return type(one) is not type(other) or one.get_params() != other.get_params()


def _title(name: str, calibrator: Calibrator, start: Calibrator) -> str:
    kind, method, preset = type(calibrator), method_called(calibrator), preset_of(calibrator)
    if preset:
        return f"{method} ({preset})"
    usual = (start if kind is type(start) and name != "start" else kind()).get_params()
    changed = [f"{key} {value}" for key, value in calibrator.get_params().items() if value != usual[key]]
    return f"{method} with {', '.join(changed)}" if changed else method


class _Trials:
    """Makes candidates from one half of the samples and scores them on the other."""

    def __init__(
        self,
        study: Study,
        sites: Mapping[int, Sequence[str]],
        shares: Sequence[float],
        bar: Bar,
        folder: Path,
    ) -> None:
        self.study, self.samples = study, unlabelled(study)
        self.scorer = HeldOutScorer(study, self.samples)
        self._folds = {
            task: folds_of(len(data), task, parts=_NUM_PARTS) for task, data in self.samples.items()
        }
        self._shares, self._bar = shares, bar
        self._fitting = Fitting(
            study,
            lambda update: updated_sites(study.pool.chain, sites, update),
            bar,
            _PHASE,
            folder / "features",
        )
        self._caches = [self._fitting.cache(_NUM_PARTS) for _ in range(_NUM_PARTS)]

    def measure(self, candidate: _Candidate) -> dict[float, Values]:
        """Return scores by share on both halves, each of the model that was made from the other."""
        pool, scores = self.study.pool, dict[float, list[Values]]()
        for part in range(_NUM_PARTS):
            self._bar.begin(candidate.cost_of_part, candidate.title)
            self._make(candidate, part)
            positions = {task: folds[part] for task, folds in self._folds.items()}
            model = pool.source(LANE)
            for share in self._shares:
                if share != 1:
                    pool.add(LANE, self._in_memory(Between(pool.source("base"), model, share)))
                else:
                    pool.add(LANE, model)
                scores.setdefault(share, []).append(self.scorer.of(LANE, positions))
        return {share: _joined(parts) for share, parts in scores.items()}

    def as_they_are(self) -> dict[str, Values]:
        """Return scores of the models that need not be made, by name, the simplest first."""
        names = [name for name in _PLAIN if name == "merged" or self.study.has_base]
        # Samples are in the order of the halves, as those of the others are.
        order = {task: [place for fold in folds for place in fold] for task, folds in self._folds.items()}
        return {
            name: {
                task: {measure: values[order[task]] for measure, values in by_measure.items()}
                for task, by_measure in self.scorer.of(name).items()
            }
            for name in names
        }

    def _make(self, candidate: _Candidate, part: int) -> None:
        """Add to the pool the model that a candidate makes without a part of the samples."""
        pool = self.study.pool
        shown = {
            task: part_of(drawn, [*range(1 - part, len(drawn), _NUM_PARTS)])
            for task, drawn in self.samples.items()
        }
        if candidate.calibrator is None:
            source = pool.source("merged")
            if candidate.merge is not None:
                source = merged_within(self.study.blinded(shown), candidate.merge)
            pool.add(LANE, with_parameters(pool.chain, source, self.study.like, {}))
            return
        views = candidate.views
        cache = self._caches[part] if views is None else None
        if views is not None:
            shown = {task: replace(drawn, views=views) for task, drawn in shown.items()}
        self._fitting.fit(candidate.calibrator, shown, cache)

    def _in_memory(self, source: StateSource) -> StateSource:
        """Return the same, read once for all tasks unless it takes more memory than features may."""
        size = sum(math.prod(header.shape) * header.dtype.itemsize for header in source.headers.values())
        if size > self.study.settings.feature_budget:
            return source
        return TensorsSource(source.name, {key: source.read(key) for key in source.headers})


def _joined(parts: Sequence[Values]) -> Values:
    """Return scores of all parts, one after the other."""
    return {
        task: {name: np.concatenate([part[task][name] for part in parts]) for name in by_measure}
        for task, by_measure in parts[0].items()
    }


def _flat(by_share: Mapping[float, Values]) -> dict[str, NDArray[np.float64]]:
    """Return scores by one name, as files of tensors have them."""
    return {
        f"{share} {measure} {task}": values
        for share, by_task in by_share.items()
        for task, by_measure in by_task.items()
        for measure, values in by_measure.items()
    }


def _by_share(flat: Mapping[str, NDArray[np.float64]]) -> dict[float, Values]:
    """Return what `_flat` was given."""
    by_share: dict[float, dict[str, dict[str, NDArray[np.float64]]]] = {}
    for name, values in flat.items():
        share, measure, task = name.split(" ", 2)
        by_share.setdefault(float(share), {}).setdefault(task, {})[measure] = values
    return {**by_share}


def _scores(values: Values, measure: str) -> Scores:
    return Scores({task: by_measure[measure] for task, by_measure in values.items()})


def _best(by_share: Mapping[float, Values], measure: str) -> tuple[float, Scores]:
    """Return the share with the lowest mean score, the largest of equals, and the scores there."""
    scores = {share: _scores(by_share[share], measure) for share in sorted(by_share, reverse=True)}
    best = min(scores, key=lambda share: scores[share].mean)
    return best, scores[best]


def _record(
    study: Study,
    candidates: Sequence[_Candidate],
    plain: Mapping[str, Values],
    measured: Mapping[str, Mapping[float, Values]],
    failures: Mapping[str, str],
    measure: str,
) -> dict[str, Any]:
    """The decision among what was made and the models as they are, and every candidate, as plain values."""
    by_cost = sorted(candidates, key=lambda candidate: candidate.cost)
    best = {
        candidate.name: _best(measured[candidate.name], measure)
        for candidate in by_cost
        if candidate.name in measured
    }
    scores = {name: _scores(values, measure) for name, values in plain.items()}
    scores |= {name: at_best for name, (_, at_best) in best.items()}
    decision = decide(scores, [[*best]], among=len(plain) + len(candidates) - 1)
    compared = [
        {"name": name, "title": _PLAIN[name]} | _numbers(name, scores[name], decision) for name in plain
    ]
    for candidate in candidates:
        entry: dict[str, Any] = {"name": candidate.name, "title": candidate.title}
        if candidate.calibrator is not None:
            settings = plain_settings(candidate.calibrator)
            entry |= {"method": method_called(candidate.calibrator), "settings": settings}
        if candidate.name in best:
            share, at_best = best[candidate.name]
            entry |= {"share": share} | _numbers(candidate.name, at_best, decision)
        else:
            entry["error"] = failures[candidate.name]
        compared.append(entry)
    record: dict[str, Any] = {
        "kept": decision.name if decision.name in _PLAIN else "",
        "choice": decision.name,
        "best": decision.best,
        "base_stands": decision.base_stands,
        "compared": compared,
        "level": LEVEL,
        "correction": f"Bonferroni, {decision.among} comparisons",
    }
    if decision.name not in best:
        return record
    if study.has_base:
        curve = {0.0: plain["base"], **measured[decision.name]}
        entries = [_share_entry(share, values, measure) for share, values in sorted(curve.items())]
        record |= {"share": best[decision.name][0], "curve": entries}
    [chosen] = (candidate for candidate in candidates if candidate.name == decision.name)
    if chosen.calibrator is None:
        record["kept"] = "merged" if chosen.merge is None else "merge"
    if chosen.merge is not None:
        record["merge"] = chosen.merge.record
    return record | ({} if chosen.views is None else {"views": chosen.views.model_dump()})


def _numbers(name: str, scores: Scores, decision: Decision) -> dict[str, Any]:
    """The score of a candidate, and how much lower it is than the merged model's."""
    numbers = {"score": _finite(scores.mean), "n": sum(map(len, scores.by_task.values()))}
    if name == "merged":
        return numbers
    over = dataclasses.asdict(decision.over_merged[name])
    return numbers | {key: _finite(value) for key, value in over.items()}


def _finite(value: float) -> float | None:
    """The value, or None where a candidate could not be solved for: JSON has no infinity."""
    return value if math.isfinite(value) else None


def _share_entry(share: float, by_task: Values, measure: str) -> dict[str, Any]:
    """Return means over tasks with their intervals; tasks are strata of the samples."""
    entry: dict[str, Any] = {"share": share, "judged_by": measure}
    for name, values in (("score", measure), ("drift", "drift_rel")):
        mean = mean_over_tasks([over_samples(by_measure[values]) for by_measure in by_task.values()])
        entry |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    return entry | {"n": sum(len(by_measure[measure]) for by_measure in by_task.values())}


def titles(start: Calibrator) -> list[str]:
    """Return titles of all candidates that the choice of the best compares with a calibrator."""
    candidates = _candidates(start, {}, others=True, has_base=True)
    return [*_PLAIN.values(), *(candidate.title for candidate in candidates)]
