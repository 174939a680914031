"""The best of several models, chosen from calibration samples alone, by `Judge` on those that it was made without.

Candidates are the merged model and the base as they are, and models that are made: by the calibrator that was asked
for, by what calibrators declare as their `candidates`, and by other merges; each at several shares of the way from the
base. Samples fall into two halves. Every model is made from one half and judged on the other, both ways. So no two
models that are judged share a sample, and what is dear is made twice from half of the samples. The merged model stays,
or else the base, unless something is clearly better; of what is made the dearest is taken whose score is within a
standard error of the best: repairs with views are, and did best wherever they were measured. Where the merged model or
the base stays, the calibration solves no module, and its variant is that very model under the name that was asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.calibration.automatic import LEVEL, Decision, Scores, decide, folds_of
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.checkpoints.tensor_sources import Between, StateSource, TensorsSource
from driftlens.config.data import Views
from driftlens.config.requests import CalibrationRequest
from driftlens.data.samples import part_of
from driftlens.engine.sites import updated_sites
from driftlens.experiment.merging import merged_within
from driftlens.experiment.resume import Kept
from driftlens.experiment.study import Study
from driftlens.merging.method import Merge, merge_called
from driftlens.pipelines.calibration_plan import Choice, method_called, plain_settings, preset_of
from driftlens.pipelines.calibration_variants import with_parameters
from driftlens.pipelines.model_selection import (
    LANE,
    Bar,
    Fitting,
    HeldOut,
    Judge,
    Outcome,
    Scored,
    over_samples,
    try_each,
    unlabelled,
)
from driftlens.utils.distributed import Team
from driftlens.utils.errors import SpecError
from driftlens.utils.files import temporary_folder
from driftlens.utils.intervals import mean_over_tasks
from driftlens.utils.progress import Reporter

PHASE = "choose"
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the way from the base to a model: 0 is the base, 1 the model."""
NUM_PARTS = 2
"""Halves of the samples."""
_MERGES = ("average", "tsv_m", "regmean_pp")
"""Other merges of the same experts that are compared: as they come by default."""
_LOOK = 0.35
"""What judging a model at some shares takes, in calibrations by FeatCal: forward passes of half of the samples."""
_MANY = 32
"""Samples of a task from which three views are as good as seven."""
_PLAIN = {"merged": "the merged model as it is", "base": "the base"}


class Entrant(NamedTuple):
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
        """Of making it from a part of the samples and judging it on the others."""
        return self.cost / NUM_PARTS + _LOOK


Values = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""By task, `score` and `drift` of every sample that was judged."""


@torch.no_grad()
def choose_settings(
    study: Study,
    start: Calibrator,
    sites: Mapping[int, Sequence[str]],
    reporter: Reporter,
    kept: Kept,
    *,
    others: bool = False,
    share: float | None = None,
) -> tuple[Calibrator, dict[str, Any]]:
    """A calibrator for a study's calibration samples, and how it was found, as plain values.

    Where the record says `kept`, the calibrator is the start, and nothing is to be solved with it. Of the study models,
    calibration samples and heads are used; no label and no other sample is read. `others` admits candidates of other
    calibrators, `share` fixes the share of the way from the base. What becomes of each is kept in `kept`, where an
    earlier sitting may have left some.
    """
    counts = {task: len(data.calibration or ()) for task, data in study.tasks.items()}
    flags = {"has_base": study.has_base, "has_views": study.is_told_views}
    entrants = _entrants(start, counts, others=others, **flags)
    shares = [1.0] if not study.has_base else [*filter(None, SHARES)] if share is None else [share]
    bar = Bar(reporter, sum(NUM_PARTS * entrant.cost_of_part for entrant in entrants))
    scores = _KeptScores(kept, study.team)

    def read(entrant: Entrant) -> Outcome[Scored] | None:
        found = scores.read(entrant)
        if found is not None:
            bar.begin(NUM_PARTS * entrant.cost_of_part, entrant.title)
        return found

    measured, failures = dict[str, dict[float, Values]](), dict[str, str]()
    with temporary_folder() as folder:
        tries = _Tries(study, sites, shares, bar, folder)
        tried = try_each(entrants, tries.measure, read=read, write=scores.write, team=study.team)
        for entrant, outcome in tried:
            if outcome.value is None:
                assert outcome.error is not None
                if entrant.name == "start":
                    raise outcome.error
                failures[entrant.name] = outcome.error.message
                continue
            measured[entrant.name] = _all_parts(outcome.value)
            best, at_best = _best(measured[entrant.name])
            bar.step(PHASE, 1, 1, score=at_best.mean, share=best)
        bar.finish(PHASE)
        plain = tries.as_they_are()
    record = _record(study, entrants, plain, measured, failures, tries.judge)
    choice = next((entrant for entrant in entrants if entrant.name == record["choice"]), None)
    chosen = start if choice is None or choice.calibrator is None else choice.calibrator
    return chosen, record | {
        "score": tries.judge.score,
        "judged_by": tries.judge.measure,
        "start": plain_settings(start),
        "chosen": None if record["kept"] else plain_settings(chosen),
        "num_held_out": {task: len(judged) for task, judged in tries.samples.items()},
        "num_calibrations": NUM_PARTS * len(entrants),
        "seconds": round(scores.seconds, 3),
    }


def _as_they_are(has_base: bool) -> list[str]:
    """Names of the models that are compared as they are, the simplest first."""
    return [name for name in _PLAIN if name == "merged" or has_base]


class _Tries:
    """Makes candidates from one half of the samples and judges them on the other."""

    def __init__(
        self,
        study: Study,
        sites: Mapping[int, Sequence[str]],
        shares: Sequence[float],
        bar: Bar,
        folder: Path,
    ) -> None:
        self.study, self.judge, self.samples = study, Judge(study), unlabelled(study)
        self.folds = {task: folds_of(len(data), task, parts=NUM_PARTS) for task, data in self.samples.items()}
        self._shares, self._bar = shares, bar
        self._held_out = HeldOut(study, self.samples, self.judge.with_drift)
        self._fitting = Fitting(
            study,
            lambda update: updated_sites(study.pool.chain, sites, update),
            bar,
            PHASE,
            folder / "features",
        )
        self._caches = [self._fitting.cache(NUM_PARTS) for _ in range(NUM_PARTS)]

    def measure(self, entrant: Entrant) -> Outcome[Scored]:
        """Scores of a candidate on both halves, each judged by the model that was made from the other."""
        scores, started = dict[str, Mapping[str, NDArray[np.float64]]](), time.perf_counter()
        for part in range(NUM_PARTS):
            self._bar.begin(entrant.cost_of_part, entrant.title)
            self._make(entrant, part)
            scores |= self._judged(part)
        return Outcome(scores, time.perf_counter() - started)

    def as_they_are(self) -> dict[str, Values]:
        """Scores of the models that need not be made, by name, samples in the order of the halves."""
        order = {
            task: [position for fold in folds for position in fold] for task, folds in self.folds.items()
        }
        return {
            name: {
                task: {kind: numbers[order[task]] for kind, numbers in by_kind.items()}
                for task, by_kind in self._held_out.of(name).items()
            }
            for name in _as_they_are(self.study.has_base)
        }

    def _make(self, entrant: Entrant, part: int) -> None:
        """Add to the pool what comes of a candidate without a part of the samples."""
        pool = self.study.pool
        shown = {
            task: part_of(drawn, [*range(1 - part, len(drawn), NUM_PARTS)])
            for task, drawn in self.samples.items()
        }
        if entrant.calibrator is None:
            source = pool.source("merged")
            if entrant.merge is not None:
                source = merged_within(self.study.blinded(shown), entrant.merge)
            pool.add(LANE, with_parameters(pool.chain, source, self.study.like, {}))
            return
        views = entrant.views
        cache = self._caches[part] if views is None else None
        if views is not None:
            shown = {task: replace(drawn, views=views) for task, drawn in shown.items()}
        self._fitting.fit(entrant.calibrator, shown, cache)

    def _judged(self, part: int) -> Scored:
        """Scores on a part of the model in the pool, at shares of the way from the base."""
        pool, scores = self.study.pool, dict[str, Mapping[str, NDArray[np.float64]]]()
        positions = {task: folds[part] for task, folds in self.folds.items()}
        model = pool.source(LANE)
        for share in self._shares:
            if share != 1:
                pool.add(LANE, self._in_memory(Between(pool.source("base"), model, share)))
            else:
                pool.add(LANE, model)
            judged = self._held_out.of(LANE, positions)
            scores |= {f"{part} {share:g} {task}": values for task, values in judged.items()}
        return scores

    def _in_memory(self, source: StateSource) -> StateSource:
        """The same, read once for all tasks where it takes no more memory than features may."""
        size = sum(math.prod(header.shape) * header.dtype.itemsize for header in source.headers.values())
        if size > self.study.settings.feature_budget:
            return source
        return TensorsSource(source.name, {key: source.read(key) for key in source.headers})


class _KeptScores:
    """Scores of entrants in a folder, one file each, which the first process writes; a name holds all settings."""

    def __init__(self, kept: Kept, team: Team) -> None:
        self._kept, self._team = kept, team
        self._started = time.perf_counter() - team.once(lambda: kept.seconds)

    @property
    def seconds(self) -> float:
        """Seconds of work until now, over all sittings."""
        return time.perf_counter() - self._started

    def read(self, entrant: Entrant) -> Outcome[Scored] | None:
        """Return what an earlier sitting has measured of an entrant, or None."""
        tensors = self._team.once(lambda: self._kept.read(_key(entrant)))
        if not tensors:
            return None
        value, seconds = dict[str, dict[str, NDArray[np.float64]]](), float(tensors.pop(_SECONDS))
        for name, tensor in tensors.items():
            outer, inner = json.loads(name)
            value.setdefault(outer, {})[inner] = tensor.numpy()
        return Outcome(value, seconds)

    def write(self, entrant: Entrant, outcome: Outcome[Scored]) -> None:
        """Write the file of an entrant."""
        assert outcome.value is not None
        if self._team.is_main:
            tensors = {
                json.dumps([outer, inner]): torch.from_numpy(numbers)
                for outer, by_name in outcome.value.items()
                for inner, numbers in by_name.items()
            }
            tensors[_SECONDS] = torch.tensor(outcome.seconds, dtype=torch.float64)
            self._kept.write(_key(entrant), tensors, self.seconds)


_SECONDS = "seconds"


def _key(entrant: Entrant) -> str:
    """What is kept of a candidate goes by its settings, not by its name."""
    return f"{entrant.calibrator or entrant.name!r} {entrant.views}"


def _all_parts(flat: Scored) -> dict[float, Values]:
    """Scores by share, those of all parts behind each other."""
    pieces = dict[tuple[float, str], list[Mapping[str, NDArray[np.float64]]]]()
    for name, numbers in sorted(flat.items()):
        _, written, task = name.split(" ", 2)
        pieces.setdefault((float(written), task), []).append(numbers)
    by_share = dict[float, dict[str, Mapping[str, NDArray[np.float64]]]]()
    for (share, task), parts in pieces.items():
        joined = {kind: np.concatenate([part[kind] for part in parts]) for kind in parts[0]}
        by_share.setdefault(share, {})[task] = joined
    return {**by_share}


def _scores(values: Values) -> Scores:
    return Scores({task: numbers["score"] for task, numbers in values.items()})


def _best(by_share: Mapping[float, Values]) -> tuple[float, Scores]:
    """The share with the lowest mean score, the largest of equals, and the scores there."""
    scores = {share: _scores(by_share[share]) for share in sorted(by_share, reverse=True)}
    best = min(scores, key=lambda share: scores[share].mean)
    return best, scores[best]


def _record(
    study: Study,
    entrants: Sequence[Entrant],
    plain: Mapping[str, Values],
    measured: Mapping[str, Mapping[float, Values]],
    failures: Mapping[str, str],
    judge: Judge,
) -> dict[str, Any]:
    """The decision among what was made and the models as they are, and every candidate, as plain values."""
    by_cost = sorted(entrants, key=lambda entrant: entrant.cost)
    best = {entrant.name: _best(measured[entrant.name]) for entrant in by_cost if entrant.name in measured}
    scores = {name: _scores(values) for name, values in plain.items()}
    scores |= {name: at_best for name, (_, at_best) in best.items()}
    decision = decide(scores, [[*best]], among=len(plain) + len(entrants) - 1)
    compared = [
        {"name": name, "title": _PLAIN[name]} | _numbers(name, scores[name], decision) for name in plain
    ]
    for entrant in entrants:
        entry: dict[str, Any] = {"name": entrant.name, "title": entrant.title}
        if entrant.calibrator is not None:
            settings = plain_settings(entrant.calibrator)
            entry |= {"method": method_called(entrant.calibrator), "settings": settings}
        if entrant.name in best:
            share, at_best = best[entrant.name]
            entry |= {"share": share} | _numbers(entrant.name, at_best, decision)
        else:
            entry["error"] = failures[entrant.name]
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
        entries = [share_entry(share, values, judge.measure) for share, values in sorted(curve.items())]
        record |= {"share": best[decision.name][0], "curve": entries}
    [chosen] = (entrant for entrant in entrants if entrant.name == decision.name)
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


def titles(start: Calibrator) -> list[str]:
    """Return titles of all candidates that the choice of the best compares with a calibrator."""
    entrants = _entrants(start, {}, others=True, has_base=True)
    return [*_PLAIN.values(), *(entrant.title for entrant in entrants)]


def choice_of(request: CalibrationRequest) -> Choice | None:
    """Return how a request has its hyperparameters chosen, or None."""
    if not request.auto:
        return None
    return functools.partial(choose_settings, others=request.method is None, share=request.shrink)


def _entrants(
    start: Calibrator, counts: Mapping[str, int], *, others: bool, has_base: bool, has_views: bool = False
) -> list[Entrant]:
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
    viewed: list[Entrant] = []
    if viewable:
        dearest = max(viewable, key=lambda repair: repair.effort)
        dearest = dearest.changed(**dearest.with_views)
        is_few = min(counts.values(), default=_MANY) < _MANY
        views = Views(copies=7 if is_few else 3)
        name = f"{method_called(dearest)} views={views.copies}"
        title = f"{_title(name, dearest, start)} and {views.copies} views of every sample"
        viewed = [Entrant(name, title, dearest, dearest.effort * (1 + views.copies), views)]
        # On no suite of docs/benchmarks.md were the same settings better without views, and they are dear.
        repairs = {key: kept for key, kept in repairs.items() if kept is start or _is_other(kept, dearest)}
    entrants = [
        Entrant(key, _title(key, repair, start), repair, repair.effort) for key, repair in repairs.items()
    ] + viewed
    if not others:
        return entrants
    shrunk = [Entrant("shrunk", "the merged model, shrunk towards the base", None, 0.0)] if has_base else []
    merged = [
        Entrant(f"merge {merge.method.name}", f"a merge by {merge.method.title}", None, 1.0, merge=merge)
        for merge in map(merge_called, _MERGES)
    ]
    return [*shrunk, *merged, *entrants]


def _is_other(one: Calibrator, other: Calibrator) -> bool:
    return type(one) is not type(other) or one.get_params() != other.get_params()


def _title(name: str, calibrator: Calibrator, start: Calibrator) -> str:
    kind, method, preset = type(calibrator), method_called(calibrator), preset_of(calibrator)
    if preset:
        return f"{method} ({preset})"
    usual = (start if kind is type(start) and name != "start" else kind()).get_params()
    changed = [f"{key} {value}" for key, value in calibrator.get_params().items() if value != usual[key]]
    return f"{method} with {', '.join(changed)}" if changed else method


def _finite(value: float) -> float | None:
    """The value, or None where a candidate could not be solved for: JSON has no infinity."""
    return value if math.isfinite(value) else None


def share_entry(
    share: float, by_task: Mapping[str, Mapping[str, NDArray[np.float64]]], judged_by: str
) -> dict[str, Any]:
    """Means over tasks with their intervals, samples being strata by task."""
    entry: dict[str, Any] = {"share": share, "judged_by": judged_by}
    for name in ("score", "drift"):
        mean = mean_over_tasks([over_samples(numbers[name]) for numbers in by_task.values()])
        entry |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    return entry | {"n": sum(len(numbers["score"]) for numbers in by_task.values())}
