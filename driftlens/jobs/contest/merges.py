"""Merges of the same experts side by side: which is nearest to them, on samples that no method has read."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.access import Access
from driftlens.base.errors import Cancelled, DataError, DriftLensError, SpecError
from driftlens.base.files import PathLike, temporary_folder
from driftlens.base.intervals import Interval, mean_interval, mean_over_tasks
from driftlens.base.progress import CancelToken, ProgressSink, Reporter
from driftlens.base.settings import resolve
from driftlens.base.variants import expert_of
from driftlens.calibration.automatic import Scores, folds_of
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.exactness import exact_products
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.calibrate.variants import anchors, with_parameters
from driftlens.jobs.contest.judge import LANE, Judge, drift_scores
from driftlens.jobs.study.merging import merged_source, save_merge
from driftlens.jobs.study.opening import open_study
from driftlens.jobs.study.reopening import reopened
from driftlens.jobs.study.study import Study
from driftlens.merging.method import merge_methods
from driftlens.models.saving import require_target
from driftlens.spec import RunSpec

PHASE = "compare"
SCALES = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)
MEASURES = ("kl", "drift_rel")

ByTask = dict[str, NDArray[np.float64]]


class Wanted(NamedTuple):
    """A merge to compare: what it is called, its method, and the settings that are given."""

    name: str
    method: str
    settings: Mapping[str, object]


def wanted_merges(given: Sequence[tuple[str, Mapping[str, object]]]) -> list[Wanted]:
    """The merges asked for by method and settings, `all` being every method; no file is opened.

    Raises:
        SpecError: no such method, a setting that it does not have, a value that is not allowed, or one merge twice.
    """
    methods = sorted(merge_methods)
    asked = [(at, own) for name, own in given for at in (methods if name == "all" and not own else (name,))]
    found = {}
    for method, settings in asked:
        resolve(merge_methods[method].function, settings, f"merge method {method!r}")
        name = " ".join([method, *(f"{key}={value}" for key, value in settings.items())])
        if name in found:
            raise SpecError(f"{name} is to be compared with itself", hint="Name every merge once.")
        found[name] = Wanted(name, method, settings)
    return list(found.values())


@exact_products()
def compare_merges(
    spec: RunSpec,
    wanted: Sequence[Wanted],
    *,
    keep: PathLike | None = None,
    access: Access = Access(),
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> dict[str, Any]:
    """Merges ranked by how near their final features and class probabilities are to the experts', as plain values.

    No label is read. Where one of the methods reads calibration samples, they get three quarters and all are judged
    on the fourth; otherwise on all. `behind` is by how much one is farther from the experts than the first, with an
    interval over the same samples that holds for all pairs together (Bonferroni); where that reaches 0 it is tied.

    A merged model that the spec names is compared too, and so is the base; under `keep` every merge is saved.

    Returns:
        `score` (what ranks), `samples` (by task), `held_out`, and `merges`, best first; one that can't be made has a
        `reason` instead of numbers.

    Raises:
        Cancelled: somebody asked to stop; what was kept is whole.
        DriftLensError: as for `open_study`, a place to keep a merge at is taken, or none of the merges can be made; the
            reason of the first.
    """
    study, models = open_study(spec, access=access)
    kept = {} if keep is None else {each.name: Path(keep, re.sub(r"[ /]", "_", each.name)) for each in wanted}
    for place in kept.values():
        require_target(models.architecture, place)
    reporter = Reporter(on_progress, cancel)
    held_out = any(merge_methods[merge.method].runs_models for merge in wanted)
    shown, judged = _samples(study, held_out=held_out)
    judge = Judge(study)
    experts = {}
    for task, samples in judged.items():
        reporter.step(PHASE, 0, len(wanted), f"expert of {task}")
        experts[task] = final_features(study.pool, expert_of(task), task, samples, study.settings.pool)
    at, rows, scores = 0, [], dict[str, dict[str, ByTask]]()

    def measure(name: str, model: str) -> None:
        scores[name] = {measure: {} for measure in MEASURES}
        for task, expert in experts.items():
            reporter.step(PHASE, at, len(wanted), f"{name} on {task}")
            found = final_features(study.pool, model, task, judged[task], study.settings.pool)
            scores[name]["drift_rel"][task] = drift_scores(found, expert).cpu().numpy()
            if not judge.bare:
                scores[name]["kl"][task] = judge(model, task, found, expert)

    with torch.no_grad(), temporary_folder() as folder:
        for name in ("base", "merged"):
            if name in study.pool:
                rows.append(_row(name, "", {}))
                measure(name, name)
        errors = []
        for at, merge in enumerate(wanted):
            reporter.step(PHASE, at, len(wanted), merge.name)
            row, began = _row(merge.name, merge.method, merge.settings), time.perf_counter()
            rows.append(row)
            try:
                method, settings, seen = merge.method, merge.settings, study.blinded(shown)
                where, stop = folder / "merged", Reporter(cancel=cancel)
                source = merged_source(models, method, settings, seen, beside=where, reporter=stop)
                if keep is not None:
                    save_merge(models, method, settings, kept[merge.name], seen, source=source)
                row["seconds"] = round(time.perf_counter() - began, 3)
                study.pool.add(LANE, source)
                measure(merge.name, LANE)
            except Cancelled:
                raise
            except DriftLensError as error:
                scores.pop(merge.name, None)
                row["reason"] = error.message.replace(f"features of {LANE} ", f"features of {merge.name} ", 1)
                errors.append(error)
        if len(errors) == len(wanted):
            raise errors[0]
        reporter.step(PHASE, len(wanted), len(wanted))
    deciding = "drift_rel" if judge.bare else "kl"
    return {
        "name": spec.name,
        "score": deciding,
        "samples": {task: len(samples) for task, samples in judged.items()},
        "held_out": held_out,
        "merges": _ranked(rows, scores, deciding),
    }


@torch.no_grad()
@exact_products()
def scaled_layers(
    run: PathLike,
    layers: Sequence[int],
    *,
    access: Access = Access(),
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> list[dict[str, Any]]:
    """What one layer of a run's merged model at a time gains in relative final drift by going farther from the base.

    A layer becomes base + scale (merged - base). The best of `SCALES` on three quarters of the calibration samples is
    compared with the merged model on the fourth; intervals are good for all layers together. No label is read.

    Raises:
        SpecError: the run has no base, or was made from live modules.
        DriftLensError: as for `reopened`, or there are too few samples to hold any out.
    """
    study, _ = reopened(run, with_calibrations=False, access=access)
    if not study.has_base:
        raise SpecError("scaling a layer takes a base to scale from, and the run has none")
    pool, reporter = study.pool, Reporter(on_progress, cancel)
    rest, held = _samples(study, held_out=True, bare=True)
    features = {
        id(samples): {
            task: final_features(pool, expert_of(task), task, at, study.settings.pool)
            for task, at in samples.items()
        }
        for samples in (rest, held)
    }

    def drift(model: str, samples: Mapping[str, SampleSet]) -> Scores:
        found = {}
        for task, expert in features[id(samples)].items():
            own = final_features(pool, model, task, samples[task], study.settings.pool)
            found[task] = drift_scores(own, expert).cpu().numpy()
        return Scores(found)

    def scaled(index: int, scale: float) -> str:
        merged, base = pool.source("merged"), pool.source("base")
        keys = [(index, name) for name in pool.chain.layers[index - 1].parameters]
        pool.add(
            LANE, with_parameters(pool.chain, merged, base, anchors(pool.chain, merged, base, scale, keys))
        )
        return LANE

    before, start, rows = drift("merged", held), drift("merged", rest), []
    for index in reporter.track(layers, "scale", lambda index: f"layer {index}"):
        found = {scale: start if scale == 1 else drift(scaled(index, scale), rest) for scale in SCALES}
        best = min(found, key=lambda scale: (found[scale].mean, abs(scale - 1)))
        row: dict[str, Any] = {
            "layer": index,
            "scale": best,
            "tried": SCALES,
            "drift_rel": before.mean,
            "n": sum(map(len, held.values())),
        }
        if best != 1:
            gain = drift(scaled(index, best), held).compared_with(before, among=len(layers))
            row |= {
                **_ends("advantage", Interval(gain.advantage, gain.low, gain.high)),
                "is_clear": gain.is_clear,
            }
        rows.append(row)
    return rows


def _samples(
    study: Study, *, held_out: bool, bare: bool = False
) -> tuple[dict[str, SampleSet], dict[str, SampleSet]]:
    """The samples that may be read, and those to judge on; of texts these, if `bare` both, are the question alone."""
    shown, judged = {}, {}
    for task, at in study.tasks.items():
        if at.calibration is None:
            raise DataError(f"task {task} has no calibration samples")
        shown[task] = judged[task] = dataclasses.replace(at.calibration, labels=None)
        texts = at.calibration.texts
        if texts is not None and texts.reader is not None and texts.shown != "none":
            judged[task] = shown[task].answering([""] * len(shown[task]))
            shown[task] = judged[task] if bare else shown[task]
        if held_out:
            *rest, last = folds_of(len(shown[task]), task, "judging on held-out samples")
            shown[task] = part_of(shown[task], sorted(position for fold in rest for position in fold))
            judged[task] = part_of(judged[task], last)
    return shown, judged


def _row(name: str, method: str, settings: Mapping[str, object]) -> dict[str, Any]:
    return {"place": None, "merge": name, "method": method, "settings": dict(settings), "reason": ""}


def _ranked(
    rows: Sequence[dict[str, Any]], scores: Mapping[str, Mapping[str, ByTask]], deciding: str
) -> list[dict[str, Any]]:
    """The rows with their numbers, best first; those without come last."""
    order = sorted(scores, key=lambda name: Scores(scores[name][deciding]).mean)
    pairs = max(1, len(order) * (len(order) - 1) // 2)
    best = Scores(scores[order[0]][deciding])
    for row in rows:
        if row["merge"] not in scores:
            continue
        own = scores[row["merge"]]
        row["place"] = order.index(row["merge"]) + 1
        for measure in MEASURES:
            by_task = {task: _interval(values) for task, values in own[measure].items()}
            row |= _ends(measure, mean_over_tasks([*by_task.values()]))
            row.setdefault("by_task", {})[measure] = {
                task: _ends("value", found) for task, found in by_task.items()
            }
        behind = best.compared_with(Scores(own[deciding]), among=pairs)
        row |= _ends("behind", Interval(behind.advantage, behind.low, behind.high))
        row["is_tied"] = row["place"] > 1 and not behind.is_clear
        row["n"] = sum(map(len, own[deciding].values()))
    return sorted(rows, key=lambda row: row["place"] or math.inf)


def _interval(values: NDArray[np.float64]) -> Interval:
    return mean_interval(float(values.mean()), float(values.std()), len(values))


def _ends(name: str, found: Interval) -> dict[str, float | None]:
    ends = {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return {key: value if math.isfinite(value) else None for key, value in ends.items()}
