"""In what two runs differ that keeps their numbers from being a before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from driftlens.records.run import DriftRun
from driftlens.variants import expert_of


def mismatches(a: DriftRun, b: DriftRun) -> tuple[str, ...]:
    """The fields in which runs differ, in words: tasks, layers, samples, classes, experts; empty where none does.

    Calibration samples may differ: that is what calibrations are compared for.
    """
    return () if a is b else tuple(_differences(a, b))


def _differences(a: DriftRun, b: DriftRun) -> Iterator[str]:
    if set(a.tasks) != set(b.tasks):
        yield f"tasks ({', '.join(a.tasks) or 'none'} against {', '.join(b.tasks) or 'none'})"
    if a.manifest.layers != b.manifest.layers:
        yield f"layers ({_chain(a)} against {_chain(b)})"
    shared = [task for task in a.tasks if task in b.tasks]
    for split in ("diagnosis", "test"):
        yield from _differing(f"{split} samples", shared, *(_digests(run, split) for run in (a, b)))
    yield from _differing("class names", shared, a.manifest.classes, b.manifest.classes)
    yield from _differing("experts", shared, _experts(a), _experts(b))


def _differing(what: str, tasks: list[str], a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Tasks on which both runs say something, and not the same."""
    unequal = [task for task in tasks if task in a and task in b and a[task] != b[task]]
    if unequal:
        yield f"{what} of {', '.join(unequal)}"


def _digests(run: DriftRun, split: str) -> Mapping[str, str]:
    return run.manifest.sample_id_digests.get(split, {})


def _experts(run: DriftRun) -> Mapping[str, str]:
    models = run.manifest.models
    return {task: models[expert_of(task)].digest for task in run.tasks if expert_of(task) in models}


def _chain(run: DriftRun) -> str:
    layers = run.manifest.layers
    return f"{len(layers)} layers, {layers[0].path} to {layers[-1].path}" if layers else "none"
