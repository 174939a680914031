"""The best of several models, chosen from calibration samples alone, by `Judge` on those that it was made without.

Candidates are the merged model and the base as they are, and models that are made: by the calibrator that was asked
for, by what calibrators declare as their `candidates`, and by other merges; each at several shares of the way from the
base. Samples fall into two halves. All are made from one half and judged on the other; those that the best is not
clearly better than are then made from the other half, too, as far as `BUDGET` lasts. So no two models that are judged
share a sample, and what is dear is made twice from half of the samples at most. The merged model stays, or else the
base, unless something is clearly better; of what is made the dearest is taken whose score is within a standard error of
the best: repairs with views are, and did best wherever the arena measured them. Where the merged model or the base
stays, the calibration solves no module, and its variant is that very model under the name that was asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.base.errors import DataError, NumericsError, SpecError
from driftlens.base.files import temporary_folder
from driftlens.base.progress import Reporter
from driftlens.calibration.automatic import LEVEL, NUM_FOLDS, Decision, Scores, decide, folds_of
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.checkpoints.sources import Between, StateSource, TensorsSource
from driftlens.data.samples import part_of
from driftlens.engine.sites import updated_sites
from driftlens.jobs.calibrate.plan import Choice as Chooser
from driftlens.jobs.calibrate.plan import method_called, plain_settings, preset_of
from driftlens.jobs.calibrate.variants import with_parameters
from driftlens.jobs.contest.contest import (
    LANE,
    Fit,
    HeldOut,
    Judge,
    KeptScores,
    Outcome,
    Scored,
    Trials,
    contest,
    unlabelled,
)
from driftlens.jobs.contest.shrinking import SHARES, SHRINKING, share_entry, shares_of_the_way
from driftlens.jobs.study.merging import merged_within
from driftlens.jobs.study.reopening import Kept
from driftlens.jobs.study.study import Study
from driftlens.merging.method import Merge, merge_called
from driftlens.spec.data import Views
from driftlens.spec.requests import CalibrationRequest

PHASE = "choose"
BUDGET = 3.0
"""Of what is tried, in calibrations of all samples by the dearest candidate."""
NUM_PARTS = 2
"""Of the samples. Made from three quarters of them, a model takes 1.5 times as long, and two looks see half of them."""
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


class Trial(NamedTuple):
    """An entrant made without a part and judged on it, or a model as it is, which is judged on all samples."""

    name: str
    part: int | None = None


Values = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""By task, `score` and `drift` of every sample that was judged."""


@dataclass(frozen=True)
class _Part(HeldOut[dict[str, NDArray[np.float64]]]):
    """Samples at some positions of others, of which experts are run once for all."""

    whole: HeldOut[Any] | None = None
    positions: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    def expert(self, task: str) -> Tensor:
        """The expert's final features."""
        assert self.whole is not None
        return self.whole.expert(task)[list(self.positions[task])]


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
    with temporary_folder() as folder:
        tries = _Tries(study, sites, entrants, shares, kept, reporter, folder)
        rivals = _halved(tries, entrants)
        record = _record(tries, rivals)
        tries.bar.finish()
    choice = tries.entrants.get(record["choice"])
    chosen = start if choice is None or choice.calibrator is None else choice.calibrator
    return chosen, record | {
        "score": tries.judge.score,
        "judged_by": tries.judge.measure,
        "start": plain_settings(start),
        "chosen": None if record["kept"] else plain_settings(chosen),
        "num_held_out": {task: len(judged) for task, judged in tries.samples.items()},
        "num_calibrations": tries.num_fits,
        "cost_in_calibrations": tries.spent / _dearest(entrants),
        "seconds": round(tries.ledger.seconds, 3),
    }


def _as_they_are(has_base: bool) -> list[str]:
    """Names of the models that are compared as they are, the simplest first."""
    return [name for name in _PLAIN if name == "merged" or has_base]


def _dearest(entrants: Sequence[Entrant]) -> float:
    return max(entrant.cost for entrant in entrants)


def _halved(tries: _Tries, entrants: Sequence[Entrant]) -> list[Entrant]:
    """What is left after both halves of the samples, or after one where all is clear by then; the best first.

    Nothing is left behind that the best isn't clearly better than, unless the budget ends.
    """
    rivals, budget = list(entrants), BUDGET * _dearest(entrants)
    for part in range(NUM_PARTS):
        cost = _cost_of_part(rivals)
        tries.bar.expect(min(cost * (NUM_PARTS - part), max(budget - tries.spent, cost)))
        tries.make(rivals, part)
        parts, rivals = range(part + 1), [rival for rival in rivals if rival.name not in tries.failures]
        if not rivals:
            break
        scores = {rival.name: tries.best_of(rival.name, parts)[1] for rival in rivals}
        rivals.sort(key=lambda rival: scores[rival.name].mean)
        best, among = scores[rivals[0].name], max(1, len(rivals) - 1)
        rivals = [
            rival for rival in rivals if not best.compared_with(scores[rival.name], among=among).is_clear
        ]
        if len(rivals) == 1 and tries.is_settled(best, parts):
            break
        if part + 1 < NUM_PARTS:
            while len(rivals) > 1 and _cost_of_part(rivals) > budget - tries.spent:
                rivals.pop()
    return rivals


def _cost_of_part(entrants: Sequence[Entrant]) -> float:
    return sum(entrant.cost_of_part for entrant in entrants)


class _OneBar(Reporter):
    """Batches of calibrations as one bar, in hundredths of a calibration by FeatCal.

    Its total is what was done and what is expected from there on, and is never less than what is done. A batch in
    which one that can't be solved for makes the others walk alone counts once.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._total = self._spent = self._batch = self._reached = 0.0

    def begin(self, effort: float) -> None:
        """The batch at hand is over, and one begins that takes `effort`."""
        self._spent, self._batch = self._spent + self._batch, effort
        self._total = max(self._total, self._spent + effort)

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """As of a `Reporter`, of the batch at hand."""
        self._reached = max(self._reached, self._spent + self._batch * done / (total or 1))
        self._reporter.step(phase, round(100 * self._reached), round(100 * self._total), label, **metrics)

    def expect(self, ahead: float) -> None:
        """The batch at hand is over, and those from here on take `ahead`."""
        self._total = self._spent + self._batch + ahead

    def tell(self, name: str, **measured: float) -> None:
        """What was measured of an entrant, beside the bar as it stands."""
        self._reporter.step(PHASE, round(100 * self._reached), round(100 * self._total), name, **measured)

    def finish(self) -> None:
        """All is tried."""
        self._reached = self._spent + self._batch
        self._reporter.step(PHASE, round(100 * self._reached), round(100 * self._reached))


class _Tries:
    """What was measured of trials so far, and where more are made; `spent` is in calibrations by FeatCal."""

    def __init__(
        self,
        study: Study,
        sites: Mapping[int, Sequence[str]],
        entrants: Sequence[Entrant],
        shares: Sequence[float],
        kept: Kept,
        reporter: Reporter,
        folder: Path,
    ) -> None:
        self.study, self.shares, self.judge = study, shares, Judge(study)
        self.entrants = {entrant.name: entrant for entrant in entrants}
        self.bar, self.samples = _OneBar(reporter), unlabelled(study)
        self.parts = {task: folds_of(len(data), task, parts=NUM_PARTS) for task, data in self.samples.items()}
        self.ledger = KeptScores[Trial](kept, self._key, study.team)
        self.failures: dict[str, str] = {}
        self.spent, self.num_fits = 0.0, 0
        self._sites, self._folder = sites, folder
        self._measured: dict[Trial, dict[float, Values]] = {}
        self._merges: dict[str, StateSource] = {}
        self._whole = HeldOut(study, self.samples, self.judge.with_drift)

    def make(self, entrants: Sequence[Entrant], part: int) -> None:
        """Make entrants without a part of the samples, and judge them on it; what can't be made is in `failures`."""
        candidates, tried = [Trial(entrant.name, part) for entrant in entrants], list[Trial]()

        def attempts(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome[Scored]]]:
            tried.extend(trials)
            by_views: dict[Views | None, list[Entrant]] = {}
            for entrant in (self.entrants[trial.name] for trial in trials):
                if entrant.calibrator is None:
                    self.bar.begin(entrant.cost_of_part)
                    yield Trial(entrant.name, part), self._merged(entrant, part)
                else:
                    by_views.setdefault(entrant.views, []).append(entrant)
            for views, group in by_views.items():
                yield from self._fitted(group, views, part)

        for trial, outcome in contest(candidates, attempts, self.ledger):
            cost = self.entrants[trial.name].cost_of_part
            if trial not in tried:  # what an earlier sitting has kept counts as if it was done here
                self.bar.begin(cost)
            self.num_fits, self.spent = self.num_fits + 1, self.spent + cost
            if outcome.value is not None:
                self._measured[trial] = _by_share(outcome.value)
                share, scores = self.best_of(trial.name, [part])
                self.bar.tell(self.entrants[trial.name].title, score=scores.mean, share=share, part=part)
                continue
            assert outcome.error is not None
            if trial.name == "start":
                raise outcome.error
            self.failures[trial.name] = outcome.error.message

    def _merged(self, entrant: Entrant, part: int) -> Outcome[Scored]:
        """What another merge scores on a part, made without it where it reads samples; or the merged model shrunk."""
        pool, started = self.study.pool, time.perf_counter()
        try:
            source = self._merges.get(entrant.name) or pool.source("merged")
            if entrant.merge is not None and entrant.name not in self._merges:
                shown = {
                    task: part_of(drawn, sorted({*range(len(drawn))} - {*self.parts[task][part]}))
                    for task, drawn in self.samples.items()
                }
                source = merged_within(self.study.blinded(shown), entrant.merge)
                if not entrant.merge.method.runs_models:
                    self._merges[entrant.name] = source
        except (DataError, NumericsError, SpecError) as error:
            return Outcome(error=error)
        seconds = time.perf_counter() - started
        pool.add(LANE, with_parameters(pool.chain, source, self.study.like, {}))
        return Outcome(self._judged(entrant.name, part), seconds)

    def _fitted(
        self, group: Sequence[Entrant], views: Views | None, part: int
    ) -> Iterator[tuple[Trial, Outcome[Scored]]]:
        """Calibrations on all parts but one, and their scores on that."""
        rest = frozenset(range(NUM_PARTS)) - {part}
        fits = {Fit(entrant.calibrator, rest): entrant for entrant in group if entrant.calibrator is not None}
        trials = Trials(
            self.study,
            self.samples
            if views is None
            else {task: replace(drawn, views=views) for task, drawn in self.samples.items()},
            self.parts,
            lambda update: updated_sites(self.study.pool.chain, self._sites, update),
            self.bar,
            PHASE,
            self._folder / "features",
            begin=lambda begun: self.bar.begin(sum(fits[fit].cost_of_part for fit in begun)),
        )
        for fit, outcome in trials.outcomes([*fits], lambda fit: self._judged(fits[fit].name, part)):
            yield Trial(fits[fit].name, part), outcome

    def parts_of(self, name: str) -> list[int]:
        """Those that an entrant was judged on; none if it can't be made."""
        judged = [part for part in range(NUM_PARTS) if Trial(name, part) in self._measured]
        return [] if name in self.failures else judged

    def scores(self, name: str, parts: Sequence[int], share: float = 1.0) -> Scores:
        """At a share of the way from the base, on these parts, each judged by a model that was made without it."""
        return Scores({task: numbers["score"] for task, numbers in self._values(name, parts, share).items()})

    def best_of(self, name: str, parts: Sequence[int]) -> tuple[float, Scores]:
        """The share with the lowest mean score on these parts, the largest of equals, and the scores there."""
        shares = sorted(self._measured[Trial(name, parts[0])], reverse=True)
        scores = {share: self.scores(name, parts, share) for share in shares}
        best = min(shares, key=lambda share: scores[share].mean)
        return best, scores[best]

    def is_settled(self, scores: Scores, parts: Sequence[int]) -> bool:
        """Whether what is left is clearly better than the models as they are, whenever one might have asked."""
        plain = _as_they_are(self.study.has_base)
        among = NUM_PARTS * (len(plain) + len(self.entrants) - 1)
        return all(scores.compared_with(self.scores(name, parts), among=among).is_clear for name in plain)

    def curve(self, name: str, parts: Sequence[int]) -> list[dict[str, Any]]:
        """See `CalibrationInfo.shrink`."""
        points = {share: self._values(name, parts, share) for share in self._measured[Trial(name, parts[0])]}
        points[0.0] = self._values("base", parts, 1.0)
        return [share_entry(share, values, self.judge.measure) for share, values in sorted(points.items())]

    def _values(self, name: str, parts: Sequence[int], share: float) -> Values:
        if name in self.entrants:
            pieces = [self._measured[Trial(name, part)][share] for part in parts]
        else:
            whole = self._as_it_is(name)
            pieces = [
                {
                    task: {kind: numbers[list(self.parts[task][part])] for kind, numbers in values.items()}
                    for task, values in whole.items()
                }
                for part in parts
            ]
        return {
            task: {kind: np.concatenate([piece[task][kind] for piece in pieces]) for kind in pieces[0][task]}
            for task in self.samples
        }

    def _as_it_is(self, name: str) -> Values:
        trial = Trial(name)
        if trial not in self._measured:

            def measured(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome[Scored]]]:
                yield trial, Outcome(_flat({1.0: self._whole.of(name)}))

            ((_, outcome),) = contest([trial], measured, self.ledger)
            assert outcome.value is not None
            self._measured[trial] = _by_share(outcome.value)
        return self._measured[trial][1.0]

    def _judged(self, name: str, part: int) -> Scored:
        """The model at hand on a part, at shares of the way from the base: downwards, until the mean score rises.

        Scores along the way fall and rise again, so that what lies beyond isn't the best. Other parts take the shares
        of the first.
        """
        pool, by_share = self.study.pool, dict[float, Values]()
        first = self._measured.get(Trial(name, 0))
        places = {task: folds[part] for task, folds in self.parts.items()}
        samples = {task: part_of(drawn, places[task]) for task, drawn in self.samples.items()}
        held_out = _Part(self.study, samples, self.judge.with_drift, whole=self._whole, positions=places)
        model, means = pool.source(LANE), list[float]()
        for share in sorted(self.shares if first is None else first, reverse=True):
            if share != 1:
                pool.add(LANE, self._at_hand(Between(pool.source("base"), model, share)))
            by_share[share] = held_out.of(LANE)
            means.append(Scores({task: numbers["score"] for task, numbers in by_share[share].items()}).mean)
            if first is None and means[-1] > min(means):
                break
        return _flat(by_share)

    def _at_hand(self, source: StateSource) -> StateSource:
        """The same, read once for all tasks where it takes no more memory than features may."""
        size = sum(math.prod(header.shape) * header.dtype.itemsize for header in source.headers.values())
        if size > self.study.settings.feature_budget:
            return source
        return TensorsSource(source.name, {key: source.read(key) for key in source.headers})

    def _key(self, trial: Trial) -> str:
        """What is kept of a trial goes by its settings, not by its name."""
        entrant = self.entrants.get(trial.name)
        return (
            trial.name
            if entrant is None
            else f"{entrant.calibrator or entrant.name!r} {entrant.views} {trial.part} of {NUM_PARTS}"
        )


def _flat(measured: Mapping[float, Values]) -> Scored:
    """By names of two levels, as a ledger keeps it."""
    return {f"{share:g} {task}": kinds for share, tasks in measured.items() for task, kinds in tasks.items()}


def _by_share(flat: Scored) -> dict[float, Values]:
    by_share = dict[float, dict[str, Mapping[str, NDArray[np.float64]]]]()
    for name, numbers in flat.items():
        share, task = name.split(" ", 1)
        by_share.setdefault(float(share), {})[task] = numbers
    return {**by_share}


def _record(tries: _Tries, rivals: Sequence[Entrant]) -> dict[str, Any]:
    """The decision among what is left and the models as they are, and every candidate, as plain values."""
    plain = _as_they_are(tries.study.has_base)
    parts = tries.parts_of(rivals[0].name) if rivals else [0]
    standing = {rival.name for rival in rivals}
    by_cost = sorted(tries.entrants.values(), key=lambda entrant: entrant.cost)
    best = {rival.name: tries.best_of(rival.name, parts) for rival in by_cost if rival.name in standing}
    scores = {name: tries.scores(name, parts) for name in plain} | {
        name: at_best for name, (_, at_best) in best.items()
    }
    decision = decide(scores, [[*best]], among=len(plain) + len(tries.entrants) - 1)
    compared = [_entry(tries, name, None, scores[name], decision) for name in plain]
    for name in tries.entrants:
        # What was left behind is told on the parts that it was judged on, beside the merged model on the same.
        judged = tries.parts_of(name)
        share, result = best.get(name) or (tries.best_of(name, judged) if judged else (None, None))
        compared.append(_entry(tries, name, share, result, decision))
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
    if tries.study.has_base:
        record |= {"share": best[decision.name][0], "curve": tries.curve(decision.name, parts)}
    entrant = tries.entrants[decision.name]
    if entrant.calibrator is None:
        record["kept"] = "merged" if entrant.merge is None else "merge"
    if entrant.merge is not None:
        record["merge"] = entrant.merge.record
    return record | ({} if entrant.views is None else {"views": entrant.views.model_dump()})


def _entry(
    tries: _Tries, name: str, share: float | None, scores: Scores | None, decision: Decision
) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "title": _PLAIN.get(name, "")}
    entrant = tries.entrants.get(name)
    if entrant is not None:
        entry |= {"title": entrant.title}
    if entrant is not None and entrant.calibrator is not None:
        entry |= {"method": method_called(entrant.calibrator), "settings": plain_settings(entrant.calibrator)}
    if share is not None:
        entry["share"] = share
    if scores is None:
        return entry | {"error": tries.failures[name]}
    entry |= {"score": _finite(scores.mean), "n": sum(map(len, scores.by_task.values()))}
    if name == "merged":
        return entry
    over = decision.over_merged.get(name) or scores.compared_with(
        tries.scores("merged", tries.parts_of(name)), among=decision.among
    )
    return entry | {key: _finite(value) for key, value in dataclasses.asdict(over).items()}


def outlook(
    start: Calibrator,
    counts: Mapping[str, int],
    *,
    has_base: bool,
    has_views: bool = False,
    others: bool = False,
) -> tuple[list[str], float]:
    """See `Choice.outlook`; raises at once what `choose_settings` would."""
    entrants = _entrants(start, counts, others=others, has_base=has_base, has_views=has_views)
    for task, count in counts.items():
        folds_of(count, task, parts=NUM_PARTS)
    titles = [*(_PLAIN[name] for name in _as_they_are(has_base)), *(entrant.title for entrant in entrants)]
    return titles, (BUDGET + 1) * _dearest(entrants)


HELD_OUT = Chooser(choose_settings, outlook)
"""The best settings of one calibrator and its share, or the merged model or base as it is."""

BEST = Chooser(functools.partial(choose_settings, others=True), functools.partial(outlook, others=True))
"""Of all calibrators that declare candidates, other merges, and the models as they are."""


def choice_of(request: CalibrationRequest) -> Chooser | None:
    """How a request wants its hyperparameters chosen, or its share of the way from the base; None where nothing is."""
    if request.auto:
        others, share = request.method is None, request.shrink if isinstance(request.shrink, float) else None
        return Chooser(
            functools.partial(choose_settings, others=others, share=share),
            functools.partial(outlook, others=others),
        )
    if request.shrink != "auto":
        return None
    return Chooser(outlook=_with_shares, shares=shares_of_the_way)


def _with_shares(start: Calibrator, counts: Mapping[str, int], **_: bool) -> tuple[list[str], float]:
    """An outlook of a choice of the share alone, which calibrates once more without a fold."""
    for task, count in counts.items():
        folds_of(count, task, SHRINKING)
    title = f"shares {', '.join(f'{share:g}' for share in SHARES)} of the way from the base"
    return [title], start.effort * (2 * NUM_FOLDS - 1) / NUM_FOLDS


def _entrants(
    start: Calibrator, counts: Mapping[str, int], *, others: bool, has_base: bool, has_views: bool = False
) -> list[Entrant]:
    """The start, what calibrators declare as candidates but the start itself, and with `others` other merges.

    Where nobody has said which views samples have, the dearest that declares settings for them has some, too.
    """
    if not start.takes_sites:
        raise SpecError(f"{type(start).__name__} has no closed form to choose", hint="Leave out --auto.")
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
        viewed = [Entrant(name, title, dearest, dearest.cost(1 + views.copies), views)]
        # On no suite of docs/arena.md were the same settings better without views, and they are dear.
        repairs = {key: kept for key, kept in repairs.items() if kept is start or _is_other(kept, dearest)}
    entrants = [
        Entrant(key, _title(key, repair, start), repair, repair.cost()) for key, repair in repairs.items()
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
