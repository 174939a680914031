"""Merges of the same experts side by side: which is nearest to them, on samples that no method has read."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.access import Access
from driftlens.calibration.automatic import Scores, folds_of
from driftlens.data.samples import SampleSet
from driftlens.engine.exactness import exact_products
from driftlens.errors import Cancelled, DataError, DriftLensError, SpecError
from driftlens.files import PathLike
from driftlens.merging.method import merge_methods
from driftlens.models.sources import StateSource
from driftlens.pipeline.analyze.evaluation import final_features
from driftlens.pipeline.search.judge import LANE, Judge, drift_scores
from driftlens.pipeline.search.trials import part_of
from driftlens.pipeline.study.merging import merged_source, save_merge
from driftlens.pipeline.study.opening import OpenModels, open_study
from driftlens.pipeline.study.study import Study
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.records.intervals import Interval, mean_interval, mean_over_tasks
from driftlens.settings import resolve
from driftlens.spec import RunSpec
from driftlens.variants import expert_of

PHASE = "compare"
MEASURES = ("kl", "drift_rel")

ByTask = dict[str, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A merge to compare: its name, a method of `merge_methods`, and those of its settings that are given."""

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

    Args:
        spec: models and data; a merged model that it names is compared too, and so is the base.
        wanted: the merges.
        keep: folder under which every merged model is saved; None keeps none.
        access: what may be used.
        on_progress: called with every event.
        cancel: asked whether to stop.

    Returns:
        `score` (what ranks), `samples` (by task), `held_out`, and `merges`, best first; one that can't be made has a
        `reason` instead of numbers.

    Raises:
        DriftLensError: as for `open_study`, or none of the merges can be made; the reason of the first.
    """
    study, models = open_study(spec, access=access)
    reporter = Reporter(on_progress, cancel)
    held_out = any(merge_methods[merge.method].runs_models for merge in wanted)
    shown, judged = _samples(study, held_out=held_out)
    judge = Judge(study)
    experts = {
        task: final_features(study.pool, expert_of(task), task, samples, study.settings.pool)
        for task, samples in judged.items()
    }
    rows, scores = [], dict[str, dict[str, ByTask]]()

    def measure(name: str, model: str) -> None:
        scores[name] = {measure: {} for measure in MEASURES}
        for task, expert in experts.items():
            found = final_features(study.pool, model, task, judged[task], study.settings.pool)
            scores[name]["drift_rel"][task] = drift_scores(found, expert).cpu().numpy()
            if not judge.bare:
                scores[name]["kl"][task] = judge(model, task, found, expert)

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
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
                source = _merged(models, merge, study.blinded(shown), keep, Path(folder), cancel)
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


def _samples(study: Study, *, held_out: bool) -> tuple[dict[str, SampleSet], dict[str, SampleSet]]:
    """The samples that methods may read, and those that all are judged on; texts are judged on the question alone."""
    shown, judged = {}, {}
    for task, at in study.tasks.items():
        if at.calibration is None:
            raise DataError(f"task {task} has no calibration samples")
        whole = dataclasses.replace(at.calibration, labels=None)
        shown[task] = judged[task] = whole
        if held_out:
            last, *rest = reversed(folds_of(len(whole), task))
            shown[task] = part_of(whole, sorted(position for fold in rest for position in fold))
            judged[task] = part_of(whole, last)
        texts = whole.texts
        if texts is not None and texts.reader is not None and texts.shown != "none":
            bare = whole.answering([""] * len(whole))
            judged[task] = part_of(bare, last) if held_out else bare
    return shown, judged


def _merged(
    models: OpenModels,
    merge: Wanted,
    study: Study,
    keep: PathLike | None,
    scratch: Path,
    cancel: CancelToken | None,
) -> StateSource:
    source = merged_source(
        models,
        merge.method,
        merge.settings,
        study,
        beside=scratch / "merged",
        reporter=Reporter(cancel=cancel),
    )
    if keep is not None:
        place = Path(keep) / merge.name.replace(" ", "_").replace("/", "_")
        save_merge(models, merge.method, merge.settings, place, study, source=source)
    return source


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
