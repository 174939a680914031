"""The samples of a sweep: calibration samples by seed, and those that no seed calibrates on to measure with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from driftlens.data.samples import SampleSet
from driftlens.data.sources import Access, Split, data_sources
from driftlens.errors import DataError
from driftlens.pipeline.opening import OpenModels, open_data
from driftlens.pipeline.sample_parts import without
from driftlens.pipeline.study import Study, TaskSamples
from driftlens.spec import RunSpec, load_spec

BySeed = Mapping[int, Mapping[str, SampleSet]]
"""Seed -> task -> its calibration samples."""


def samples_by_seed(
    spec: RunSpec,
    models: OpenModels,
    first: Mapping[str, SampleSet],
    seeds: Sequence[int],
    *,
    offline: bool,
    trust: bool,
) -> BySeed:
    """As many calibration samples for every seed as the run's own seed has, drawn as the spec would with that seed.

    Args:
        spec: of the run.
        models: for the preprocessing.
        first: the samples of the first seed.
        seeds: the run's own first.
        offline: whether only files that were downloaded before may be used.
        trust: whether Python code named in the spec may run.

    Raises:
        DataError: a source can't be read any more.
    """
    preprocess = models.architecture.preprocess
    assert preprocess is not None  # every loader that a spec can name brings one
    found = {seeds[0]: dict(first)}
    for seed in seeds[1:]:
        drawn = _with_seed(spec, seed, {task: len(samples) for task, samples in first.items()})
        found[seed] = {
            task: open_data(drawn, task, preprocess, offline=offline, trust=trust).calibration()
            for task in first
        }
    return found


def measured_elsewhere(
    study: Study, spec: RunSpec, samples: BySeed, *, offline: bool, trust: bool
) -> dict[str, TaskSamples]:
    """The study's tasks without those diagnosis and test samples that some seed calibrates on.

    That can only be where a task's splits draw from the same place.

    Raises:
        DataError: nothing is left to measure with.
    """
    tasks = dict(study.tasks)
    for task, at_hand in tasks.items() if len(samples) > 1 else ():
        seen = {name for drawn in samples.values() for name in drawn[task].ids}
        shared = _shared_splits(spec, task, offline=offline, trust=trust)
        diagnosis, test = at_hand.diagnosis, at_hand.test
        if "diagnosis" in shared:
            diagnosis = without(diagnosis, seen)
        if "test" in shared and test is not None:
            test = without(test, seen)
        if not len(diagnosis) or (test is not None and not len(test)):
            raise DataError(
                f"task {task}: over {len(samples)} seeds every sample serves calibration, none is left to measure with",
                hint="Sweep with fewer seeds or fewer samples, or give calibration a split of its own.",
            )
        tasks[task] = dataclasses.replace(at_hand, diagnosis=diagnosis, test=test)
    return tasks


def _shared_splits(spec: RunSpec, task: str, *, offline: bool, trust: bool) -> set[Split]:
    """The splits that draw from where calibration draws from."""
    entry = spec.data.tasks[task]
    source, access = data_sources[entry.kind], Access(trust=trust, offline=offline)
    origin = source(entry, "calibration", access).origin
    own: Split = "diagnosis" if getattr(entry, "diagnosis", None) is not None else "test"
    shared: set[Split] = {"test"} if source(entry, "test", access).origin == origin else set()
    if source(entry, own, access).origin == origin:
        shared.add("diagnosis")
    return shared


def _with_seed(spec: RunSpec, seed: int, counts: Mapping[str, int]) -> RunSpec:
    values = spec.as_dict()
    values["data"]["defaults"]["seed"] = seed
    for task, count in counts.items():
        values["data"][task]["n"] = count
    return load_spec(values)
