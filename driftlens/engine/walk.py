"""The walk: models side by side over the same samples, one layer at a time; also one model alone.

Per layer and batch, the expert's layer runs on the expert's features, and each variant's layer on its own features and
on the other model's (the crossed output).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from driftlens.checkpoints.sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.forward_order import Given, Passage, forward_order, on_device
from driftlens.engine.pool import ModelPool
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
    variants = list(variants)
    passage = Passage(
        pool, {task: [Given(lambda: batches, ids)]}, [pool.expert(task), *variants], is_full=False
    )
    return forward_order(_SideBySide(passage, task, variants, reference), pool.chain.layers)


@dataclass(frozen=True)
class _SideBySide:
    """Sees every layer as the expert and the variants have it."""

    passage: Passage
    task: str
    variants: Sequence[str]
    reference: Reference

    def visit(self, layer: Layer) -> Iterator[LayerView]:
        pool, models = self.passage.pool, self.passage.models
        expert = models[0]
        maps = {model: pool.layer_map(model, layer, self.task) for model in models}
        pool.expect(models, layer.index + 1)
        crossing = self.passage.crossing(layer, self.task)
        for batch in crossing:
            entered = {model: batch.get(model) for model in models}
            left = {expert: crossing.take(batch, expert, maps[expert])}
            for variant in self.variants:
                if variant != expert:
                    left[variant] = crossing.take(batch, variant, maps[variant])
                is_forth = self.reference == "expert"
                crossed_layer = maps[variant if is_forth else expert].at(batch.side)
                # Models agree at boundary 0, so the stem's crossed output is already known.
                crossed = (
                    left[variant if is_forth else expert]
                    if layer.index == 1
                    else crossed_layer(entered[expert if is_forth else variant])
                )
                yield LayerView(
                    layer=layer,
                    task=self.task,
                    variant=variant,
                    reference=self.reference,
                    start=batch.start,
                    stop=batch.stop,
                    merged_in=entered[variant],
                    expert_in=entered[expert],
                    merged_out=left[variant],
                    expert_out=left[expert],
                    crossed_out=crossed,
                    side=batch.side,
                    crossed_layer=crossed_layer,
                )
            entered.clear()  # before the next batch is taken: both would be alive
        maps.clear()  # before the next layer is read


def layer_states(
    pool: ModelPool, model: str, batches: Iterable[Batch], *, task: str = ""
) -> Iterator[tuple[Layer, list[tuple[int, State, SideInputs]]]]:
    """One model's plain forward, layer by layer: each layer with (first sample, state, side inputs) of every batch.

    Layers are read one at a time while all given batches wait, so hand over as many as memory allows.
    """
    passage = Passage(pool, {task: [Given(lambda: batches)]}, [model], is_full=False)
    return forward_order(_Alone(passage, task, model), pool.chain.layers)


@dataclass(frozen=True)
class _Alone:
    passage: Passage
    task: str
    model: str

    def visit(self, layer: Layer) -> Iterator[tuple[Layer, list[tuple[int, State, SideInputs]]]]:
        layer_map = self.passage.pool.layer_map(self.model, layer, self.task)
        self.passage.pool.expect([self.model], layer.index + 1)
        crossing = self.passage.crossing(layer, self.task)
        for batch in crossing:
            crossing.take(batch, self.model, layer_map)
        yield layer, [(batch.start, batch.get(self.model), batch.side) for batch in self.passage.all_waiting]


def forward(
    pool: ModelPool, model: str, batches: Iterable[Batch], *, task: str = "", pooling: Pool | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Final features of one model, batch by batch: (position of the first sample, [n, d]).

    With `pooling` there is one vector per sample, whatever leaves the model; without, that is given as it is.
    """
    for layer, states in layer_states(pool, model, batches, task=task):
        if layer.role == "head":
            for start, state, side in states:
                yield start, state[layer.stream] if pooling is None else layer.vectors(state, side, pooling)


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
