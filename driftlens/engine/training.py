"""The walk that trains attachments: features of the merged model and of the expert meet at chosen boundaries."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from driftlens.data.samples import Batch
from driftlens.engine.carried import Parts
from driftlens.engine.pool import Attachment, LayerMap, ModelPool
from driftlens.engine.waiting import FeatureStore, WaitingBatch, read_batches
from driftlens.engine.walk import FiniteWatch, on_device
from driftlens.errors import IncompatibleModelsError
from driftlens.models.chain import Layer
from driftlens.variants import expert_of

OnEpoch = Callable[[int, int, float], None]
"""Told of each epoch: its number from 1, of how many, and the loss."""

_EXPERT, _MERGED = "expert", "merged"


@dataclass(frozen=True)
class BoundaryFeatures:
    """What leaves one layer on a task's calibration samples, [n, t, d] or [n, d] each.

    Attributes:
        layer: which one.
        task: whose samples these are.
        merged: of the model that is to be repaired, with what is attached before this boundary.
        expert: of the task's expert.
        mask: [n, t], true where a token counts; None means everywhere.
    """

    layer: Layer
    task: str
    merged: Tensor
    expert: Tensor
    mask: Tensor | None = None

    def rows(self, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The merged model's and the expert's vectors, [T, d] each: of every token that counts, padding left out.

        Args:
            chosen: positions of samples, [m]; None takes them all.

        Raises:
            IncompatibleModelsError: there are no tokens: channels come before space, as in convolutions.
        """
        _require_tokens(self.layer, self.merged)
        chosen = None if chosen is None else chosen.to(self.merged.device)
        merged, expert = (
            (self.merged, self.expert) if chosen is None else (self.merged[chosen], self.expert[chosen])
        )
        if self.mask is None:
            return merged.flatten(0, -2), expert.flatten(0, -2)
        mask = self.mask if chosen is None else self.mask[chosen]
        return merged[mask], expert[mask]


@dataclass(frozen=True)
class FrozenWalk:
    """One task's calibration samples through the merged model, whose weights stay as they are, and what is wanted.

    Attributes:
        task: whose samples these are.
        batches: the samples, in order.
        maps: the merged model's layers, up to the last boundary.
        expert: by boundary, what leaves the expert's layer: [n, d], the mean over a sample's tokens that count.
        pool: says how inputs begin their way.
    """

    task: str
    batches: Sequence[Batch]
    maps: Sequence[LayerMap]
    expert: Mapping[int, Tensor]
    pool: ModelPool

    def means(self, chosen: Tensor, attached: Mapping[int, Attachment]) -> dict[int, tuple[Tensor, Tensor]]:
        """By boundary the merged model's token means with what is attached, and the expert's: [m, d] each.

        Both are in the order of the batches, and gradients flow to what is attached.

        Args:
            chosen: positions of samples, [m].
            attached: what is put on the features behind a layer, each token; later layers see it.

        Raises:
            IncompatibleModelsError: there are no tokens: channels come before space, as in convolutions.
        """
        found: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in self.expert}
        begin = 0
        for batch in self.batches:
            places = torch.arange(begin, begin + batch.stop - batch.start)
            own = torch.isin(places, chosen)
            begin += len(places)
            if not own.any():
                continue
            inputs = on_device(batch.inputs_of(own.nonzero()[:, 0]), self.pool.device, self.pool.dtype)
            state, side = self.pool.chain.start(inputs)
            for layer_map in self.maps:
                state, index, stream = layer_map(state, side), layer_map.layer.index, layer_map.layer.stream
                if index in attached:
                    _require_tokens(layer_map.layer, state[stream])
                    state = {**state, stream: attached[index](state[stream])}
                if index in found:
                    wanted = self.expert[index][places[own].to(self.expert[index].device)]
                    found[index].append((_token_means(state[stream], side.mask(stream)), wanted))
        joined = {index: zip(*pairs, strict=True) for index, pairs in found.items()}
        return {index: (torch.cat(own), torch.cat(wanted)) for index, (own, wanted) in joined.items()}


def _require_tokens(layer: Layer, features: Tensor) -> None:
    if features.dim() > 3:
        raise IncompatibleModelsError(
            f"{layer.path} gives features {list(features.shape)}, channels before space; a map of tokens can't be "
            "attached there",
            hint="Choose a method that attaches behind the last layer, or one that changes weights.",
        )


def _token_means(features: Tensor, mask: Tensor | None) -> Tensor:
    """[n, t, d] averaged over the tokens that count; [n, d] as it is."""
    if features.dim() < 3:
        return features
    if mask is None:
        return features.mean(dim=1)
    counts = mask.to(features)[..., None]
    return (features * counts).sum(dim=1) / counts.sum(dim=1)


class Trainer:
    """What learns the attachments: every boundary's by itself (`LayerTrainer`), or all of a task (`JointTrainer`)."""

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """Where something is attached; boundary l is what leaves layer l."""
        return (num_layers,)


class LayerTrainer(Trainer, ABC):
    """Learns every boundary's map by itself, in forward order, from features that no longer change."""

    @abstractmethod
    def train(self, features: BoundaryFeatures, generator: torch.Generator, on_epoch: OnEpoch) -> Attachment:
        """The map for one task and boundary.

        Args:
            features: what is to be mapped, and onto what.
            generator: for whatever is drawn at random.
            on_epoch: to be told of each epoch.
        """


class JointTrainer(Trainer, ABC):
    """Learns the maps of all boundaries together, through the layers between them."""

    @abstractmethod
    def train_jointly(
        self, walk: FrozenWalk, generator: torch.Generator, on_epoch: OnEpoch
    ) -> Mapping[int, Attachment]:
        """The maps of one task by boundary; arguments as for `LayerTrainer.train`."""


def train_attachments(
    pool: ModelPool,
    parts: Parts,
    trainer: Trainer,
    *,
    merged: str = "merged",
    seed: int = 0,
    feature_budget: int = 2 * 2**30,
    spill: Path | None = None,
    on_step: Callable[[int, str], None],
    on_epoch: OnEpoch,
) -> Iterator[tuple[str, int, Attachment]]:
    """Task, boundary and what is attached there, task after task, in forward order.

    Nothing of the pool is modified. A later boundary's features have passed what was attached before it.

    Args:
        pool: merged model and one expert per task.
        parts: calibration samples by task.
        trainer: learns each map.
        merged: the pool's name of the model to repair.
        seed: every task and boundary draws from a generator of its own.
        feature_budget: bytes of waiting features of one task that may stay in memory.
        spill: folder for features beyond the budget; None keeps all in memory.
        on_step: called with layer index and task before every batch; it may raise, `Cancelled` for instance.
        on_epoch: told of each epoch.

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    wanted = frozenset(trainer.boundaries(len(pool.chain.layers)))
    for task in sorted(parts):
        if isinstance(trainer, JointTrainer):
            walk = _frozen_walk(pool, parts, task, merged, sorted(wanted), on_step)
            generator = torch.Generator().manual_seed(seed + zlib.crc32(f"{max(wanted)} {task}".encode()))
            with torch.enable_grad():
                found = trainer.train_jointly(walk, generator, on_epoch)
            for boundary, attachment in found.items():
                yield task, boundary, attachment
            continue
        assert isinstance(trainer, LayerTrainer)
        with FeatureStore(feature_budget, spill) as store:
            batches = (batch for part in parts[task] for batch in part.batches())
            waiting = list(read_batches(pool, batches, store, "train", (_EXPERT, _MERGED)))
            ids = [sample for part in parts[task] for sample in part.ids]
            for layer in pool.chain.layers[: max(wanted)]:
                maps = {
                    _EXPERT: pool.layer_map(expert_of(task), layer, task),
                    _MERGED: pool.layer_map(merged, layer, task),
                }
                watch = FiniteWatch(layer, task, ids)
                for batch in waiting:
                    on_step(layer.index, task)
                    _advance(batch, maps, watch)
                watch.check()
                if layer.index in wanted:
                    features = _gathered(waiting, layer, task)
                    generator = torch.Generator().manual_seed(
                        seed + zlib.crc32(f"{layer.index} {task}".encode())
                    )
                    with torch.enable_grad():
                        attachment = trainer.train(features, generator, on_epoch)
                    _attach(waiting, layer, attachment)
                    yield task, layer.index, attachment


@torch.no_grad()
def _frozen_walk(
    pool: ModelPool,
    parts: Parts,
    task: str,
    merged: str,
    wanted: Sequence[int],
    on_step: Callable[[int, str], None],
) -> FrozenWalk:
    """The merged model's layers up to the last boundary, and what the expert has at each."""
    batches = [batch for part in parts[task] for batch in part.batches()]
    ids = [sample for part in parts[task] for sample in part.ids]
    layers = pool.chain.layers[: wanted[-1]]
    found: dict[int, list[Tensor]] = {index: [] for index in wanted}
    states = [pool.chain.start(on_device(batch.inputs, pool.device, pool.dtype)) for batch in batches]
    for layer in layers:
        layer_map, watch = pool.layer_map(expert_of(task), layer, task), FiniteWatch(layer, task, ids)
        for at, (state, side) in enumerate(states):
            on_step(layer.index, task)
            state = layer_map(state, side)
            watch.see("the expert model", state[layer.stream])
            states[at] = state, side
            if layer.index in found:
                _require_tokens(layer, state[layer.stream])
                found[layer.index].append(_token_means(state[layer.stream], side.mask(layer.stream)))
        watch.check()
    maps = [pool.layer_map(merged, layer, task) for layer in layers]
    return FrozenWalk(task, batches, maps, {index: torch.cat(rows) for index, rows in found.items()}, pool)


@torch.no_grad()
def _advance(batch: WaitingBatch, maps: dict[str, LayerMap], watch: FiniteWatch) -> None:
    for model, layer_map in maps.items():
        out = layer_map(batch.get(model), batch.side)
        watch.see(f"the {model} model", out[layer_map.layer.stream])
        batch.put(model, out)


def _gathered(waiting: Sequence[WaitingBatch], layer: Layer, task: str) -> BoundaryFeatures:
    """The features of all batches; shorter texts are padded to the longest."""
    states = [(batch.get(_MERGED)[layer.stream], batch.get(_EXPERT)[layer.stream]) for batch in waiting]
    masks = [batch.side.mask(layer.stream) for batch in waiting]
    mask = None
    if states[0][0].dim() == 3:
        longest = max(merged.shape[1] for merged, _ in states)
        if any(found is not None for found in masks) or any(
            merged.shape[1] < longest for merged, _ in states
        ):
            mask = torch.cat(
                [
                    _padded(merged.new_ones(merged.shape[:2]) if found is None else found, longest)
                    for (merged, _), found in zip(states, masks, strict=True)
                ]
            ).bool()
        states = [(_padded(merged, longest), _padded(expert, longest)) for merged, expert in states]
    merged, expert = (torch.cat(parts) for parts in zip(*states, strict=True))
    return BoundaryFeatures(layer, task, merged, expert, mask)


def _padded(tokens: Tensor, length: int) -> Tensor:
    """[n, t, ...] with zeros behind, up to a length."""
    return torch.cat(
        [tokens, tokens.new_zeros(len(tokens), length - tokens.shape[1], *tokens.shape[2:])], dim=1
    )


@torch.no_grad()
def _attach(waiting: Sequence[WaitingBatch], layer: Layer, attachment: Attachment) -> None:
    for batch in waiting:
        state = batch.get(_MERGED)
        batch.put(_MERGED, {**state, layer.stream: attachment(state[layer.stream])})
