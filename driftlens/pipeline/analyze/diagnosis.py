"""One task through the walk: rows of the layer, sample and output tables, and the features worth keeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.data.samples import Batch, SampleSet
from driftlens.diagnostics.drift import drift_columns, layer_values, sample_values
from driftlens.diagnostics.output import class_rows, output_columns
from driftlens.engine.walk import LayerView, waiting_bytes, walk
from driftlens.linalg.cka import linear_cka
from driftlens.models.chain import Layer, Pool, State, pooled
from driftlens.models.heads import Head
from driftlens.pipeline.analyze.causes import Sensitivity, adjoint_columns, sensitivities
from driftlens.pipeline.analyze.verification import LibraryDrift, precision_error
from driftlens.pipeline.study.study import Study, TaskSamples
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
    adjoint: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    features: dict[tuple[str, int], NDArray[np.float32]] = field(default_factory=dict)
    precision_error: float = float("nan")


@torch.no_grad()
def diagnose(study: Study, task: str, reporter: Reporter) -> TaskDiagnosis:
    """Drift, its parts and the output drift of every variant on one task's diagnosis samples.

    Raises:
        NumericsError: weights or features are NaN or infinite, or the drift is not that of ordinary forward passes or
            of float64.
        Cancelled: somebody asked to stop.
    """
    at_hand = study.tasks[task]
    meter = _Meter(study, task, reporter)
    recorder = _Recorder(study.settings.pool, study.variants[0])
    library = LibraryDrift(study, task, next(at_hand.diagnosis.batches()))
    for chunk in _chunks(study, task, at_hand.diagnosis):
        views = walk(study.pool, task, study.variants, chunk, ids=at_hand.diagnosis.ids)
        for view in views:
            if view.variant == study.variants[0]:
                meter.step(view.layer.index, "drift")
            recorder.add(view)
            library.compare(view)
    features = recorder.features()
    found = _tables(study, task, at_hand, recorder, features, library)
    if task == next(iter(study.tasks)):
        _verify(study, task, features, found)
    if study.settings.jacobian is not None:
        for variant in study.explained_variants:
            _explain(study, task, variant, found, meter)
    meter.finish()
    return found


def _explain(study: Study, task: str, variant: str, found: TaskDiagnosis, meter: _Meter) -> None:
    meter.next_pass()
    sensitivity = sensitivities(study, task, variant, lambda layer: meter.step(layer, "causes"))
    _add_sensitivity(found, variant, sensitivity)
    found.warnings += _unconverged(study, task, variant, sensitivity)
    if study.settings.adjoint:
        nodes = {layer: int(row["nodes"]) for layer, row in sensitivity.layers.items() if "nodes" in row}
        found.adjoint += adjoint_columns(study, task, variant, nodes)


class _Meter:
    """Progress in layers, over all tasks: one pass for drift, one per variant whose drift is explained."""

    def __init__(self, study: Study, task: str, reporter: Reporter) -> None:
        self._layers = len(study.pool.chain.layers)
        passes = 1 + (len(study.explained_variants) if study.settings.jacobian is not None else 0)
        self._total = len(study.tasks) * passes * self._layers
        self._first = list(study.tasks).index(task) * passes * self._layers
        self._last = self._first + passes * self._layers
        self._task = task
        self._reporter = reporter

    def step(self, layer: int, what: str) -> None:
        label = f"task {self._task}: {what}, layer {layer} of {self._layers}"
        self._reporter.step("analyze", self._first + layer - 1, self._total, label)

    def next_pass(self) -> None:
        self._first += self._layers

    def finish(self) -> None:
        self._reporter.step("analyze", self._last, self._total, f"task {self._task}")


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

    def __init__(self, pool: Pool, first_variant: str) -> None:
        self._pool = pool
        self._first_variant = first_variant
        self._columns: dict[tuple[str, int], list[dict[str, Array]]] = defaultdict(list)
        self._features: dict[tuple[str, int], list[NDArray[np.float32]]] = defaultdict(list)

    def add(self, view: LayerView) -> None:
        key = (view.variant, view.layer.index)
        columns = drift_columns(view, self._pool)
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
    at_hand: TaskSamples,
    recorder: _Recorder,
    features: Features,
    library: LibraryDrift,
) -> TaskDiagnosis:
    found = TaskDiagnosis(features=dict(features))
    stored = [layer for layer in study.pool.chain.layers if layer.index in study.settings.stored_layers]
    for variant in study.variants:
        for layer in stored:
            columns = recorder.columns(variant, layer.index)
            base = recorder.columns("base", layer.index) if study.has_base else None
            key: Row = {"task": task, "variant": variant, "layer": layer.index}
            found.layers.append(
                key
                | {"role": layer.role, "path": layer.path, "n": len(at_hand.diagnosis), "reference": "expert"}
                | layer_values(columns, base)
                | {"closure_error": library.error[variant, layer.index]}
                | ({"cka": _cka(found, variant, layer)} if study.settings.cka else {})
            )
            found.samples.append(_identified(key, at_hand.diagnosis, sample_values(columns)))
        if at_hand.head is not None:
            found.outputs.append(_outputs(study, task, variant, at_hand.diagnosis, at_hand.head, found))
    kept = {layer.index for layer in stored}
    found.features = {key: array for key, array in found.features.items() if key[1] in kept}
    return found


def _add_sensitivity(found: TaskDiagnosis, variant: str, sensitivity: Sensitivity) -> None:
    """Fill the columns that come from Jacobians into the rows of one variant."""
    for row in found.layers:
        if row["variant"] == variant:
            row |= sensitivity.layers[cast(int, row["layer"])]
    for table in found.samples:
        if table["variant"] == variant:
            shares = np.full(len(table["sample_id"]), np.nan)
            known = sensitivity.final_shares[table["layer"] - 1]
            shares[: len(known)] = known
            table["final_share"] = shares


def _unconverged(study: Study, task: str, variant: str, sensitivity: Sensitivity) -> list[str]:
    """Says where the quadrature missed its tolerance with all the nodes it may use, as it does on kinks."""
    settings = study.settings.jacobian
    assert settings is not None
    errors = {layer: row.get("jacobian_error", 0.0) for layer, row in sensitivity.layers.items()}
    missed = {layer: error for layer, error in errors.items() if error > settings.tolerance}
    if not missed:
        return []
    worst = max(missed, key=lambda layer: missed[layer])
    return [
        f"task {task}, {variant}: the path-averaged Jacobian misses the tolerance {settings.tolerance:g} in "
        f"{len(missed)} of {len(errors)} layers after {sensitivity.layers[worst]['nodes']} nodes, most in "
        f"layer {worst} (error {missed[worst]:.1e}). A kinked activation or a large drift converges slowly: raise "
        "metrics.jacobian.max_nodes, or read contributions with their remainder."
    ]


def _identified(key: Row, samples: SampleSet, columns: Mapping[str, object]) -> dict[str, Any]:
    labels = samples.labels if samples.labels is not None else [None] * len(samples)
    return {**key, "sample_id": list(samples.ids), "label": list(labels), **columns}


def _cka(found: TaskDiagnosis, variant: str, layer: Layer) -> float:
    features = [torch.from_numpy(found.features[name, layer.index]).double() for name in (variant, "expert")]
    return float(linear_cka(*features))


def _outputs(
    study: Study, task: str, variant: str, samples: SampleSet, head: Head, found: TaskDiagnosis
) -> dict[str, Any]:
    last = len(study.pool.chain.layers)
    expert, merged = (torch.from_numpy(found.features[name, last]) for name in ("expert", variant))
    rows = class_rows(head, samples.labels) if samples.labels is not None else None
    columns = {name: value.numpy() for name, value in output_columns(head, expert, merged, rows).items()}
    names = np.array(head.classes, dtype=object)
    for prediction in ("pred", "expert_pred"):
        columns[prediction] = names[columns[prediction]]
    return _identified({"task": task, "variant": variant}, samples, columns)
