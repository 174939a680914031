"""One task through the walk: rows of the layer, sample and output tables, and the features worth keeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.data.samples import Batch, SampleSet
from driftlens.diagnostic import Diagnostic, Seen, chosen
from driftlens.engine.walk import LayerView, waiting_bytes, walk
from driftlens.models.chain import Pool, State, pooled
from driftlens.pipeline.analyze.verification import LibraryDrift, precision_error
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter
from driftlens.variants import expert_of

Array = NDArray[np.float64]
Row = dict[str, object]
Features = Mapping[tuple[str, int], NDArray[np.float32]]
"""Pooled features [n, d] by (variant, layer)."""


@dataclass
class TaskDiagnosis:
    """What one task's walk found.

    `features` holds pooled features [n, d] (float32) by (variant, layer); the expert's are among them.
    `precision_error` is that of `driftlens.pipeline.analyze.verification`; NaN where it was not measured.
    """

    layers: list[Row] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    features: dict[tuple[str, int], NDArray[np.float32]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    precision_error: float = float("nan")


@torch.no_grad()
def diagnose(
    study: Study, task: str, reporter: Reporter, base: Mapping[int, Array] | None = None
) -> TaskDiagnosis:
    """What every diagnostic of features finds of every variant on one task's diagnosis samples.

    Args:
        study: whose variants walk beside the expert.
        task: one of its tasks.
        reporter: told of every layer; may cancel.
        base: norms of the base's drift [n] by layer, where it is known and does not walk along.

    Raises:
        NumericsError: weights or features are NaN or infinite, or the drift is not that of ordinary forward passes or
            of float64.
        Cancelled: somebody asked to stop.
    """
    at_hand = study.tasks[task]
    meter = LayerMeter(study, task, reporter, "analyze")
    measured = chosen(study.settings.options)
    recorder = _Recorder(study.settings.pool, study.variants[0], measured)
    library = LibraryDrift(study, task, next(at_hand.diagnosis.batches()))
    for chunk in _chunks(study, task, at_hand.diagnosis):
        views = walk(study.pool, task, study.variants, chunk, ids=at_hand.diagnosis.ids)
        for view in views:
            if view.variant == study.variants[0]:
                meter.step(view.layer.index, "drift")
            recorder.add(view)
            library.compare(view)
    features = recorder.features()
    found = _tables(study, task, recorder, features, library, measured, base)
    if task == next(iter(study.tasks)):
        _verify(study, task, features, found)
    meter.finish()
    return found


class LayerMeter:
    """Progress in layers over all tasks, of which each is gone through `passes` times."""

    def __init__(self, study: Study, task: str, reporter: Reporter, phase: str, passes: int = 1) -> None:
        self._layers = len(study.pool.chain.layers)
        self._total = len(study.tasks) * passes * self._layers
        self._first = list(study.tasks).index(task) * passes * self._layers
        self._last = self._first + passes * self._layers
        self._task, self._phase, self._reporter = task, phase, reporter

    def step(self, layer: int, what: str) -> None:
        """Say which layer is at hand."""
        label = f"task {self._task}: {what}, layer {layer} of {self._layers}"
        self._reporter.step(self._phase, self._first + layer - 1, self._total, label)

    def next_pass(self) -> None:
        """All layers are done once more."""
        self._first += self._layers

    def finish(self) -> None:
        """The task is done."""
        self._reporter.step(self._phase, self._last, self._total, f"task {self._task}")


def _chunks(study: Study, task: str, samples: SampleSet) -> Iterator[Iterator[Batch]]:
    """As many samples at a time as may wait at a boundary within the budget, in whole batches."""
    models = 1 + len(study.variants)
    per_sample = models * waiting_bytes(study.pool, expert_of(task), samples.load([0]))
    fitting = max(1, study.settings.feature_budget // max(1, per_sample))
    length = max(samples.batch_size, fitting // samples.batch_size * samples.batch_size)
    for first in range(0, len(samples), length):
        yield samples.batches(first, min(first + length, len(samples)))


class _Recorder:
    """Collects per-sample columns and pooled features, in sample order, by variant and layer."""

    def __init__(self, pool: Pool, first_variant: str, measured: Sequence[Diagnostic]) -> None:
        self._pool = pool
        self._per_view = dict.fromkeys(entry.per_view for entry in measured if entry.per_view is not None)
        self._first_variant = first_variant
        self._columns: dict[tuple[str, int], list[dict[str, Array]]] = defaultdict(list)
        self._features: dict[tuple[str, int], list[NDArray[np.float32]]] = defaultdict(list)

    def add(self, view: LayerView) -> None:
        key = (view.variant, view.layer.index)
        columns: dict[str, Tensor] = {}
        for look in self._per_view:
            columns |= look(view, self._pool)
        # One transfer for all columns: a device is asked to wait once per view.
        values = torch.stack(list(columns.values())).double().cpu().numpy()
        self._columns[key].append(dict(zip(columns, values, strict=True)))
        self._keep_features(key, view, view.merged_out)
        if view.variant == self._first_variant:
            self._keep_features(("expert", view.layer.index), view, view.expert_out)

    def _keep_features(self, key: tuple[str, int], view: LayerView, state: State) -> None:
        stream = view.layer.stream
        vectors = pooled(state[stream], self._pool, view.side.mask(stream))
        self._features[key].append(vectors.float().cpu().numpy())

    def columns(self, variant: str, layer: int) -> dict[str, Array]:
        parts = self._columns[variant, layer]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def features(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        return {key: np.concatenate(parts) for key, parts in self._features.items()}


def _verify(study: Study, task: str, features: Features, found: TaskDiagnosis) -> None:
    try:
        found.precision_error = precision_error(study, task, features)
    except RuntimeError as error:  # a model's own code may insist on float32
        found.warnings.append(f"the drift could not be checked against float64: {str(error).splitlines()[0]}")


def _tables(
    study: Study,
    task: str,
    recorder: _Recorder,
    features: Features,
    library: LibraryDrift,
    measured: Sequence[Diagnostic],
    base: Mapping[int, Array] | None,
) -> TaskDiagnosis:
    at_hand = study.tasks[task]
    found = TaskDiagnosis(features=dict(features))
    layers, kept = study.pool.chain.layers, study.settings.stored_layers
    if "base" in study.variants:
        base = {index: recorder.columns("base", index)["drift_l2"] for index in kept}
    for variant in study.variants:
        for layer in (layer for layer in layers if layer.index in kept):
            seen = Seen(
                found.features[variant, layer.index],
                found.features["expert", layer.index],
                recorder.columns(variant, layer.index),
                None if base is None else {"drift_l2": base[layer.index]},
                at_hand.head,
                at_hand.diagnosis.labels,
            )
            key: Row = {"task": task, "variant": variant, "layer": layer.index}
            found.layers.append(
                key
                | {"role": layer.role, "path": layer.path, "n": len(at_hand.diagnosis)}
                | {"reference": "expert", "closure_error": library.error[variant, layer.index]}
                | _measured(measured, "layers", seen)
            )
            columns = _measured(measured, "samples", seen)
            found.samples.append(_identified(key, at_hand.diagnosis, columns))
            if layer is layers[-1] and at_hand.head is not None:
                columns = _measured(measured, "outputs", seen)
                found.outputs.append(
                    _identified({"task": task, "variant": variant}, at_hand.diagnosis, columns)
                )
    found.features = {key: array for key, array in found.features.items() if key[1] in kept}
    return found


def _measured(measured: Sequence[Diagnostic], table: str, seen: Seen) -> dict[str, Any]:
    """The columns of one table from all diagnostics that fill some of them."""
    columns: dict[str, Any] = {}
    for entry in measured:
        if entry.table == table:
            columns |= entry.measure(seen)
    return columns


def _identified(key: Row, samples: SampleSet, columns: Mapping[str, object]) -> dict[str, Any]:
    labels = samples.labels if samples.labels is not None else [None] * len(samples)
    return {**key, "sample_id": list(samples.ids), "label": list(labels), **columns}
