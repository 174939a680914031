"""The forward order: features of several models pass the layers together, one layer after the other.

Entry points: `walk` compares variants with the expert, `forward` returns final features, `capture` reads one module.
Only the features of one boundary are cached at any time, those beyond a budget on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch, SampleSet, reduced_batch_size
from driftlens.engine.pool import ModelPool, inputs_to_device
from driftlens.linalg.state import (
    add_states,
    expert_cosine,
    power_of_two_scale,
    row_norms,
    state_norms,
    subtract_states,
)
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.chain import ExpertRoutes, Layer, Pool, SideInputs, State
from driftlens.utils.devices import device_memory, to_device
from driftlens.utils.errors import DataError, NumericsError
from driftlens.utils.variants import expert_name

OnStep = Callable[[int, str], None]
"""Callback (layer index, task) before every batch; it may raise, `Cancelled` for instance."""


@dataclass(frozen=True)
class InMemoryBatches:
    """A task's samples as a function that returns their batches, with sample ids for messages."""

    read: Callable[[], Iterable[Batch]]
    ids: Sequence[str] = ()

    def batches(self) -> Iterable[Batch]:
        """Return the task's batches."""
        return self.read()


Parts = Mapping[str, SampleSet | InMemoryBatches]
"""Samples by task."""


@dataclass
class FeatureStream:
    """The features of several models before one layer, batch by batch; all models read the same inputs.

    `on_step` is called before every batch, `on_output` with every output that is stored; `hashes` records digests of
    samples, and `file_prefix` differs from that of other streams in one store.
    """

    pool: ModelPool
    parts: Parts
    models: Sequence[str]
    store: FeatureStore = field(default_factory=lambda: FeatureStore())
    on_step: OnStep = lambda layer, task: None
    on_output: Callable[[Layer, CachedBatch, str, State], None] = lambda layer, batch, model, left: None
    hashes: bool = False
    file_prefix: str = ""
    cached: dict[str, list[CachedBatch]] = field(default_factory=dict, init=False)
    _sums: list[tuple[Layer, CachedBatch, str, Tensor]] = field(default_factory=list, init=False)

    def batches(self, layer: Layer, task: str) -> Iterator[CachedBatch]:
        """Yield a task's cached batches with the features before the layer."""
        for batch in self.cached[task] if task in self.cached else self._read_and_cache_batches(task):
            self.on_step(layer.index, task)
            yield batch

    def _read_and_cache_batches(self, task: str) -> Iterator[CachedBatch]:
        """Read a task's samples; yield their batches before the first layer, and cache them."""
        batches: list[CachedBatch] = []
        name = f"{self.file_prefix}{list(self.parts).index(task)}"
        for number, batch in enumerate(self.parts[task].batches()):
            # The pool computes boundary 0 once: it is the same for all models.
            state, side = self.pool.initial_state(batch.inputs)
            cached = CachedBatch(self.store, task, f"{name}-{number}", side, batch.start, batch.stop)
            if self.hashes:
                cached.digests, cached.originals = batch.digests, batch.copied or batch.digests
            for model in self.models:
                cached.put(model, state)
            batches.append(cached)
            yield cached
        # Only a complete pass is cached; after an exception the samples are read again.
        self.cached[task] = batches
        if not batches:
            raise DataError(
                f"task {task!r} has no samples",
                hint="Add samples, or remove the task.",
                task=task,
            )

    def take(
        self,
        layer: Layer,
        batch: CachedBatch,
        model: str,
        through: Callable[[State, SideInputs], State],
        *,
        named: str = "",
    ) -> State:
        """Run a model's features through a layer, cache the result and return it.

        Args:
            layer: the layer.
            batch: the cached batch.
            model: the features' name in the cache.
            through: (state, side inputs) -> next state.
            named: the model's name in messages.
        """
        left = through(batch.get(model), batch.side)
        self.store_output(layer, batch, model, left, named=named)
        return left

    def store_output(self, layer: Layer, batch: CachedBatch, model: str, left: State, *, named: str = "") -> None:
        """Store a layer's output as the model's new features, and record it for the next `check`."""
        self.record_sums(layer, batch, named or model, left)
        self.on_output(layer, batch, model, left)
        batch.put(model, left)

    def record_sums(self, layer: Layer, batch: CachedBatch, model: str, left: State) -> None:
        """Record the sum of a layer's output per sample, which the next `check` tests for NaN and infinity."""
        features = left[layer.stream]
        # A sum is NaN or infinite as soon as one entry is, and is cheaper than looking at each. Not in float64: on the
        # CPU that takes forty times as long as in float32.
        dtype = torch.promote_types(features.dtype, torch.float32)
        self._sums.append((layer, batch, model, features.flatten(1).sum(dim=1, dtype=dtype)))

    def check(self) -> None:
        """Raise a `NumericsError` if features recorded since the last check are NaN or infinite."""
        sums, self._sums = self._sums, []
        # The usual case costs one read of the device; only a failure looks at each batch.
        if not sums or bool(torch.isfinite(torch.cat([total for *_, total in sums])).all()):
            return
        for layer, batch, model, total in sums:
            bad = (~torch.isfinite(total)).nonzero()
            if len(bad):
                row, ids = batch.start + int(bad[0]), self.parts[batch.task].ids
                sample = ids[row] if row < len(ids) else str(row)
                raise NumericsError(
                    f"features of {model} are NaN or infinite after layer {layer.index} "
                    f"({layer.path}), task {batch.task!r}, first in sample {sample!r}",
                    hint="Check that input and the layer's weights; in a half-precision dtype, set compute.dtype to "
                    "float32.",
                    layer=layer.index,
                    task=batch.task,
                    sample=sample,
                )


@dataclass(frozen=True)
class _CachedState:
    """Cached features, in memory or in a file, with their original devices and size in bytes."""

    state: State | Path
    devices: Mapping[str, torch.device]
    num_bytes: int


@dataclass
class FeatureStore:
    """A cache of features: in memory up to a budget, beyond it in files; without a folder, all in memory.

    `held` counts the bytes in memory. As a context manager it removes its files at the end, and the folder if it made
    it. On an accelerator, states take at most half of the memory that was free at first; the others are cached on the
    host.
    """

    budget: int = 0
    folder: Path | None = None
    held: int = field(default=0, init=False)
    _room: int | None = field(default=None, init=False)
    _files: set[Path] = field(default_factory=set, init=False)
    _made_folder: bool = field(default=False, init=False)

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
        if self._made_folder and self.folder is not None:
            with contextlib.suppress(OSError):  # it may hold other files
                self.folder.rmdir()

    def cache(self, name: str, state: State) -> _CachedState:
        """Store features in memory, or beyond the budget in a file called `name`."""
        devices = {key: value.device for key, value in state.items()}
        num_bytes = sum(value.nbytes for value in state.values())
        if self.folder is not None and self.held + num_bytes > self.budget:
            return _CachedState(self._write_state_file(self.folder, f"{name}.safetensors", state), devices, 0)
        self.held += num_bytes
        if self._room is None:
            free = [device_memory(device) for device in {*devices.values()} if device.type != "cpu"]
            self._room = reduced_batch_size(min((sizes[0] // 2 for sizes in free if sizes), default=1 << 62))
        if self.held > self._room:
            state = {key: value.cpu() for key, value in state.items()}
        return _CachedState(state, devices, num_bytes)

    def load(self, cached: _CachedState) -> State:
        """Return cached features on their original devices."""
        from safetensors.torch import load_file

        state = load_file(cached.state) if isinstance(cached.state, Path) else cached.state
        return {name: to_device(value, cached.devices[name]) for name, value in state.items()}

    def free(self, cached: _CachedState) -> None:
        """Remove cached features from memory or disk."""
        self.held -= cached.num_bytes
        if isinstance(cached.state, Path):
            cached.state.unlink(missing_ok=True)
            self._files.discard(cached.state)

    def _write_state_file(self, folder: Path, name: str, state: State) -> Path:
        from safetensors.torch import save_file

        if not folder.exists():
            # Without parents: a run that was removed meanwhile must not be recreated.
            folder.mkdir(exist_ok=True)
            self._made_folder = True
        self._files.add(folder / name)
        save_file({key: value.contiguous().cpu() for key, value in state.items()}, folder / name)
        return folder / name


@dataclass(eq=False)
class CachedBatch:
    """One batch of one task before one layer, with the cached features of each model."""

    store: FeatureStore
    task: str
    name: str
    side: SideInputs
    start: int
    stop: int
    digests: Sequence[str] = ()
    originals: Sequence[str] = ()
    _states: dict[str, _CachedState] = field(default_factory=dict, init=False)

    def put(self, model: str, state: State) -> None:
        """Store a model's features, replacing its previous ones."""
        # The old state is freed first, so that a model never takes the budget twice.
        self.drop(model)
        self._states[model] = self.store.cache(f"{self.name}-{model}", state)

    def drop(self, model: str) -> None:
        """Remove a model's features from the cache."""
        if (before := self._states.pop(model, None)) is not None:
            self.store.free(before)

    def clear(self) -> None:
        """Remove the features of all models from the cache."""
        for model in [*self._states]:
            self.drop(model)

    def get(self, model: str) -> State:
        """Return a model's cached features before the layer."""
        return self.store.load(self._states[model])


@dataclass(frozen=True)
class LayerView:
    """Features before and after one layer on one batch, in one variant ("merged") and in the task's expert.

    `crossed_out` is the output of the variant's layer on the expert's features, and `crossed_layer` the map to it. For
    a mixture of experts, `routes` are the expert choices in the passes `merged`, `expert` and `crossed`, and
    `variant_along` is (state, routes=) -> output of the variant's layer on these routes.
    """

    layer: Layer
    task: str
    variant: str
    start: int
    stop: int
    merged_in: State
    expert_in: State
    merged_out: State
    expert_out: State
    crossed_out: State
    side: SideInputs
    crossed_layer: Callable[[State], State]
    routes: Mapping[str, ExpertRoutes] = field(default_factory=dict)
    variant_along: Callable[..., State] | None = None

    def rerouting_change(self, by: str) -> State:
        """Return the change of the variant's output by its own expert routing instead of another pass's.

        It is exactly zero if both choose the same experts.
        """
        if self.variant_along is None:
            return {}
        routes = self.routes[by].fixed_copy()
        changed = self.routes["merged"].rerouted_tokens(routes)
        other = self.variant_along(self.merged_in, routes=routes) if changed.any() else self.merged_out
        difference = subtract_states(self.merged_out, other)
        # Tokens with the same experts differ by rounding only, as experts get other tokens with them.
        same = ~changed.reshape(difference["hidden"].shape[:2])[..., None]
        return difference | {"hidden": difference["hidden"].masked_fill(same, 0)}


@dataclass(frozen=True)
class DriftSplit:
    """The drift e after a layer and its exact parts, e = m + p (Prop. 1, Eq. 3), over floating tensors."""

    drift: State
    local_mismatch: State
    propagation: State


def decompose(view: LayerView) -> DriftSplit:
    """Split the drift of a layer into local mismatch and propagation, e = m + p exactly.

    m = merged layer - expert layer, both on the expert's features. p = merged layer on the merged features - merged
    layer on the expert's. Source: FeatCal (arXiv:2605.13030), Prop. 1, Eq. 3.
    """
    return DriftSplit(
        drift=subtract_states(view.merged_out, view.expert_out),
        local_mismatch=subtract_states(view.crossed_out, view.expert_out),
        propagation=subtract_states(view.merged_out, view.crossed_out),
    )


def differentiable_split(view: LayerView) -> DriftSplit:
    """Split the drift into e = m + p with a differentiable p = A e, on the crossed pass's expert routes.

    Between the expert's features and the merged ones, tokens of a mixture jump to other experts, which no Jacobian
    sees. That jump counts as local mismatch, so that e = m + p still holds.
    """
    split, jump = decompose(view), view.rerouting_change("crossed")
    if not jump:
        return split
    return DriftSplit(split.drift, add_states(split.local_mismatch, jump), subtract_states(split.propagation, jump))


def drift_columns(view: LayerView, pool: Pool) -> dict[str, Tensor]:
    """Compute the drift measures of one layer, [n] over samples, as columns by name.

    e = m + p (Eq. 3) and, for a residual layer, r = p - e_in (Eq. 28). The growth condition (Eq. 34-36) has the best
    constants gamma = |p| / |e_in| - 1 and eta = |m| / |e_in|. Source: FeatCal (arXiv:2605.13030).

    Of pooled vectors: `drift_l2` |e|, `expert_l2` |h_expert|, `cos`, `mismatch_l2` |m|, `propagation_l2` |p|, and for
    residual layers `residual_l2` |r|; `mixed` is 2 <m, p> in squares of `unit`, a power of two near their entries. Of
    the full state: `state_in` |e_in|, `state_mismatch` |m|, `state_propagation` |p|, `state_drift` |e|. Of a mixture:
    `rerouted`, the share of tokens with other experts than in the expert model; with c the change by that in the pooled
    vector, `rerouted_l2` |c| and `rerouted_along` <c, e> in squares of `unit`.
    """
    split = decompose(view)

    def pooled_vectors(state: State) -> Tensor:
        return view.layer.pool_state(state, view.side, pool)

    mismatch, propagation = pooled_vectors(split.local_mismatch), pooled_vectors(split.propagation)
    expert, merged, drift = (
        pooled_vectors(view.expert_out),
        pooled_vectors(view.merged_out),
        pooled_vectors(split.drift),
    )
    # Products of features may leave float32's range, so they are taken in this unit.
    unit = power_of_two_scale(torch.maximum(mismatch.abs(), propagation.abs()).amax(dim=1))
    columns = {
        "drift_l2": row_norms(drift),
        "expert_l2": row_norms(expert),
        "cos": expert_cosine(merged, expert),
        "mismatch_l2": row_norms(mismatch),
        "propagation_l2": row_norms(propagation),
        "unit": unit,
        "mixed": 2 * (mismatch / unit[:, None] * (propagation / unit[:, None])).sum(dim=1),
        "state_mismatch": state_norms(split.local_mismatch),
        "state_propagation": state_norms(split.propagation),
        "state_drift": state_norms(split.drift),
    }
    drift_in = subtract_states(view.merged_in, view.expert_in)
    columns["state_in"] = state_norms(drift_in) if drift_in else torch.zeros_like(columns["drift_l2"])
    if changed := view.rerouting_change("expert"):
        elsewhere, c = view.routes["merged"].rerouted_tokens(view.routes["expert"]), pooled_vectors(changed)
        mask = view.side.mask(view.layer.stream)
        real = elsewhere.new_ones(elsewhere.shape) if mask is None else mask.reshape(-1).bool()
        by_sample = (part.reshape(len(c), -1).sum(dim=1).to(c) for part in (elsewhere & real, real))
        columns["rerouted"] = torch.div(*by_sample)
        columns["rerouted_l2"] = row_norms(c)
        columns["rerouted_along"] = (c / unit[:, None] * (drift / unit[:, None])).sum(dim=1)
    if view.layer.is_residual:
        columns["residual_l2"] = row_norms(propagation - pooled_vectors(drift_in))
    return columns


def walk(
    pool: ModelPool,
    task: str,
    variants: Sequence[str],
    batches: Iterable[Batch],
    *,
    ids: Sequence[str] = (),
) -> Iterator[LayerView]:
    """Yield a `LayerView` for each layer, batch and variant, in forward order.

    In memory at a time: one layer of the expert and of each variant, and the features at one boundary.

    Args:
        pool: the models.
        task: the task; its expert is the reference, and its attachments apply.
        variants: names in the pool.
        batches: the samples, each batch read once.
        ids: sample ids, for messages.

    Raises:
        NumericsError: weights or features are NaN or infinite; names the layer, the task and the first sample.
    """
    expert = expert_name(task)
    models = [expert, *variants]
    stream = FeatureStream(pool, {task: InMemoryBatches(lambda: batches, ids)}, models)

    for layer in pool.chain.layers:
        maps = {model: pool.layer_map(model, layer, task) for model in models}
        for batch in stream.batches(layer, task):
            entered = {model: batch.get(model) for model in models}
            routes = {model: ExpertRoutes() for model in models} if layer.num_experts else {}
            # Routes are recorded in this pass, so that the token choice needs no second one.
            through = {model: partial(maps[model], routes=routes.get(model)) for model in models}
            left = {expert: stream.take(layer, batch, expert, through[expert])}
            for variant in variants:
                if variant != expert:
                    left[variant] = stream.take(layer, batch, variant, through[variant])
                crossed_routes = ExpertRoutes() if routes else None
                # Models agree at boundary 0, so the stem's crossed output is already known.
                if layer.index == 1:
                    crossed = left[variant]
                else:
                    crossed = maps[variant](entered[expert], batch.side, crossed_routes)
                passes = {
                    "merged": routes.get(variant),
                    "expert": routes.get(expert),
                    "crossed": crossed_routes,
                }
                yield LayerView(
                    layer=layer,
                    task=task,
                    variant=variant,
                    start=batch.start,
                    stop=batch.stop,
                    merged_in=entered[variant],
                    expert_in=entered[expert],
                    merged_out=left[variant],
                    expert_out=left[expert],
                    crossed_out=crossed,
                    side=batch.side,
                    crossed_layer=partial(maps[variant], side=batch.side),
                    routes={name: route for name, route in passes.items() if route is not None},
                    variant_along=partial(maps[variant], side=batch.side) if routes else None,
                )
            entered.clear()  # or two batches would be in memory
        stream.check()
        maps.clear()  # or two layers would be in memory


def _states_by_layer(
    pool: ModelPool,
    model: str,
    batches: Iterable[Batch],
    *,
    task: str = "",
) -> Iterator[tuple[Layer, list[tuple[int, State, SideInputs]]]]:
    """Run one model layer by layer; yield each layer with the features of all batches after it."""
    stream = FeatureStream(pool, {task: InMemoryBatches(lambda: batches)}, [model])

    for layer in pool.chain.layers:
        layer_map = pool.layer_map(model, layer, task)
        for batch in stream.batches(layer, task):
            stream.take(layer, batch, model, layer_map)
        if layer is pool.chain.layers[-1]:
            stream.check()
        yield layer, [(batch.start, batch.get(model), batch.side) for batch in stream.cached[task]]


def iter_final_features(
    pool: ModelPool,
    model: str,
    batches: Iterable[Batch],
    *,
    task: str = "",
    pooling: Pool | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the final features of one model, batch by batch: (position of the first sample, [n, d]).

    Args:
        pool: the models.
        model: the model's name.
        batches: the samples.
        task: the task of the attachment.
        pooling: the pooling to one vector per sample; None returns features as they are.
    """
    for layer, states in _states_by_layer(pool, model, batches, task=task):
        if layer.role == "head":
            for start, state, side in states:
                yield (
                    start,
                    state[layer.stream] if pooling is None else layer.pool_state(state, side, pooling),
                )


def sample_cache_bytes(pool: ModelPool, model: str, inputs: object, num_models: int = 1) -> int:
    """Return the bytes that the cached features of one sample take between two layers.

    Args:
        pool: the models.
        model: any model's name.
        inputs: raw inputs of one sample.
        num_models: the number of models whose features are cached.
    """
    state, side = pool.initial_state(inputs)
    stem = pool.chain.layers[0]
    out = pool.layer_map(model, stem, "")(state, side)
    return num_models * sum(leaf.nbytes // len(leaf) for leaf in out.values()) + side.nbytes


@torch.no_grad()
def capture(module: nn.Module, inputs: Iterable[Any], *, pool: Pool | None = None) -> Iterator[tuple[Layer, Tensor]]:
    """Yield each layer with its pooled features [n, d], in forward order; one boundary of features is in memory.

    Args:
        module: any supported module; run in eval mode, not modified.
        inputs: batches of raw inputs, each read once.
        pool: the pooling to one vector per sample; None takes the modality's default.

    Raises:
        IncompatibleModelsError: no adapter supports the module.
        NumericsError: weights or features are NaN or infinite.
    """
    parameter = next(module.parameters())
    sources = {"model": module_source(module, "model")}
    batches = iter(inputs)
    example = next(batches)
    chain = chain_of_module(module, example)
    models = ModelPool(
        chain, module, sources, device=parameter.device, dtype=parameter.dtype, modules={"model": module}
    )
    how = pool or chain.modality.pool
    for layer, states in _states_by_layer(
        models, "model", _batches_with_positions(itertools.chain([example], batches))
    ):
        vectors = [layer.pool_state(state, side, how) for _, state, side in states]
        yield layer, torch.cat(vectors)


def _batches_with_positions(inputs: Iterable[Any]) -> Iterator[Batch]:
    start = 0
    for batch in inputs:
        # All inputs of a batch have one row per sample, so any of them counts the samples.
        rows = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
        yield Batch(start, start + len(rows), batch)
        start += len(rows)


# Largest relative error between two computations of one drift, far above the rounding of the dtype.
_RELATIVE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

# The same relative to the features: drift is their difference, so rounding of their size remains in it.
_ROUNDING = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


def closure_tolerance(dtype: str, drift_rel: float) -> float:
    """Return the largest closure error that rounding explains, given the relative drift |e| / |h|."""
    return _RELATIVE[dtype] + _ROUNDING[dtype] / drift_rel


class LibraryDrift:
    """The drift of a task's first samples in the library's own forward passes, to verify measured drift.

    `batch` has at most `most` samples, and as many as fit the budget. `error` is |e - e_library| / |e| by variant and
    layer; NaN without drift.
    """

    def __init__(
        self,
        pool: ModelPool,
        task: str,
        variants: Sequence[str],
        samples: SampleSet,
        budget: int,
        most: int | None = None,
    ) -> None:
        self._task = task
        num_states = len(pool.chain.layers) * (1 + len(variants))
        per_sample = sample_cache_bytes(pool, expert_name(task), samples.load([0]), num_states)
        fitting = max(1, budget // max(1, per_sample))
        # A whole batch is read and then cut, because texts are padded to the longest of their batch.
        self.batch = next(samples.batches()).select_rows(0, min(fitting, most or fitting))
        self._model = str(pool.chain.settings.get("model", pool.chain.architecture))
        self._dtype = str(pool.dtype).removeprefix("torch.")
        inputs = inputs_to_device(self.batch.inputs, pool.device, pool.dtype)
        expert = pool.library_states(expert_name(task), inputs)
        self._drift: dict[str, list[State]] = {
            variant: [
                subtract_states(*pair) for pair in zip(pool.library_states(variant, inputs, task), expert, strict=True)
            ]
            for variant in variants
        }
        self._expert = expert
        self.error: dict[tuple[str, int], float] = {}

    def compare(self, layer: Layer, variant: str, merged: State, expert: State) -> None:
        """Record the closure error after a layer; raise a `NumericsError` if it exceeds rounding."""
        merged, expert = self._compared_rows(merged), self._compared_rows(expert)
        # The library returned the states after layers 1..L.
        theirs = self._drift[variant][layer.index - 1]
        self._require_closed(layer, variant, "drift", subtract_states(merged, expert), theirs, expert)

    def compare_expert(self, layer: Layer, expert: State) -> None:
        """Raise a `NumericsError` if the expert's features after a layer are not the library's."""
        expert = self._compared_rows(expert)
        theirs = self._expert[layer.index - 1]
        self._require_closed(layer, expert_name(self._task), "feature", expert, theirs, expert)

    def _compared_rows(self, state: State) -> State:
        return {name: leaf[: self.batch.stop] for name, leaf in state.items()}

    def _require_closed(
        self, layer: Layer, variant: str, compared: str, ours: State, theirs: State, features: State
    ) -> None:
        error, limit, is_off = _closure_error_and_limit(ours, theirs, features, self._dtype)
        self.error[variant, layer.index] = error
        if is_off:
            raise NumericsError(
                f"{self._model}: the {compared} of {variant} after layer {layer.index} ({layer.path}), task "
                f"{self._task!r}, is not that of ordinary forward passes: closure error {error:.2g}, at most "
                f"{limit:.1g} is rounding",
                hint="Blocks may return more than features, or the mask may hide tokens that others read. Pass other "
                "blocks=, pass mask=, or wrap the model.",
                layer=layer.index,
                task=self._task,
                variant=variant,
                closure_error=error,
                tolerance=limit,
            )


def _closure_error_and_limit(ours: State, theirs: State, features: State, dtype: str) -> tuple[float, float, bool]:
    """Return the relative closure error of a drift, the rounding limit, and True if the limit is exceeded."""
    sizes = torch.stack([state_norms(state).sum() for state in (ours, subtract_states(ours, theirs), features)])
    size, apart, scale = sizes.tolist()
    # Without drift a relative error is undefined, which tables show as missing.
    error = apart / size if size > 0 else math.nan
    # The limit grows as drift shrinks, because both drifts carry rounding of the features' size.
    limit = closure_tolerance(dtype, size / scale) if size > 0 and scale > 0 else 0.0
    # If one computation finds no drift at all, the other must not either.
    return error, limit, error > limit or (size == 0 and apart > _ROUNDING[dtype] * scale)


@torch.no_grad()
def check_closure(
    pool: ModelPool,
    samples: Mapping[str, SampleSet],
    variants: Sequence[str],
    budget: int,
    most: int | None = None,
) -> dict[str, LibraryDrift]:
    """Compare the features of the first task's first samples with the library's own forward passes.

    The variants are compared on that task only, as their weights are the same for all tasks. For the other tasks the
    library's features are returned: a calibration runs their experts anyway, and compares them on the way.

    Args:
        pool: the models.
        samples: samples by task.
        variants: names of the models whose drift from the experts is checked.
        budget: bytes of features that may be cached.
        most: samples of a task to compare; None takes a batch.
    """
    (task, of_task), *others = samples.items()
    library = LibraryDrift(pool, task, variants, of_task, budget, most)
    # Lazy passes advance together, so that one layer of each model is in memory.
    passes = (_states_by_layer(pool, model, [library.batch], task=task) for model in (expert_name(task), *variants))
    for (layer, [(_, expert, _)]), *of_variants in zip(*passes, strict=True):
        library.compare_expert(layer, expert)
        for variant, (_, [(_, state, _)]) in zip(variants, of_variants, strict=True):
            library.compare(layer, variant, state, expert)
    budget //= len(samples)  # all of these are held at once
    return {other: LibraryDrift(pool, other, (), of_other, budget, most) for other, of_other in others}
