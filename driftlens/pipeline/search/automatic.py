"""Settings of a calibration chosen from its calibration samples alone: candidates run, held-out samples scored.

Where no calibration is clearly better than the merged model as it is, that is what is chosen: the calibration then
solves no module, and its variant is the merged model, whose numbers stand under the name that was asked for.
"""

from __future__ import annotations

import dataclasses
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
    Choice,
    Comparison,
    Scores,
    choose,
    folds_of,
)
from driftlens.calibration.calibrator import Calibrator, closed_form
from driftlens.data.samples import SampleSet
from driftlens.engine.forward_order import Lane
from driftlens.errors import DataError, SpecError
from driftlens.pipeline.calibrate.plan import Choice as Chooser
from driftlens.pipeline.search.judge import Judge
from driftlens.pipeline.search.trials import Trials, part_of, with_settings
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter

PHASE = "choose"


@torch.no_grad()
def choose_settings(
    study: Study, start: Calibrator, sites: Mapping[int, Sequence[str]], reporter: Reporter
) -> tuple[Calibrator, dict[str, Any]]:
    """A calibrator for a study's calibration samples, and how it was found, as plain values.

    Where the record says `is_merged_kept`, the calibrator is the start, and nothing is to be solved with it.

    The settings of `start` are kept unless others are clearly better. Of the study models, calibration samples and
    heads are used; no label and no other sample is read.

    Raises:
        SpecError: the calibrator has nothing to choose.
        DataError: a task has too few samples to hold any out.
        DriftLensError: the start itself can't be calibrated with.
    """
    started, varies = time.perf_counter(), _free(start, has_base=study.has_base)
    settings = start.get_params()
    first = Candidate(*(float(settings[field.name]) for field in dataclasses.fields(Candidate)))
    parts = _folds(study)
    judge = Judge(study)

    def calibrator(candidate: Candidate) -> Calibrator:
        return start if candidate == first else with_settings(start, dataclasses.asdict(candidate))

    def evaluate(candidates: Sequence[Candidate], fold: int) -> list[Scores]:
        others = frozenset(range(NUM_FOLDS)) - {fold}
        lanes = [Lane(closed_form(calibrator(candidate)), others) for candidate in candidates]
        scores = []
        for candidate, tried in zip(candidates, trials[fold].run(parts, lanes), strict=True):
            if tried.error is not None and candidate == first:
                raise tried.error
            # What can't be solved for is worse than anything.
            scores.append(Scores(tried.by_task or {task: np.array([np.inf]) for task in parts}))
        return scores

    with tempfile.TemporaryDirectory() as folder:
        spill = pathlib.Path(folder) / "features"
        held_out = {
            fold: {task: folds[fold] for task, folds in parts.items()}
            for fold in (SEARCH_FOLD, DECISION_FOLD)
        }
        trials = {
            fold: Trials(study, sites, samples, judge, reporter, PHASE, spill)
            for fold, samples in held_out.items()
        }
        found = choose(first, evaluate, lambda fold: Scores(trials[fold].of("merged")), varies=varies)
    num_held_out = {task: len(samples) for task, samples in held_out[SEARCH_FOLD].items()}
    record = _record(found, first, judge.score, num_held_out)
    record["seconds"] = round(time.perf_counter() - started, 3)
    return calibrator(found.chosen or first), record


def require_choice(start: Calibrator, counts: Mapping[str, int], *, has_base: bool) -> None:
    """Refuse what nothing can be chosen for, given the samples by task; `choose_settings` would too, but later."""
    _free(start, has_base=has_base)
    for task, count in counts.items():
        folds_of(count, task)


HELD_OUT = Chooser(choose_settings, require_choice)
"""Hyperparameters chosen by how well calibrations do on samples that they have not seen."""


def _free(start: Calibrator, *, has_base: bool) -> list[str]:
    """The settings that make a difference, in the order in which they are searched."""
    settings = start.get_params()
    missing = [field.name for field in dataclasses.fields(Candidate) if field.name not in settings]
    if missing:
        raise SpecError(
            f"{type(start).__name__} has no {', '.join(missing)} to choose", hint="Leave out --auto."
        )
    if settings.get("anchor") == "none":
        return ["alpha"]
    return [name for name in CHOSEN if has_base or name != "rho"]


def _folds(study: Study) -> dict[str, list[SampleSet]]:
    """The calibration samples of every task in folds, without their labels."""
    found = {}
    for task, at in study.tasks.items():
        if at.calibration is None:
            raise DataError(f"task {task} has no calibration samples")
        samples = dataclasses.replace(at.calibration, labels=None)
        found[task] = [part_of(samples, fold) for fold in folds_of(len(samples), task)]
    return found


def _record(found: Choice, start: Candidate, score: str, num_held_out: Mapping[str, int]) -> dict[str, Any]:
    """The search as plain values, for `config.yaml`."""
    return {
        "score": score,
        "start": dataclasses.asdict(start),
        "chosen": None if found.chosen is None else dataclasses.asdict(found.chosen),
        "is_start_kept": found.chosen == start,
        "is_merged_kept": found.chosen is None,
        "level": LEVEL,
        "deciding": {name: _told(at) for name, at in found.deciding.items()},
        "over_merged": _told(found.over_merged),
        "found": dataclasses.asdict(found.found),
        "advantage": _finite(found.over_start.advantage) if found.over_start else 0.0,
        "standard_error": _finite(found.over_start.standard_error) if found.over_start else 0.0,
        "candidates": [
            dataclasses.asdict(trial.candidate) | {"fold": trial.fold, "score": _finite(trial.score)}
            for trial in found.trials
        ],
        "num_held_out": dict(num_held_out),
        "num_calibrations": len(found.trials),
        # Of all samples: each trial leaves one fold out.
        "cost_in_calibrations": len(found.trials) * (1 - 1 / NUM_FOLDS),
    }


def _told(found: Comparison) -> dict[str, Any]:
    return {name: _finite(value) for name, value in dataclasses.asdict(found).items()}


def _finite(value: float) -> float | None:
    """The value, or None where a candidate could not be solved for: JSON has no infinity."""
    return value if math.isfinite(value) else None
