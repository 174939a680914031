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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.errors import DataError, NumericsError, SingularGramError, SpecError
from driftlens.base.files import temporary_folder
from driftlens.base.progress import Reporter
from driftlens.calibration.automatic import LEVEL, NUM_FOLDS, Decision, Scores, decide, folds_of, search
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.data.samples import part_of
from driftlens.engine.sites import updated_sites
from driftlens.jobs.calibrate.plan import Choice as Chooser
from driftlens.jobs.calibrate.plan import method_called, plain_settings, preset_of
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
from driftlens.jobs.contest.shrinking import SHARES, SHRINKING, shares_of_the_way
from driftlens.jobs.study.reopening import Kept
from driftlens.jobs.study.study import Study
from driftlens.spec.requests import CalibrationRequest

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
    kept: Kept,
    *,
    others: bool = False,
) -> tuple[Calibrator, dict[str, Any]]:
    """A calibrator for a study's calibration samples, and how it was found, as plain values.

    Where the record says `kept`, the calibrator is the start, and nothing is to be solved with it. Of the study models,
    calibration samples and heads are used; no label and no other sample is read. `others` admits candidates of other
    calibrators. What becomes of each is kept in `kept`, where an earlier sitting may have left some.
    """
    varies = _free(start, has_base=study.has_base, others=others)
    known = {"start": start, **_declared(start, others=others, has_base=study.has_base)}
    with temporary_folder() as folder:
        fits = CrossFits(study, sites, kept, _OneBar(reporter), folder / "features")
        decision, scores, failures = _decided(fits, start, varies, known)
        fits.bar.finish()
    chosen = known.get(decision.name, start)
    record = _record(decision, scores, failures, known) | {
        "score": fits.judge.score,
        "start": plain_settings(start),
        "chosen": None if decision.name in _PLAIN else plain_settings(chosen),
        "candidates": fits.tried,
        "num_held_out": {task: len(at) for task, at in fits.samples.items()},
        "num_calibrations": len(fits.costs),
        "cost_in_calibrations": sum(fits.costs),
        "seconds": round(fits.seconds, 3),
    }
    return chosen, record


def _decided(
    fits: CrossFits, start: Calibrator, varies: Sequence[str], known: dict[str, Calibrator]
) -> tuple[Decision, dict[str, Scores], dict[str, str]]:
    """The decision, what candidates score from the simplest on, and by name why some can't be calibrated with.

    `known` gains `found` where that is decided for: it is searched for anew on all folds then.
    """
    has_base, each = fits.study.has_base, NUM_FOLDS - 1
    effort = _search_effort(start, varies, has_base)
    contenders = {name: dict.fromkeys(FOLDS, at) for name, at in known.items()}
    # All in calibrations: what is sure to be tried, and what only if what was found wins.
    ahead = {name: each * at.effort for name, at in known.items()}
    perhaps = each * (effort - start.effort) * bool(varies)
    found, failures = dict[int, Calibrator](), dict[str, str]()
    for fold in FOLDS if varies else ():
        fits.bar.expect(effort * sum(_NEW[fold:]) + sum(ahead.values()) + each + _EXPECTED * perhaps)
        found[fold] = fits.searched(start, varies, fold)
    is_open = bool({*found.values()} - {start})
    if is_open:
        contenders["found"], ahead["found"] = found, each * start.effort
    given = {name: fits.as_it_is(name) for name in _PLAIN if name == "merged" or has_base}
    # What was found comes early: whether it may win decides what is left to do.
    for name in sorted(contenders, key=lambda name: name not in ("start", "found")):
        fits.bar.expect(sum(ahead.values()) + is_open * _EXPECTED * perhaps)
        try:
            given[name] = fits.scores(contenders[name])
        except (DataError, NumericsError, SpecError) as error:
            if name == "start":
                raise
            failures[name] = error.message
        scores = {at: given[at] for at in (*_PLAIN, *contenders) if at in given}
        # Equally simple are those of one calibrator besides the start.
        kinds = {type(at) for name, at in known.items() if name != "start"}
        decision = decide(scores, [[name for name in known if type(known[name]) is kind] for kind in kinds])
        del ahead[name]
        is_open = "found" in ahead or decision.name == "found"
    if decision.name == "found":
        fits.bar.expect(perhaps)
        known["found"] = fits.searched(start, varies)
    return decision, scores, failures


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

    `costs` are in calibrations of all samples.
    """

    def __init__(
        self,
        study: Study,
        sites: Mapping[int, Sequence[str]],
        kept: Kept,
        bar: _OneBar,
        spill: Path,
    ) -> None:
        self.study, self.judge, self.bar = study, Judge(study), bar
        self.samples = unlabelled(study)
        self.tried: list[dict[str, Any]] = []
        self.costs: list[float] = []
        folds = {task: folds_of(len(at), task) for task, at in self.samples.items()}
        self._held_out = [
            HeldOut(
                study, {task: part_of(at, folds[task][fold]) for task, at in self.samples.items()}, self.judge
            )
            for fold in FOLDS
        ]
        self._trials = Trials(
            study,
            self.samples,
            folds,
            lambda update: updated_sites(study.pool.chain, sites, update),
            bar,
            PHASE,
            spill,
            begin=lambda fits: bar.begin(sum(map(_effort_of, fits))),
        )
        self._ledger = KeptScores(kept, _name_of, study.team)
        self._known: dict[str, Outcome[Scored]] = {}

    @property
    def seconds(self) -> float:
        """What it took so far, over all sittings."""
        return self._ledger.seconds

    def as_it_is(self, model: str) -> Scores:
        """A model's scores on all samples."""

        def measured(models: Sequence[str]) -> Iterator[tuple[str, Outcome[Scored]]]:
            for name in models:
                yield name, Outcome({str(fold): self._held_out[fold].of(name) for fold in FOLDS})

        ((_, outcome),) = contest([model], measured, self._ledger)
        assert outcome.value is not None
        return _joined([*outcome.value.values()])

    def scores(self, by_fold: Mapping[int, Calibrator], unseen: frozenset[int] = frozenset()) -> Scores:
        """On the samples of some folds, under the calibrator for each, fitted to the others but those `unseen`."""
        fits = {fold: Fit(at, EVERY - unseen - {fold}) for fold, at in by_fold.items()}
        self._fit([*fits.values()])
        scored = []
        for fold, fit in fits.items():
            outcome = self._known[_name_of(fit)]
            if outcome.value is None:
                assert outcome.error is not None
                raise outcome.error
            scored.append(outcome.value[str(fold)])
        return _joined(scored)

    def searched(self, start: Calibrator, varies: Sequence[str], fold: int | None = None) -> Calibrator:
        """What a search finds that doesn't see a fold: it scores on each fold beside it what it calibrates on the rest.

        A calibration without two neighbours serves the searches that don't see the one or the other. One that sees all
        folds scores on each what it calibrates on the other three.
        """
        unseen = frozenset([] if fold is None else [fold])
        deciding = FOLDS if fold is None else [(fold + step) % NUM_FOLDS for step in (1, -1)]

        def score(candidates: Sequence[Calibrator]) -> list[Scores]:
            self._fit([Fit(at, EVERY - unseen - {other}) for at in candidates for other in deciding])
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

    def _fit(self, wanted: Sequence[Fit]) -> None:
        """Calibrate on some folds each and score on the others; nothing twice."""
        new = {name: fit for fit in wanted if (name := _name_of(fit)) not in self._known}
        tried: list[Fit] = []

        def attempts(fits: Sequence[Fit]) -> Iterator[tuple[Fit, Outcome[Scored]]]:
            tried.extend(fits)
            return self._trials.outcomes(fits, measured)

        def measured(fit: Fit) -> Scored:
            return {str(fold): self._held_out[fold].of(LANE) for fold in FOLDS if fold not in fit.parts}

        for fit, outcome in contest(new.values(), attempts, self._ledger):
            if fit not in tried:
                self.bar.begin(
                    _effort_of(fit)
                )  # what an earlier sitting has kept counts as if it was done here
            self._known[_name_of(fit)] = outcome
            self.costs.append(len(fit.parts) / NUM_FOLDS)


def _name_of(candidate: Fit | str) -> str:
    """What is kept of a fit, or of a model as it is, goes by this."""
    return candidate if isinstance(candidate, str) else f"{candidate.calibrator!r} {sorted(candidate.parts)}"


def _effort_of(fit: Fit) -> float:
    return fit.calibrator.effort * len(fit.parts) / NUM_FOLDS


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


def choice_of(request: CalibrationRequest) -> Chooser | None:
    """How a request wants its hyperparameters chosen, or its share of the way from the base; None where nothing is."""
    choose = (BEST if request.method is None else HELD_OUT) if request.auto else None
    if request.shrink != "auto":
        return choose
    looks = _of_one if choose is None else choose.outlook
    return dataclasses.replace(
        choose or Chooser(), outlook=functools.partial(_with_shares, looks), shares=shares_of_the_way
    )


def _of_one(start: Calibrator, counts: Mapping[str, int], *, has_base: bool) -> tuple[list[str], float]:
    return [], start.effort


def _with_shares(
    looks: Callable[..., tuple[Sequence[str], float]],
    start: Calibrator,
    counts: Mapping[str, int],
    *,
    has_base: bool,
) -> tuple[list[str], float]:
    """An outlook that is followed by a choice of the share, which calibrates once more without a fold."""
    for task, count in counts.items():
        folds_of(count, task, SHRINKING)
    titles, effort = looks(start, counts, has_base=has_base)
    return [*titles, f"shares {', '.join(f'{share:g}' for share in SHARES)} of the way from the base"], (
        effort + start.effort * (NUM_FOLDS - 1) / NUM_FOLDS
    )


def _free(start: Calibrator, *, has_base: bool, others: bool) -> list[str]:
    """The settings that are searched, in this order; none where the calibrator only declares candidates."""
    known = start.get_params()
    free = [name for name in start.searched if name in known and start.steps_from(name, has_base=has_base)]
    if not start.takes_sites or not (free or others or start.candidates):
        missing = "setting" if start.takes_sites else "closed form"
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
