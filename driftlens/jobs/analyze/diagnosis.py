"""One task through the walk: rows of the layer, sample and output tables, and the features worth keeping.

Its drift is held against the models' own forward pass, and against float64, on a few samples. Both stop the work:
numbers that follow from a model taken apart wrongly, or from products of eight bits, are worse than none.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.base.devices import on_host
from driftlens.base.diagnostic import Diagnostic, Seen
from driftlens.base.errors import NumericsError, SpecError
from driftlens.base.progress import Reporter, TaskMeter
from driftlens.data.samples import Batch, SampleSet
from driftlens.engine.walk import (
    ROUNDING,
    FiniteWatch,
    LayerView,
    layer_states,
    not_closed,
    require_finite,
    tolerance,
    waiting_bytes,
    walk,
)
from driftlens.jobs.analyze.unmerged import unmerged
from driftlens.jobs.study.study import Study
from driftlens.linalg.state import norm, subtract
from driftlens.models.chain import Layer, Pool, State

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
K = TypeVar("K")
Row = dict[str, object]
Features = Mapping[tuple[str, int], NDArray[np.float32]]
"""Pooled features [n, d] by (variant, layer)."""


@dataclass
class TaskDiagnosis:
    """What one task's walk found: rows, and pooled features [n, d] (float32) by (variant, layer), the expert's too."""

    layers: list[Row] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    routing: list[Row] = field(default_factory=list)
    features: dict[tuple[str, int], NDArray[np.float32]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    precision_error: float = float("nan")


@dataclass
class Walked:
    """What the walk saw of a task: numbers of every sample and features by (variant, layer).

    Of mixtures of experts also `routing`, tokens and sums of gates by expert, [2, experts].
    Of the first batch alone `closure`, |e - e_library| / |e|; of the first task's `precision_error`, against float64.
    """

    columns: dict[tuple[str, int], dict[str, Array]]
    features: Features
    routing: Mapping[tuple[str, int], Array] = field(default_factory=dict)
    closure: Mapping[tuple[str, int], float] = field(default_factory=dict)
    precision_error: float = float("nan")
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@torch.no_grad()
def walked(study: Study, task: str, reporter: Reporter) -> Walked:
    """Return what every diagnostic sees of every variant on one task's diagnosis samples."""
    samples = study.tasks[task].diagnosis
    num_layers = len(study.pool.chain.layers)
    meter = TaskMeter(reporter, "analyze", dict.fromkeys(study.tasks, num_layers), task)
    recorder = _Recorder(study.settings.pool, study.variants[0], study.settings.measured)
    library = LibraryDrift(study, task)
    for chunk in _chunks(study, task, samples):
        for view in walk(study.pool, task, study.variants, chunk, ids=samples.ids):
            if view.variant == study.variants[0]:
                index = view.layer.index
                meter.step(index - 1, f"drift, layer {index} of {num_layers}")
            recorder.add(view)
            if view.start == 0:
                library.compare(view.layer, view.variant, view.merged_out, view.expert_out)
    library.settle()
    result = Walked(recorder.columns(), recorder.features(), recorder.routing())
    result.closure = library.error
    result.notices += filter(None, [library.unheld])
    if task == next(iter(study.tasks)):
        try:
            result.precision_error = precision_error(study, task, result.features)
        except RuntimeError as error:  # a model's own code may insist on float32
            reason = str(error).splitlines()[0]
            result.warnings.append(f"the drift could not be checked against float64: {reason}")
        except NumericsError as error:
            if not any(layer.num_experts for layer in study.pool.chain.layers):
                raise
            tie = "a token whose router is near a tie goes to other experts there"
            result.warnings.append(f"{error.message}; of mixtures of experts it may be that {tie}")
    meter.finish()
    return result


def _chunks(study: Study, task: str, samples: SampleSet) -> Iterator[Iterator[Batch]]:
    """As many samples at a time as may wait at a boundary within the budget, in whole batches."""
    models = 1 + len(study.variants)
    per_sample = waiting_bytes(study.pool, study.pool.expert(task), samples.load([0]), models)
    length = samples.fitting(per_sample, study.settings.feature_budget)
    for first in range(0, len(samples), length):
        yield samples.batches(first, min(first + length, len(samples)))


class _Recorder:
    """Collects per-sample columns and pooled features, in sample order, by variant and layer.

    What was seen of a layer stays on the device until another comes: it is asked to wait twice per layer, of a
    mixture of experts three times.
    """

    def __init__(self, pool: Pool, first_variant: str, measured: Sequence[Diagnostic]) -> None:
        self._pool = pool
        self._per_view = dict.fromkeys(entry.per_view for entry in measured if entry.per_view is not None)
        self._first_variant = first_variant
        self._layer = 0
        self._names: dict[tuple[str, int], list[str]] = {}
        self._stacked: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._vectors: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._counts: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._routing: dict[tuple[str, int], Array] = {}
        self._columns: defaultdict[tuple[str, int], list[Array]] = defaultdict(list)
        self._features: defaultdict[tuple[str, int], list[NDArray[np.float32]]] = defaultdict(list)

    def add(self, view: LayerView) -> None:
        if view.layer.index != self._layer:
            self._settle()
            self._layer = view.layer.index
        key = (view.variant, view.layer.index)
        columns: dict[str, Tensor] = {}
        for look in self._per_view:
            columns |= look(view, self._pool)
        self._names[key] = list(columns)
        self._stacked[key].append(torch.stack(list(columns.values())))
        self._keep_features(key, view, view.merged_out)
        self._count_tokens(key, view, "merged")
        if view.variant == self._first_variant:
            self._keep_features(("expert", view.layer.index), view, view.expert_out)
            self._count_tokens(("expert", view.layer.index), view, "expert")

    def _count_tokens(self, key: tuple[str, int], view: LayerView, model: str) -> None:
        """Who went where in a mixture of experts."""
        if model in view.routes:
            mask = view.side.mask(view.layer.stream)
            self._counts[key].append(view.routes[model].counts(view.layer.num_experts, mask)[None])

    def _keep_features(self, key: tuple[str, int], view: LayerView, state: State) -> None:
        vectors = view.layer.vectors(state, view.side, self._pool)
        # A copy: one token of each sample, taken as a view, would keep all tokens of every batch in memory.
        self._vectors[key].append(vectors.to(torch.float32, copy=True))

    def _settle(self) -> None:
        """Fetch what was seen of the layer at hand."""
        for key, columns in fetched(self._stacked, dim=1).items():
            self._columns[key].append(columns.double().numpy())
        for key, vectors in fetched(self._vectors, dim=0).items():
            self._features[key].append(vectors.numpy())
        for key, counts in fetched(self._counts, dim=0).items():
            # In float64, batch by batch: sums of gates of a lower precision would depend on how many there are.
            self._routing[key] = sum(counts.double().numpy(), self._routing.get(key, np.zeros(())))
        for waiting in (self._stacked, self._vectors, self._counts):
            waiting.clear()

    def columns(self) -> dict[tuple[str, int], dict[str, Array]]:
        self._settle()
        return {
            key: dict(zip(self._names[key], np.concatenate(parts, axis=1), strict=True))
            for key, parts in self._columns.items()
        }

    def features(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        self._settle()
        return {key: np.concatenate(parts) for key, parts in self._features.items()}

    def routing(self) -> dict[tuple[str, int], Array]:
        self._settle()
        return self._routing


def fetched(parts: Mapping[K, Sequence[Tensor]], dim: int) -> dict[K, Tensor]:
    """The parts of each, joined along one dimension, on the host; those of one shape and dtype travel together."""
    alike: defaultdict[object, dict[K, Tensor]] = defaultdict(dict)
    for key, tensors in parts.items():
        whole = torch.cat([*tensors], dim=dim)
        alike[whole.shape, whole.dtype][key] = whole
    return {
        key: row
        for group in alike.values()
        for key, row in zip(group, torch.stack([*group.values()]).cpu(), strict=True)
    }


def diagnosis_of(
    study: Study, task: str, seen_by_walk: Walked, base: Mapping[int, Array] | None = None
) -> TaskDiagnosis:
    """Return the tables of one task."""
    data, measured = study.tasks[task], study.settings.measured
    diagnosis = TaskDiagnosis(
        features=dict(seen_by_walk.features),
        warnings=seen_by_walk.warnings,
        notices=seen_by_walk.notices,
        precision_error=seen_by_walk.precision_error,
    )
    all_columns = seen_by_walk.columns
    for (variant, index), (tokens, gates) in seen_by_walk.routing.items():
        of_layer = {"task": task, "variant": variant, "layer": index}
        for expert, (count, total) in enumerate(zip(tokens, gates, strict=True)):
            mean = total / count if count else math.nan
            diagnosis.routing.append(of_layer | {"expert": expert, "tokens": int(count), "gate_mean": mean})
    layers, stored, samples = study.pool.chain.layers, study.settings.stored_layers, data.diagnosis
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
                data.diagnosis.labels,
            )
            of_task: Row = {"task": task, "variant": variant}
            key = of_task | {"layer": layer.index}
            is_of: Row = {"role": layer.role, "stream": layer.stream}
            is_of |= {"path": layer.path, "n": len(data.diagnosis), "reference": "expert"}
            row = key | is_of | {"closure_error": seen_by_walk.closure[variant, layer.index]}
            diagnosis.layers.append(row | _measured(measured, "layers", seen))
            diagnosis.samples.append(key | identified | _measured(measured, "samples", seen))
            if layer is layers[-1] and data.head is not None:
                diagnosis.outputs.append(of_task | identified | _measured(measured, "outputs", seen))
    diagnosis.features = {key: array for key, array in diagnosis.features.items() if key[1] in stored}
    return diagnosis


def stacked(parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of a table, from its columns part by part."""
    import pandas as pd

    return pd.concat([pd.DataFrame(dict(part)) for part in parts], ignore_index=True)


def _measured(measured: Sequence[Diagnostic], table: str, seen: Seen) -> dict[str, Any]:
    """The columns of one table from all diagnostics that fill some of them."""
    columns: dict[str, Any] = {}
    whose: dict[str, str] = {}
    shape = () if table == "layers" else (len(seen.variant),)
    for entry in measured:
        if entry.table == table:
            found = entry.measure(seen)
            if fault := _fault(entry, found, shape, whose):
                raise SpecError(
                    f"diagnostic {entry.name!r} returned {fault}",
                    hint="It returns values by the names of its columns: a number for `layers`, else one per sample.",
                )
            columns |= found
            whose |= dict.fromkeys(found, entry.name)
    return columns


def _fault(entry: Diagnostic, found: object, shape: tuple[int, ...], whose: Mapping[str, str]) -> str:
    """Why what a diagnostic returned, which anybody may have written, fills no columns; "" where it does."""
    if not isinstance(found, Mapping):
        return f"{type(found).__name__}, expected a mapping"
    names = [column.name for column in entry.columns]
    for name, value in found.items():
        if name not in names:
            return f"{name!r}, expected some of {', '.join(names)}"
        if name in whose:
            return f"{name!r}, which {whose[name]!r} has returned"
        if np.shape(value) != shape:
            return f"{name} {[*np.shape(value)]}, expected {[*shape]}"
    return ""


VERIFIED_SAMPLES = 2
"""Samples of the first task whose drift is computed once more in float64."""


class LibraryDrift:
    """Drift of a task's first samples as the models' own library gives it, to hold the walk's drift against.

    They are a batch, or less where all its boundaries' features don't fit into the budget of features, or `most` are
    wanted. `error` is |e - e_library| / |e| by variant and layer; NaN where there is no drift.
    """

    def __init__(self, study: Study, task: str, most: int | None = None) -> None:
        pool, samples = study.pool, study.tasks[task].diagnosis
        self._task = task
        num_states = len(pool.chain.layers) * (1 + len(study.variants))
        per_sample = waiting_bytes(pool, pool.expert(task), samples.load([0]), num_states)
        fitting = max(1, study.settings.feature_budget // max(1, per_sample))
        # Not fewer samples read, for texts are padded to the longest of their batch.
        self.batch = next(samples.batches()).first(min(fitting, most or fitting))
        self._model = str(pool.chain.settings.get("model", pool.chain.architecture))
        self._dtype = str(pool.dtype).removeprefix("torch.")
        with pool.sent(self.batch.inputs) as inputs:
            expert = pool.library_states(pool.expert(task), inputs)
            self.unheld = require_as_peft(study, task, inputs, expert[-1])
            self._drift: dict[str, list[State]] = {
                variant: [
                    subtract(*pair)
                    for pair in zip(pool.library_states(variant, inputs, task), expert, strict=True)
                ]
                for variant in study.variants
            }
        self.error: dict[tuple[str, int], float] = {}
        self._compared: list[tuple[Layer, str, Tensor]] = []

    def compare(self, layer: Layer, variant: str, merged: State, expert: State) -> None:
        """Keep the closure error of the first samples; `settle` tells it, of all variants of a layer together."""
        if self._compared and self._compared[0][0] is not layer:
            self.settle()
        merged, expert = (
            {name: leaf[: self.batch.stop] for name, leaf in state.items()} for state in (merged, expert)
        )
        sizes = _sizes(subtract(merged, expert), self._drift[variant][layer.index - 1], expert)
        self._compared.append((layer, variant, sizes))

    def settle(self) -> None:
        """Read what was compared since the last time, at once.

        Raises:
            NumericsError: drift that the models' own library doesn't give.
        """
        compared, self._compared = self._compared, []
        rows = torch.stack([sizes for *_, sizes in compared]).tolist() if compared else []
        for (layer, variant, _), sizes in zip(compared, rows, strict=True):
            error, limit, is_off = _apart(sizes, self._dtype)
            self.error[variant, layer.index] = error
            if is_off:
                raise not_closed(layer.index, layer.path, self._task, variant, error, limit, self._model)


def _sizes(ours: State, theirs: State, features: State) -> Tensor:
    """Of a difference, of how far two computations of it are apart, and of the features it is of, [3]."""
    return torch.stack([norm(state).sum() for state in (ours, subtract(ours, theirs), features)])


def _apart(sizes: Sequence[float], dtype: str) -> tuple[float, float, bool]:
    """How far two computations of one difference are apart, relative to it; what rounding explains; if it is more."""
    size, apart, scale = sizes
    error = apart / size if size > 0 else math.nan
    limit = tolerance(dtype, size / scale) if size > 0 and scale > 0 else 0.0
    # Where one sees no difference at all, the other must see none either.
    return error, limit, error > limit or (size == 0 and apart > ROUNDING[dtype] * scale)


def require_as_peft(study: Study, task: str, inputs: Any, expert: State) -> str:
    """Refuse an expert of adapters whose final features are not those of peft's own model; says where none runs."""
    adapters = study.adapters.get(study.pool.expert(task))
    if adapters is None:
        return ""
    theirs = unmerged(study, adapters, inputs)
    if isinstance(theirs, str):
        return unheld(task, theirs)
    base, adapted = ({name: state[name] for name in expert} for state in theirs)
    dtype = str(study.pool.dtype).removeprefix("torch.")
    sizes = _sizes(subtract(expert, base), subtract(adapted, base), expert).tolist()
    error, limit, is_off = _apart(sizes, dtype)
    if is_off:
        raise NumericsError(
            f"the final features of the expert of {task} are not those of its adapters as peft runs them: "
            f"{error:.2g} of what the adapters change of them is off, at most {limit:.1g} is rounding",
            hint="Merge them with peft and give that folder: PeftModel.from_pretrained(model, FOLDER)"
            ".merge_and_unload().save_pretrained(OUT).",
            task=task,
            closure_error=error,
            tolerance=limit,
        )
    return ""


def unheld(task: str, reason: str) -> str:
    """What is said of adapters that peft did not run."""
    return (
        f"the features of the expert of {task} were not held against its adapters as peft runs them: {reason}"
    )


@torch.no_grad()
def check_closure(study: Study, most: int | None = None) -> None:
    """Hold the first samples of every task, a batch or `most`, against the library's own forward passes."""
    pool = study.pool
    for task in study.tasks:
        library = LibraryDrift(study, task, most)
        models = pool.expert(task), *study.variants
        passes = (layer_states(pool, model, [library.batch], task=task) for model in models)
        for (layer, [(_, expert, _)]), *of_variants in zip(*passes, strict=True):
            for variant, (_, [(_, state, _)]) in zip(study.variants, of_variants, strict=True):
                library.compare(layer, variant, state, expert)
        library.settle()


def precision_error(
    study: Study, task: str, features: Mapping[tuple[str, int], NDArray[np.float32]]
) -> float:
    """Largest relative error of the pooled drift of the first samples against float64, over variants and layers.

    The float64 pass reads the same weights and shares no product with the run, so that products of fewer bits show,
    however they came to be chosen. NaN where there is no drift, and for a run that is computed in float64.
    """
    if study.pool.dtype == torch.float64:
        return math.nan
    dtype = str(study.pool.dtype).removeprefix("torch.")
    samples, exact_pool = study.tasks[task].diagnosis, study.pool.in_float64()
    first = list(samples.batches(0, min(VERIFIED_SAMPLES, len(samples))))
    worst, watches = math.nan, list[FiniteWatch]()
    # One variant after the other: in float64 a vocabulary's embeddings are four times as large as in most files.
    views = itertools.chain.from_iterable(
        walk(exact_pool, task, [variant], first, watches=watches) for variant in study.variants
    )
    for view, exact in _exact_drifts(study, views, watches):
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
                f"the drift of {view.variant} behind layer {view.layer.index} ({view.layer.path}), task {task!r}, is "
                f"{error:.2g} off that computed in float64; at most {limit:.1g} is rounding",
                hint="Something computes products in fewer bits than the features have: TF32, bfloat16 or autocast "
                "inside the model. Switch it off, or compute in float64.",
                layer=view.layer.index,
                task=task,
                precision_error=error,
                tolerance=limit,
            )
    return worst


class _Place(NamedTuple):
    """Where a view was taken."""

    variant: str
    layer: Layer
    start: int
    stop: int


def _exact_drifts(
    study: Study, views: Iterable[LayerView], watches: list[FiniteWatch]
) -> Iterator[tuple[_Place, Array]]:
    """Pooled drifts [n, d] of views; all are looked at and read at once, so that no device is waited for before."""
    places, vectors = list[_Place](), list[Tensor]()
    for view in views:
        places.append(_Place(view.variant, view.layer, view.start, view.stop))
        for state in (view.merged_out, view.expert_out):
            # A copy, or a look at some tokens would hold all of them.
            vectors.append(view.layer.vectors(state, view.side, study.settings.pool).clone())
    require_finite(watches)
    features = [vector.double() for vector in on_host(vectors)]
    for place, merged, expert in zip(places, features[::2], features[1::2], strict=True):
        yield place, (merged - expert).numpy()
