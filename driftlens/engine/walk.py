"""The walk: models side by side over the same samples, one layer at a time; also one model alone.

Per layer and batch, the expert's layer runs on the expert's features, and each variant's layer on its own features and
on the other model's (the crossed output). Only the features of one boundary wait at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from driftlens.base.errors import NumericsError
from driftlens.checkpoints.sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool, moved
from driftlens.linalg.state import subtract
from driftlens.models.architecture import architecture_of
from driftlens.models.chain import Layer, Pool, SideInputs, State

Reference = Literal["expert", "merged"]
"""Whose features the local mismatch is taken on. The paper's is `expert`; with `merged` the two maps swap roles."""


@dataclass(frozen=True)
class LayerView:
    """One layer, seen on one batch, between one variant ("merged" here, whatever its name) and the task's expert.

    All states are of the same samples. `crossed_out` is one model's layer on the other's input: with reference
    "expert" the merged layer on the expert's features, with "merged" the expert layer on the merged features.
    """

    layer: Layer
    task: str
    variant: str
    reference: Reference
    start: int
    stop: int
    merged_in: State
    expert_in: State
    merged_out: State
    expert_out: State
    crossed_out: State
    side: SideInputs
    crossed_layer: Callable[[State], State]
    """The map that took the crossing input to `crossed_out`: the merged layer for reference "expert"."""


@dataclass(frozen=True)
class Split:
    """Drift e at a boundary and its exact parts, e = m + p (Prop. 1, Eq. 3); states of float leaves."""

    drift: State
    local_mismatch: State
    propagation: State


def decompose(view: LayerView) -> Split:
    """Drift, local mismatch and propagation of a layer view.

    With reference "expert": m = merged layer - expert layer, both on expert input; p = merged layer on merged input -
    merged layer on expert input. With reference "merged": m = merged layer - expert layer, both on merged input;
    p = expert layer on merged input - expert layer on expert input. Both sum exactly to the drift.
    Source: FeatCal (arXiv:2605.13030), Prop. 1, Eq. 3.
    """
    drift = subtract(view.merged_out, view.expert_out)
    if view.reference == "expert":
        return Split(
            drift, subtract(view.crossed_out, view.expert_out), subtract(view.merged_out, view.crossed_out)
        )
    return Split(
        drift, subtract(view.merged_out, view.crossed_out), subtract(view.crossed_out, view.expert_out)
    )


def walk(
    pool: ModelPool,
    task: str,
    variants: Sequence[str],
    batches: Iterable[Batch],
    *,
    reference: Reference = "expert",
    ids: Sequence[str] = (),
) -> Iterator[LayerView]:
    """Layer views in forward order: for each layer, for each batch, for each variant.

    Nothing is modified. What is alive at a time: one layer of the expert and of each variant, and the features waiting
    at one boundary, (1 + variants) * samples * state.

    Args:
        pool: the models.
        task: whose expert the variants are compared with, and whose attachments count.
        variants: names in the pool.
        batches: the samples, each batch read once.
        reference: see `Reference`.
        ids: sample ids, for messages.

    Raises:
        NumericsError: weights or features are NaN or infinite; names the layer, the task and the first sample.
    """
    expert = pool.expert(task)
    models = [expert, *variants]
    waiting: list[_Waiting] = []
    for layer in pool.chain.layers:
        maps = {model: pool.layer_map(model, layer, task) for model in models}
        pool.expect(models, layer.index + 1)
        source = _at_start(pool, models, batches) if layer.index == 1 else waiting
        carried: list[_Waiting] = []
        watch = FiniteWatch(layer, task, ids)
        for at in source:
            out = {expert: maps[expert](at.states[expert], at.side)}
            for variant in variants:
                if variant != expert:
                    out[variant] = maps[variant](at.states[variant], at.side)
                crossing = expert if reference == "expert" else variant
                mapped = variant if reference == "expert" else expert
                crossed_layer = maps[mapped].at(at.side)
                # Models agree at boundary 0, so the stem's crossed output is already known.
                crossed = out[mapped] if layer.index == 1 else crossed_layer(at.states[crossing])
                yield LayerView(
                    layer=layer,
                    task=task,
                    variant=variant,
                    reference=reference,
                    start=at.start,
                    stop=at.stop,
                    merged_in=at.states[variant],
                    expert_in=at.states[expert],
                    merged_out=out[variant],
                    expert_out=out[expert],
                    crossed_out=crossed,
                    side=at.side,
                    crossed_layer=crossed_layer,
                )
            for model, state in out.items():
                watch.see(model, state[layer.stream], at.start)
            at.states.clear()  # consumed: the next boundary's features take their place
            carried.append(_Waiting(at.start, at.stop, out, at.side))
        watch.check()
        waiting = carried
        maps.clear()  # before the next layer is read: both would be alive


def layer_states(
    pool: ModelPool, model: str, batches: Iterable[Batch], *, task: str = ""
) -> Iterator[tuple[Layer, list[tuple[int, State, SideInputs]]]]:
    """One model's plain forward, layer by layer: each layer with (first sample, state, side inputs) of every batch.

    Layers are read one at a time while all given batches wait, so hand over as many as memory allows.

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    waiting: list[_Waiting] = []
    for layer in pool.chain.layers:
        layer_map = pool.layer_map(model, layer, task)
        pool.expect([model], layer.index + 1)
        source = _at_start(pool, [model], batches) if layer.index == 1 else waiting
        waiting = [
            _Waiting(at.start, at.stop, {model: layer_map(at.states[model], at.side)}, at.side)
            for at in source
        ]
        watch = FiniteWatch(layer, task)
        for at in waiting:
            watch.see(model, at.states[model][layer.stream], at.start)
        watch.check()
        yield layer, [(at.start, at.states[model], at.side) for at in waiting]


def forward(
    pool: ModelPool, model: str, batches: Iterable[Batch], *, task: str = "", pooling: Pool | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Final features of one model, batch by batch: (position of the first sample, [n, d]).

    With `pooling` there is one vector per sample, whatever leaves the model; without, that is given as it is.

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    for layer, states in layer_states(pool, model, batches, task=task):
        if layer.role == "head":
            for start, state, side in states:
                yield start, state[layer.stream] if pooling is None else layer.vectors(state, side, pooling)


class FiniteWatch:
    """Remembers the streams of one task and layer as one number per sample, and looks at them all at once.

    Args:
        layer: whose output is watched.
        task: whose samples they are.
        ids: names of the samples, where they are known.
    """

    def __init__(self, layer: Layer, task: str, ids: Sequence[str] = ()) -> None:
        self._layer = layer
        self._task = task
        self._ids = ids
        self._first = 0
        self._totals: dict[str, list[Tensor]] = {}

    def see(self, model: str, stream: Tensor, start: int = 0) -> None:
        """Remember the next batch of a model's features, [n, ...]; `start` is its first sample's position."""
        if model not in self._totals:
            self._first = start
        # A sum is NaN or infinite as soon as one entry is, and is cheaper than looking at each.
        self._totals.setdefault(model, []).append(stream.flatten(1).sum(dim=1, dtype=torch.float64))

    def check(self) -> None:
        """Refuse what was seen.

        Raises:
            NumericsError: some entry is NaN or infinite; names the layer, the task and the first sample.
        """
        for model, totals in self._totals.items():
            bad = (~torch.isfinite(torch.cat(totals))).nonzero()
            if len(bad):
                row = self._first + int(bad[0])
                sample = self._ids[row] if row < len(self._ids) else str(row)
                raise NumericsError(
                    f"features of {model} are NaN or infinite after layer {self._layer.index} "
                    f"({self._layer.path}), task {self._task!r}, first in sample {sample!r}",
                    hint="Look at that input and at the layer's weights; "
                    "in a half-precision dtype, try compute.dtype: float32.",
                    layer=self._layer.index,
                    task=self._task,
                    sample=sample,
                )


@dataclass(frozen=True)
class _Waiting:
    """The features of one batch at one boundary, by model."""

    start: int
    stop: int
    states: dict[str, State]
    side: SideInputs


def _at_start(pool: ModelPool, models: Sequence[str], batches: Iterable[Batch]) -> Iterator[_Waiting]:
    for batch in batches:
        state, side = pool.chain.start(on_device(batch.inputs, pool.device, pool.dtype))
        yield _Waiting(batch.start, batch.stop, dict.fromkeys(models, state), side)


def on_device(inputs: object, device: torch.device, dtype: torch.dtype) -> object:
    """Raw inputs moved to `device`; floating tensors are cast, lists become tuples, mappings of any kind dicts."""
    if isinstance(inputs, Tensor):
        return moved(inputs, device, dtype if inputs.is_floating_point() else None)
    if isinstance(inputs, Mapping):
        return {name: on_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(on_device(value, device, dtype) for value in inputs)
    return inputs


def input_bytes(inputs: object) -> int:
    """Bytes of raw inputs, as `on_device` takes them."""
    if isinstance(inputs, Tensor):
        return inputs.nbytes
    if isinstance(inputs, Mapping):
        return sum(input_bytes(value) for value in inputs.values())
    return sum(input_bytes(value) for value in inputs) if isinstance(inputs, list | tuple) else 0


def waiting_bytes(pool: ModelPool, model: str, inputs: object, num_models: int = 1) -> int:
    """Bytes of one sample that wait at a boundary: features of so many models behind the stem, and side inputs."""
    state, side = pool.chain.start(on_device(inputs, pool.device, pool.dtype))
    stem = pool.chain.layers[0]
    out = pool.layer_map(model, stem, "")(state, side)
    return num_models * sum(leaf.nbytes // len(leaf) for leaf in out.values()) + side.nbytes


@torch.no_grad()
def capture(
    module: nn.Module, inputs: Iterable[Any], *, pool: Pool | None = None
) -> Iterator[tuple[Layer, Tensor]]:
    """Each layer with its pooled features [n, d], in forward order; one boundary of features is alive at a time.

    Args:
        module: any module an adapter understands; run in eval mode, not modified.
        inputs: batches of raw inputs, each read once.
        pool: how one vector per sample is taken from a layer's state; None takes what suits the model's modality.

    Raises:
        IncompatibleModelsError: no adapter understands the module.
        NumericsError: weights or features are NaN or infinite.
    """
    first = next(module.parameters())
    sources = {"model": module_source(module, "model")}
    chain = architecture_of(module).chain
    models = ModelPool(
        chain, module, sources, device=first.device, dtype=first.dtype, modules={"model": module}
    )
    how = pool or chain.modality.pool
    for layer, states in layer_states(models, "model", _numbered(inputs)):
        vectors = [layer.vectors(state, side, how) for _, state, side in states]
        yield layer, torch.cat(vectors)


def _numbered(inputs: Iterable[Any]) -> Iterator[Batch]:
    start = 0
    for batch in inputs:
        first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
        yield Batch(start, start + len(first), batch)
        start += len(first)
