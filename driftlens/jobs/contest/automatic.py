"""The best of several ways to repair a run, chosen from its calibration samples alone, by `Judge` on held-out ones.

Candidates, the simpler ones first: the merged model as it is, the base, the calibrator that was asked for, what
calibrators declare as their `candidates`, and what a search finds, for which the most settings were tried. Where the
merged model or the base stays, the calibration solves no module, and its variant is that very model under the name
that was asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.errors import DataError, DriftLensError, NumericsError, SingularGramError, SpecError
from driftlens.base.files import temporary_folder
from driftlens.base.progress import Reporter
from driftlens.calibration.automatic import LEVEL, NUM_FOLDS, Decision, Scores, decide, folds_of, search
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.forward_order import Lane
from driftlens.engine.problems import ClosedForm, Layerwise
from driftlens.engine.site_selection import updated_sites
from driftlens.engine.training import Trainer
from driftlens.jobs.calibrate.plan import Choice as Chooser
from driftlens.jobs.calibrate.plan import method_called, plain_settings, preset_of
from driftlens.jobs.contest.judge import LANE, Judge
from driftlens.jobs.contest.trials import Trials, Tried
from driftlens.jobs.study.study import Study

PHASE = "choose"
FOLDS = range(NUM_FOLDS)
EVERY = frozenset(FOLDS)
_EXPECTED = 1 / 3
"""Of work that is done only where what was found wins, the part that a bar counts on.

The time left is then right to a factor of two either way, as long as that work takes no more than thrice the rest.
"""
_NEW = (1.0, 0.5, 0.5, 0.25)
"""What a fold's search takes, beside one on all samples: it leaves out two folds, and earlier ones did a part of it."""
_PLAIN = {"merged": "the merged model as it is", "base": "the base"}


@torch.no_grad()
def choose_settings(
    study: Study,
    start: Calibrator,
    sites: Mapping[int, Sequence[str]],
    reporter: Reporter,
    *,
    others: bool = False,
) -> tuple[Calibrator, dict[str, Any]]:
    """A calibrator for a study's calibration samples, and how it was found, as plain values.

    Where the record says `kept`, the calibrator is the start, and nothing is to be solved with it. Of the study models,
    calibration samples and heads are used; no label and no other sample is read. `others` admits candidates of other
    calibrators than that of `start`.

    Raises:
        SpecError: the calibrator has nothing to choose.
        DataError: a task has too few samples to hold any out.
        DriftLensError: the start itself can't be calibrated with.
    """
    started, judge = time.perf_counter(), Judge(study)
    varies = _free(start, has_base=study.has_base, others=others)
    with temporary_folder() as folder:
        spill = folder / "features"
        known = {"start": start, **_declared(start, others=others, has_base=study.has_base)}
        bar = _OneBar(reporter)
        fits = CrossFits(Trials(study, sites, {}, judge, bar, PHASE, spill), bar)
        contenders = {name: dict.fromkeys(FOLDS, at) for name, at in known.items()}
        effort, each = _search_effort(start, varies, study.has_base), NUM_FOLDS - 1
        # All in calibrations: what is sure to be tried, and what only if what was found wins.
        ahead = {name: each * at.effort for name, at in known.items()}
        perhaps, found = each * (effort - start.effort) * bool(varies), dict[int, Calibrator]()
        for fold in FOLDS if varies else ():
            bar.expect(effort * sum(_NEW[fold:]) + sum(ahead.values()) + each + _EXPECTED * perhaps)
            found[fold] = fits.searched(start, varies, fold)
        if {*found.values()} - {start}:
            contenders["found"], ahead["found"] = found, each * start.effort
        is_open = "found" in contenders
        given = {name: fits.as_it_is(name) for name in _PLAIN if name == "merged" or study.has_base}
        failures: dict[str, str] = {}
        # What was found comes early: whether it may win decides what is left to do.
        for name in sorted(contenders, key=lambda name: name not in ("start", "found")):
            bar.expect(sum(ahead.values()) + is_open * _EXPECTED * perhaps)
            try:
                given[name] = fits.scores(contenders[name])
            except (DataError, NumericsError, SpecError) as error:
                if name == "start":
                    raise
                failures[name] = error.message
            scores = {at: given[at] for at in (*_PLAIN, *contenders) if at in given}  # from the simplest on
            decision = decide(scores, _alike(known))
            del ahead[name]
            is_open = "found" in ahead or decision.name == "found"
        if decision.name == "found":
            bar.expect(perhaps)
            known["found"] = fits.searched(start, varies)
        bar.finish()
    chosen = known.get(decision.name, start)
    record = _record(decision, scores, failures, known) | {
        "score": judge.score,
        "start": plain_settings(start),
        "chosen": None if decision.name in _PLAIN else plain_settings(chosen),
        "candidates": fits.tried,
        "num_held_out": {task: len(at) for task, at in fits.samples.items()},
        "num_calibrations": len(fits.costs),
        "cost_in_calibrations": sum(fits.costs),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return chosen, record


def _alike(known: Mapping[str, Calibrator]) -> list[list[str]]:
    """Names of candidates that are equally simple: those of one calibrator besides the start."""
    kinds = {type(at) for name, at in known.items() if name != "start"}
    return [[name for name in known if type(known[name]) is kind] for kind in kinds]


class _OneBar(Reporter):
    """Batches of calibrations as one bar, in hundredths of a calibration by FeatCal.

    Its total is what was done and what is expected from there on: it follows searches that go other ways than expected,
    and is never less than what is done. A batch in which one that can't be solved for makes the others walk alone
    counts once.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._most = self._spent = self._batch = self._at = 0.0

    def begin(self, effort: float) -> None:
        """The batch at hand is over, and one begins that takes `effort`."""
        self._spent, self._batch = self._spent + self._batch, effort
        self._most = max(self._most, self._spent + effort)

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """As of a `Reporter`, of the batch at hand."""
        self._at = max(self._at, self._spent + self._batch * done / (total or 1))
        self._reporter.step(phase, round(100 * self._at), round(100 * self._most), label, **metrics)

    def expect(self, ahead: float) -> None:
        """The batch at hand is over, and those from here on take `ahead`."""
        self._most = self._spent + self._batch + ahead

    def finish(self) -> None:
        """All is tried."""
        self._at = self._spent + self._batch
        self._reporter.step(PHASE, round(100 * self._at), round(100 * self._at))


class CrossFits:
    """Candidates calibrated without one fold after the other, and their scores on the fold that was left out.

    Attributes:
        samples: by task.
        tried: the settings that searches tried, as plain values, each with the fold that its search didn't see.
        costs: of every calibration so far, in calibrations of all samples.
    """

    def __init__(self, trials: Trials[NDArray[np.float64]], bar: _OneBar) -> None:
        self._bar = bar
        self.samples: dict[str, SampleSet] = {}
        for task, at in trials.study.tasks.items():
            if at.calibration is None:
                raise DataError(f"task {task} has no calibration samples")
            self.samples[task] = dataclasses.replace(at.calibration, labels=None)
        self.tried: list[dict[str, Any]] = []
        self.costs: list[float] = []
        self._folds = {task: folds_of(len(at), task) for task, at in self.samples.items()}
        self._trials, every = trials, [self._part({fold}) for fold in FOLDS]
        self._parts = {task: [of[task] for of in every] for task in self.samples}
        self._judges = [dataclasses.replace(trials, held_out=of) for of in every]
        self._known: dict[tuple[str, frozenset[int]], Mapping[int, Mapping[str, Any]] | DriftLensError] = {}

    def as_it_is(self, model: str) -> Scores:
        """A model's scores on all samples."""
        return _joined([judge.of(model) for judge in self._judges])

    def scores(self, by_fold: Mapping[int, Calibrator], unseen: frozenset[int] = frozenset()) -> Scores:
        """On the samples of some folds, under the calibrator for each, fitted to the others but those `unseen`.

        Raises:
            DriftLensError: one of them can't be calibrated with.
        """
        fits = {fold: (at, unseen | {fold}) for fold, at in by_fold.items()}
        self._fit([*fits.values()])
        found = []
        for fold, (at, out) in fits.items():
            if isinstance(known := self._known[repr(at), out], DriftLensError):
                raise known
            found.append(known[fold])
        return _joined(found)

    def searched(self, start: Calibrator, varies: Sequence[str], fold: int | None = None) -> Calibrator:
        """What a search finds that doesn't see a fold: it scores on each fold beside it what it calibrates on the rest.

        A calibration without two neighbours serves the searches that don't see the one or the other. One that sees all
        folds scores on each what it calibrates on the other three.

        Raises:
            DriftLensError: the start can't be calibrated with.
        """
        unseen = frozenset([] if fold is None else [fold])
        deciding = FOLDS if fold is None else [(fold + step) % NUM_FOLDS for step in (1, -1)]

        def score(candidates: Sequence[Calibrator]) -> list[Scores]:
            self._fit([(at, unseen | {other}) for at in candidates for other in deciding])
            return [scored(at) for at in candidates]

        def scored(at: Calibrator) -> Scores:
            try:
                return self.scores(dict.fromkeys(deciding, at), unseen)
            except SingularGramError:
                if at is start:
                    raise
                return Scores({task: np.array([np.inf]) for task in self.samples})

        best, tried = search(start, score, varies=varies)
        for at, scores in tried:
            settings = {name: getattr(at, name) for name in start.searched}
            self.tried.append(settings | {"fold": fold, "score": _finite(scores.mean)})
        return best

    def _part(self, folds: Collection[int]) -> dict[str, SampleSet]:
        return {
            task: part_of(at, sorted(position for fold in folds for position in self._folds[task][fold]))
            for task, at in self.samples.items()
        }

    def _fit(self, wanted: Sequence[tuple[Calibrator, frozenset[int]]]) -> None:
        """Calibrate with settings of one method, each without some folds, and score on these; nothing twice."""
        new = {(repr(at), out): at for at, out in wanted if (repr(at), out) not in self._known}
        if not new:
            return
        update, chain = next(iter(new.values())).update, self._trials.study.pool.chain
        trials = dataclasses.replace(self._trials, sites=updated_sites(chain, self._trials.sites, update))
        fits = [(at, EVERY - out) for (_, out), at in new.items()]
        lanes = [Lane(at, folds) for at, folds in fits if isinstance(at, Layerwise)]
        efforts = [at.effort * len(folds) / NUM_FOLDS for at, folds in fits]

        def alone() -> Iterator[Tried[NDArray[np.float64]]]:
            for (at, folds), effort in zip(fits, efforts, strict=True):
                self._bar.begin(effort)
                assert isinstance(at, ClosedForm)
                yield trials.alone(self._part(folds), at, trials.sites)

        self._bar.begin(sum(efforts) if lanes else 0.0)
        for key, tried in zip(new, trials.run(self._parts, lanes) if lanes else alone(), strict=True):
            self._known[key] = tried.error or {fold: self._judges[fold].of(LANE) for fold in key[1]}
            self.costs.append(1 - len(key[1]) / NUM_FOLDS)


def _joined(by_fold: Sequence[Mapping[str, NDArray[np.float64]]]) -> Scores:
    """Scores of the samples of all folds, fold after fold."""
    return Scores({task: np.concatenate([at[task] for at in by_fold]) for task in by_fold[0]})


def outlook(
    start: Calibrator, counts: Mapping[str, int], *, has_base: bool, others: bool = False
) -> tuple[list[str], float]:
    """See `Choice.outlook`; raises at once what `choose_settings` would."""
    varies = _free(start, has_base=has_base, others=others)
    for task, count in counts.items():
        folds_of(count, task)
    known = {"start": start, **_declared(start, others=others, has_base=has_base)}
    names = [*(name for name in _PLAIN if name == "merged" or has_base), *known]
    efforts, searches = [at.effort for at in known.values()], 0.0
    if varies:
        names.append("found")
        efforts.append(start.effort)
        # Every step is tried without two neighbours of four and, where what was found wins, without each fold.
        searches = _search_effort(start, varies, has_base) * (2 * NUM_FOLDS - 3)
    effort = sum(efforts) * (NUM_FOLDS - 1) + searches + max(efforts)
    return [_title(name, known) for name in names], effort


def _search_effort(start: Calibrator, varies: Sequence[str], has_base: bool) -> float:
    """What it takes to calibrate once with everything that a search tries."""
    steps = sum(len(start.steps_from(name, has_base=has_base)) for name in varies)
    return start.effort * (1 + steps if varies else 0)


HELD_OUT = Chooser(choose_settings, outlook)
"""The best settings of one calibrator, or the merged model or base as it is."""

BEST = Chooser(functools.partial(choose_settings, others=True), functools.partial(outlook, others=True))
"""The same among all calibrators that declare candidates."""


def _free(start: Calibrator, *, has_base: bool, others: bool) -> list[str]:
    """The settings that are searched, in this order; none where the calibrator only declares candidates."""
    known = start.get_params()
    free = [name for name in start.searched if name in known and start.steps_from(name, has_base=has_base)]
    if isinstance(start, Trainer) or not (free or others or start.candidates):
        missing = "closed form" if isinstance(start, Trainer) else "setting"
        raise SpecError(f"{type(start).__name__} has no {missing} to choose", hint="Leave out --auto.")
    return free


def _declared(start: Calibrator, *, others: bool, has_base: bool) -> dict[str, Calibrator]:
    """What calibrators declare as candidates, by method and settings, except the start itself."""
    found: dict[str, Calibrator] = {}
    for method, kind in calibrators.items():
        for settings in kind.candidates if others or isinstance(start, kind) else ():
            made = start.changed(**settings) if isinstance(start, kind) else kind(**settings)
            made.check(has_base=has_base)
            if type(made) is not type(start) or made.get_params() != start.get_params():
                found[" ".join([method, *(f"{key}={value}" for key, value in settings.items())])] = made
    return found


def _record(
    decision: Decision,
    scores: Mapping[str, Scores],
    failures: Mapping[str, str],
    known: Mapping[str, Calibrator],
) -> dict[str, Any]:
    """The decision and every candidate as plain values, for `config.yaml` and the manifest."""
    compared = []
    for name in [*scores, *failures]:
        entry: dict[str, Any] = {"name": name, "title": _title(name, known)}
        if name in known:
            entry |= {"method": method_called(known[name]), "settings": plain_settings(known[name])}
        if name in scores:
            by_task = scores[name].by_task
            entry |= {"score": _finite(scores[name].mean), "n": sum(map(len, by_task.values()))}
        else:
            entry["error"] = failures[name]
        if name in decision.over_merged:
            over = dataclasses.asdict(decision.over_merged[name])
            entry |= {key: _finite(value) for key, value in over.items()}
        compared.append(entry)
    return {
        "kept": decision.name if decision.name in _PLAIN else "",
        "choice": decision.name,
        "best": decision.best,
        "base_stands": decision.base_stands,
        "compared": compared,
        "level": LEVEL,
        "correction": f"Bonferroni, {decision.among} comparisons",
    }


def _title(name: str, known: Mapping[str, Calibrator]) -> str:
    """What a candidate is called; `known` has calibrators by name, not that of a search that finds one per fold."""
    if name in _PLAIN:
        return _PLAIN[name]
    start = known["start"]
    if name not in known:
        return f"{method_called(start)} with {', '.join(start.searched)} searched"
    at = known[name]
    method, preset = method_called(at), preset_of(at)
    if preset:
        return f"{method} ({preset})"
    before = (start if name == "found" else type(at)()).get_params()
    changed = [f"{key} {value}" for key, value in at.get_params().items() if value != before[key]]
    return f"{method} with {', '.join(changed)}" if changed else method


def _finite(value: float) -> float | None:
    """The value, or None where a candidate could not be solved for: JSON has no infinity."""
    return value if math.isfinite(value) else None
