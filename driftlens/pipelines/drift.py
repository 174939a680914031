"""Drift of one task: rows of the layer, sample and output tables, and the pooled features. Entry point: `diagnose`.

The first samples are compared with the models' own forward pass and with a float64 pass.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.engine.walk import LayerView, LibraryDrift, tolerance, waiting_bytes, walk
from driftlens.experiment.study import Study
from driftlens.models.chain import Pool, State
from driftlens.utils.diagnostic import Diagnostic, Seen
from driftlens.utils.errors import NumericsError, SpecError
from driftlens.utils.progress import Reporter, TaskMeter
from driftlens.utils.variants import expert_of

Array = NDArray[np.float64]
Row = dict[str, object]


# Samples of the first task whose drift is computed again in float64.
VERIFIED_SAMPLES = 2


@dataclass
class TaskDiagnosis:
    """Rows of one task, and pooled features [n, d] (float32) by (variant, layer), with `expert` as a variant."""

    layers: list[Row] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    routing: list[Row] = field(default_factory=list)
    features: dict[tuple[str, int], NDArray[np.float32]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    precision_error: float = float("nan")


@torch.no_grad()
def diagnose(
    study: Study, task: str, reporter: Reporter, base: Mapping[int, Array] | None = None
) -> TaskDiagnosis:
    """Measure every diagnostic of every variant on the diagnosis samples of one task.

    Args:
        study: the models and samples.
        task: the task.
        reporter: receives progress.
        base: the base's drift [n] by layer if it is measured already.

    Raises:
        NumericsError: the drift differs from that of the models' own library, or of float64.
    """
    diagnosis, data = TaskDiagnosis(), study.tasks[task]
    samples, layers, stored = data.diagnosis, study.pool.chain.layers, study.settings.stored_layers
    budget = study.settings.feature_budget
    # The models run in their own library first, on one batch, to compare the drift of every layer with.
    library = LibraryDrift(study.pool, task, study.variants, samples, budget)
    recorder = _recorded(study, task, library, reporter)
    diagnosis.features = recorder.features()
    # One task suffices: what lowers the precision is the same for all.
    if task == next(iter(study.tasks)):
        _check_precision(study, task, diagnosis)
    for (variant, index), (tokens, gates) in recorder.routing.items():
        of_layer = {"task": task, "variant": variant, "layer": index}
        for expert, (count, total) in enumerate(zip(tokens, gates, strict=True)):
            mean = total / count if count else math.nan
            diagnosis.routing.append(of_layer | {"expert": expert, "tokens": int(count), "gate_mean": mean})
    all_columns = recorder.columns()
    labels = samples.labels if samples.labels is not None else [None] * len(samples)
    identified = {"sample_id": list(samples.ids), "label": list(labels)}
    if "base" in study.variants:
        base = {index: all_columns["base", index]["drift_l2"] for index in stored}
    for variant in study.variants:
        for layer in (layer for layer in layers if layer.index in stored):
            seen = Seen(
                diagnosis.features[variant, layer.index],
                diagnosis.features["expert", layer.index],
                all_columns[variant, layer.index],
                None if base is None else {"drift_l2": base[layer.index]},
                study.pool.score_map(data.own_heads.get(variant, data.head), variant),
                data.head,
                samples.labels,
            )
            of_task: Row = {"task": task, "variant": variant}
            key = of_task | {"layer": layer.index}
            is_of: Row = {"role": layer.role, "stream": layer.stream}
            is_of |= {"path": layer.path, "n": len(samples), "reference": "expert"}
            row = key | is_of | {"closure_error": library.error[variant, layer.index]}
            diagnosis.layers.append(row | _measured(study, "layers", seen))
            diagnosis.samples.append(key | identified | _measured(study, "samples", seen))
            if layer is layers[-1] and data.head is not None:
                diagnosis.outputs.append(of_task | identified | _measured(study, "outputs", seen))
    diagnosis.features = {key: array for key, array in diagnosis.features.items() if key[1] in stored}
    return diagnosis


def _recorded(study: Study, task: str, library: LibraryDrift, reporter: Reporter) -> _Recorder:
    """Run a task's samples through all layers; compare the first ones with the models' own library."""
    samples, num_layers = study.tasks[task].diagnosis, len(study.pool.chain.layers)
    meter = TaskMeter(reporter, "analyze", dict.fromkeys(study.tasks, num_layers), task)
    recorder = _Recorder(study.settings.pool, study.variants[0], study.settings.measured)
    # As many whole batches at a time as the feature budget holds at one layer boundary.
    models = 1 + len(study.variants)
    per_sample = waiting_bytes(study.pool, expert_of(task), samples.load([0]), models)
    length = samples.fitting(per_sample, study.settings.feature_budget)
    for start in range(0, len(samples), length):
        chunk = samples.batches(start, min(start + length, len(samples)))
        for view in walk(study.pool, task, study.variants, chunk, ids=samples.ids):
            # All variants of a layer follow each other; one of them counts the layers.
            if view.variant == study.variants[0]:
                index = view.layer.index
                meter.step(index - 1, f"drift, layer {index} of {num_layers}")
            recorder.add(view)
            if view.start == 0:
                library.compare(view.layer, view.variant, view.merged_out, view.expert_out)
    meter.finish()
    return recorder


def _check_precision(study: Study, task: str, diagnosis: TaskDiagnosis) -> None:
    try:
        diagnosis.precision_error = precision_error(study, task, diagnosis.features)
    except RuntimeError as error:
        # A model's code may require float32.
        reason = str(error).splitlines()[0]
        diagnosis.warnings.append(f"the drift could not be checked against float64: {reason}")
    except NumericsError as error:
        if not any(layer.num_experts for layer in study.pool.chain.layers):
            raise
        tie = "float64 may route tokens near a tie differently"
        diagnosis.warnings.append(f"{error.message}; in mixtures of experts, {tie}")


class _Recorder:
    """Collects per-sample columns and pooled features, in sample order, by variant and layer."""

    def __init__(self, pool: Pool, first_variant: str, measured: Sequence[Diagnostic]) -> None:
        self._pool = pool
        # Several diagnostics share a function of a view, which is then called once.
        self._per_view = dict.fromkeys(entry.per_view for entry in measured if entry.per_view is not None)
        self._first_variant = first_variant
        self._names: dict[tuple[str, int], list[str]] = {}
        self._columns: defaultdict[tuple[str, int], list[Array]] = defaultdict(list)
        self._features: defaultdict[tuple[str, int], list[NDArray[np.float32]]] = defaultdict(list)
        self.routing: dict[tuple[str, int], Array] = {}

    def add(self, view: LayerView) -> None:
        key = (view.variant, view.layer.index)
        columns: dict[str, Tensor] = {}
        for look in self._per_view:
            columns |= look(view, self._pool)
        self._names[key] = list(columns)
        # Stacked, so that the host synchronizes with the device once per view.
        self._columns[key].append(torch.stack([*columns.values()]).cpu().double().numpy())
        self._add_model(key, view, view.merged_out, "merged")
        # The expert's features are the same in the views of all variants.
        if view.variant == self._first_variant:
            self._add_model(("expert", view.layer.index), view, view.expert_out, "expert")

    def _add_model(self, key: tuple[str, int], view: LayerView, state: State, model: str) -> None:
        """Add pooled features and, of a mixture, the number of tokens per expert."""
        vectors = view.layer.vectors(state, view.side, self._pool)
        # A view of one token per sample would keep all tokens of every batch in memory, so copy.
        self._features[key].append(vectors.to("cpu", torch.float32, copy=True).numpy())
        if model in view.routes:
            mask = view.side.mask(view.layer.stream)
            counts = view.routes[model].counts(view.layer.num_experts, mask)
            # In float64, so that the sums do not depend on the batch size.
            self.routing[key] = self.routing.get(key, np.zeros(())) + counts.cpu().double().numpy()

    def columns(self) -> dict[tuple[str, int], dict[str, Array]]:
        return {
            key: dict(zip(self._names[key], np.concatenate(parts, axis=1), strict=True))
            for key, parts in self._columns.items()
        }

    def features(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        return {key: np.concatenate(parts) for key, parts in self._features.items()}


def _measured(study: Study, table: str, seen: Seen) -> dict[str, Any]:
    """Return the columns of one table from all diagnostics that fill it."""
    columns: dict[str, Any] = {}
    shape = () if table == "layers" else (len(seen.variant),)
    for entry in study.settings.measured:
        if entry.table == table:
            values = entry.measure(seen)
            names = {column.name for column in entry.columns} - columns.keys()
            wrong = {name: np.shape(value) for name, value in values.items() if np.shape(value) != shape}
            if wrong or not names >= values.keys():
                raise SpecError(
                    f"diagnostic {entry.name!r} returned {wrong or ', '.join(values)}; expected {shape} by {names}",
                    hint="Return values by column name: a number for `layers`, else one per sample.",
                )
            columns |= values
    return columns


def precision_error(
    study: Study, task: str, features: Mapping[tuple[str, int], NDArray[np.float32]]
) -> float:
    """Return the largest relative error of the first samples' pooled drift, compared with a float64 pass.

    Args:
        study: the opened models and samples.
        task: whose diagnosis samples are read.
        features: pooled features [n, d] by (variant, layer).

    Returns:
        The error; NaN without drift, and for a run computed in float64.

    Raises:
        NumericsError: the error is larger than rounding.
    """
    if study.pool.dtype == torch.float64:
        return math.nan
    dtype = str(study.pool.dtype).removeprefix("torch.")
    samples, exact_pool = study.tasks[task].diagnosis, study.pool.in_float64()
    batches = list(samples.batches(0, min(VERIFIED_SAMPLES, len(samples))))
    worst = math.nan
    # One variant at a time, because float64 embeddings take four times the memory of bfloat16 files.
    views = itertools.chain.from_iterable(
        walk(exact_pool, task, [variant], batches) for variant in study.variants
    )
    for view in views:
        exact_merged, exact_expert = (
            view.layer.vectors(state, view.side, study.settings.pool).cpu().double()
            for state in (view.merged_out, view.expert_out)
        )
        exact = (exact_merged - exact_expert).numpy()
        rows = slice(view.start, view.stop)
        merged, expert = (
            features[name, view.layer.index][rows].astype(np.float64) for name in (view.variant, "expert")
        )
        size, scale = np.linalg.norm(exact), np.linalg.norm(expert)
        if not size or not scale:
            continue
        error = float(np.linalg.norm(merged - expert - exact) / size)
        worst = error if math.isnan(worst) else max(worst, error)
        limit = tolerance(dtype, float(size / scale))
        if error > limit:
            raise NumericsError(
                f"the drift of {view.variant} after layer {view.layer.index} ({view.layer.path}), task {task!r}, "
                f"differs from float64: relative error {error:.2g}, at most {limit:.1g} is rounding",
                hint="Products have a lower precision (TF32, bfloat16 or autocast in the model). Switch it off, or "
                "compute in float64.",
                layer=view.layer.index,
                task=task,
                precision_error=error,
                tolerance=limit,
            )
    return worst
