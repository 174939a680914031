"""The best of several ways to repair a run, chosen from its calibration samples alone, by `Judge` on held-out ones.

Candidates, the simpler ones first: the merged model as it is, the base, the calibrator that was asked for, what a
search of its settings finds, and what calibrators declare as their `candidates`. Where the merged model or the base
stays, the calibration solves no module, and its variant is that very model under the name that was asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from driftlens.calibration.automatic import (
    CHOSEN,
    DECISION_FOLD,
    LEVEL,
    NUM_FOLDS,
    SEARCH_FOLD,
    Candidate,
    Comparison,
    Scores,
    decide,
    folds_of,
    search,
)
from driftlens.calibration.calibrator import Calibrator, Trained, calibrators, closed_form
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.forward_order import Lane
from driftlens.engine.problems import ClosedForm
from driftlens.engine.site_selection import updated_sites
from driftlens.errors import DataError, NumericsError, SpecError
from driftlens.pipeline.calibrate.plan import Choice as Chooser
from driftlens.pipeline.calibrate.plan import method_called, preset_of
from driftlens.pipeline.search.judge import Judge
from driftlens.pipeline.search.trials import Trials, with_settings
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter

PHASE = "choose"
_FIELDS = tuple(field.name for field in dataclasses.fields(Candidate))


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
    samples, folds = _samples(study)
    held_out = {
        fold: {task: part_of(at, folds[task][fold]) for task, at in samples.items()}
        for fold in range(NUM_FOLDS)
    }
    with tempfile.TemporaryDirectory() as folder:
        spill = pathlib.Path(folder) / "features"
        looking, deciding = (
            Trials(study, sites, held_out[fold], judge, reporter, PHASE, spill)
            for fold in (SEARCH_FOLD, DECISION_FOLD)
        )
        contenders: dict[str, Calibrator] = {"start": start}
        tried: dict[Candidate, Scores] = {}
        if varies:
            found, tried = _searched(looking, start, held_out, varies)
            contenders |= {} if found is start else {"found": found}
        contenders |= _declared(start, others=others, has_base=study.has_base)
        plain = ["merged", *(["base"] if study.has_base else [])]
        scores = {name: Scores(deciding.of(name)) for name in plain}
        failures: dict[str, str] = {}
        rest = {
            task: part_of(at, sorted({*range(len(at))} - {*folds[task][DECISION_FOLD]}))
            for task, at in samples.items()
        }
        for name, calibrator in contenders.items():
            assert isinstance(calibrator, ClosedForm)
            mine = updated_sites(study.pool.chain, sites, calibrator.update)
            try:
                scores[name] = Scores(deciding.alone(rest, calibrator, mine).by_task)
            except (DataError, NumericsError, SpecError) as error:
                if name == "start":
                    raise
                failures[name] = error.message
    decision = decide(scores)
    told = {
        name: _told(name, at, contenders, decision.over_merged.get(name)) for name, at in scores.items()
    } | {name: _told(name, None, contenders, None) | {"error": text} for name, text in failures.items()}
    kept = decision.name if decision.name in plain else ""
    record = {
        "score": judge.score,
        "kept": kept,
        "is_merged_kept": decision.name == "merged",
        "is_start_kept": decision.name == "start",
        "choice": decision.name,
        "best": decision.best,
        "base_stands": decision.base_stands,
        "compared": list(told.values()),
        "level": LEVEL,
        "correction": f"Bonferroni, {decision.among} comparisons",
        "start": _plain(start.get_params()),
        "chosen": None if kept else _plain(contenders[decision.name].get_params()),
        "candidates": [
            dataclasses.asdict(candidate) | {"fold": SEARCH_FOLD, "score": _finite(at.mean)}
            for candidate, at in tried.items()
        ],
        "num_held_out": {task: len(at) for task, at in held_out[DECISION_FOLD].items()},
        "num_calibrations": len(tried) + len(contenders),
        # Of all samples: the search leaves two folds out, and the decision one.
        "cost_in_calibrations": len(tried) * (1 - 2 / NUM_FOLDS) + len(contenders) * (1 - 1 / NUM_FOLDS),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return contenders.get(decision.name, start), record


def _searched(
    trials: Trials[Any],
    start: Calibrator,
    folds: Mapping[int, Mapping[str, SampleSet]],
    varies: Sequence[str],
) -> tuple[Calibrator, dict[Candidate, Scores]]:
    """What a search finds without the samples that decide: what had seen them would do better on them."""
    settings = start.get_params()
    first = Candidate(*(float(settings[name]) for name in _FIELDS))
    seen = frozenset(range(NUM_FOLDS)) - {SEARCH_FOLD, DECISION_FOLD}
    parts = {task: [folds[fold][task] for fold in folds] for task in folds[DECISION_FOLD]}

    def calibrator(candidate: Candidate) -> Calibrator:
        return start if candidate == first else with_settings(start, dataclasses.asdict(candidate))

    def evaluate(candidates: Sequence[Candidate]) -> list[Scores]:
        lanes = [Lane(closed_form(calibrator(candidate)), seen) for candidate in candidates]
        scores = []
        for candidate, tried in zip(candidates, trials.run(parts, lanes), strict=True):
            if tried.error is not None and candidate == first:
                raise tried.error
            # What can't be solved for is worse than anything.
            scores.append(Scores(tried.by_task or {task: np.array([np.inf]) for task in parts}))
        return scores

    best, tried = search(first, evaluate, varies=varies)
    return calibrator(best), tried


def require_choice(
    start: Calibrator, counts: Mapping[str, int], *, has_base: bool, others: bool = False
) -> None:
    """Refuse what nothing can be chosen for, given the samples by task; `choose_settings` would too, but later."""
    _free(start, has_base=has_base, others=others)
    for task, count in counts.items():
        folds_of(count, task)


HELD_OUT = Chooser(choose_settings, require_choice)
"""The best settings of one calibrator, or the merged model or base as it is."""

BEST = Chooser(
    functools.partial(choose_settings, others=True), functools.partial(require_choice, others=True)
)
"""The same among all calibrators that declare candidates."""


def _free(start: Calibrator, *, has_base: bool, others: bool) -> list[str]:
    """The settings that are searched, in this order; none where the calibrator only declares candidates."""
    settings = start.get_params()
    missing = [name for name in _FIELDS if name not in settings]
    if isinstance(start, Trained) or (missing and not (others or start.candidates)):
        raise SpecError(
            f"{type(start).__name__} has no {', '.join(missing) or 'closed form'} to choose",
            hint="Leave out --auto.",
        )
    if missing:
        return []
    if settings.get("anchor") == "none":
        return ["alpha"]
    return [name for name in CHOSEN if has_base or name != "rho"]


def _declared(start: Calibrator, *, others: bool, has_base: bool) -> dict[str, Calibrator]:
    """What calibrators declare as candidates, by method and settings, except the start itself."""
    found: dict[str, Calibrator] = {}
    for method, kind in calibrators.items():
        for settings in kind.candidates if others or isinstance(start, kind) else ():
            made = with_settings(start, settings) if isinstance(start, kind) else kind(**settings)
            made.check(has_base=has_base)
            if type(made) is not type(start) or made.get_params() != start.get_params():
                found[" ".join([method, *(f"{key}={value}" for key, value in settings.items())])] = made
    return found


def _samples(study: Study) -> tuple[dict[str, SampleSet], dict[str, list[range]]]:
    """The calibration samples of every task without their labels, and the positions of each fold's."""
    found = {}
    for task, at in study.tasks.items():
        if at.calibration is None:
            raise DataError(f"task {task} has no calibration samples")
        found[task] = dataclasses.replace(at.calibration, labels=None)
    return found, {task: folds_of(len(samples), task) for task, samples in found.items()}


def _told(
    name: str, scores: Scores | None, contenders: Mapping[str, Calibrator], over: Comparison | None
) -> dict[str, Any]:
    """One candidate as plain values, for `config.yaml` and the manifest."""
    known = {"merged": "the merged model as it is", "base": "the base"}
    found: dict[str, Any] = {"name": name, "title": known.get(name, "")}
    if name in contenders:
        at = contenders[name]
        method, preset, settings = method_called(at), preset_of(at), at.get_params()
        if not preset:
            plain = type(at)().get_params()
            start = contenders["start"].get_params() if name == "found" else plain
            changed = [f"{key} {value}" for key, value in settings.items() if value != start.get(key)]
        title = f"{method} ({preset})" if preset else " ".join([method, "with", ", ".join(changed)])
        found |= {
            "method": method,
            "settings": _plain(settings),
            "title": title if preset or changed else method,
        }
    if scores is not None:
        found |= {"score": _finite(scores.mean), "n": sum(map(len, scores.by_task.values()))}
    if over is not None:
        found |= {key: _finite(value) for key, value in dataclasses.asdict(over).items()}
    return found


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _finite(value: float) -> float | None:
    """The value, or None where a candidate could not be solved for: JSON has no infinity."""
    return value if math.isfinite(value) else None
