"""The walk that trains: features of the merged model and of the expert meet at chosen boundaries.

What is learnt is a map behind a layer or a site, per task (`LayerTrainer`, `JointTrainer`), or the weights themselves,
for all tasks together (`WeightTrainer`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from driftlens.base.errors import IncompatibleModelsError
from driftlens.base.variants import expert_of
from driftlens.data.samples import Batch
from driftlens.engine.carried import Parts
from driftlens.engine.pool import Attachment, LayerMap, ModelPool, attachment_tensors, attachments_from
from driftlens.engine.steps import added_to
from driftlens.engine.waiting import FeatureStore, WaitingBatch, read_batches
from driftlens.engine.walk import FiniteWatch, on_device
from driftlens.models.chain import Layer, Slot

OnEpoch = Callable[[int, int, float], None]
"""Told of each epoch: its number from 1, of how many, and the loss."""

_EXPERT, _MERGED = "expert", "merged"
_INPUTS = "inputs"


class Memory(Protocol):
    """Keeps tensors by name, whole or as they were before, also where the process is killed."""

    def read(self, name: str) -> dict[str, Tensor]:
        """What was kept; nothing where nothing was."""
        ...

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep these in the place of what was kept under that name.

        Raises:
            RunError: there is no room for them.
        """
        ...


@dataclass(frozen=True)
class Course:
    """How one training goes.

    Attributes:
        generator: for whatever is drawn at random.
        told: told of each epoch; it may raise, `Cancelled` for instance.
        name: unlike that of any other training of the calibration.
        memory: where it keeps how far it is; None keeps nothing.
    """

    generator: torch.Generator
    told: OnEpoch
    name: str = ""
    memory: Memory | None = None

    def kept(self) -> dict[str, Tensor]:
        """What a training that was stopped has kept last; nothing where this is the first."""
        return {} if self.memory is None else self.memory.read(self.name)

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember how far the training is."""
        if self.memory is not None:
            self.memory.write(self.name, tensors)


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
        at = slice(None) if chosen is None else chosen.to(self.merged.device)
        mask = None if self.mask is None else self.mask[at]
        return _token_rows(self.merged[at], mask), _token_rows(self.expert[at], mask)


@dataclass(frozen=True)
class FrozenWalk:
    """One task's calibration samples through the merged model, and what its expert makes of them.

    Attributes:
        task: whose samples these are.
        count: of samples.
        maps: its layers, up to the last boundary.
        widths: by boundary at which the expert is compared, the features' width.
        pool: says how inputs begin their way.
        of_tokens: whether every token is compared that counts, or the mean over them.
    """

    task: str
    count: int
    maps: Sequence[LayerMap]
    widths: Mapping[int, int]
    pool: ModelPool
    of_tokens: bool
    _batches: Sequence[tuple[Batch, WaitingBatch]]

    def pairs(
        self,
        chosen: Tensor,
        attached: Mapping[int, Attachment] | None = None,
        weights: Mapping[Slot, Tensor] | None = None,
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """By boundary the merged model's features and the expert's: [m, d] each, or [T, d] of tokens that count.

        Both are in the order of the batches, and gradients flow to what is attached and to the weights.

        Args:
            chosen: positions of samples, [m].
            attached: what is put on the features behind a layer, or on those of its site; later layers see it.
            weights: in the place of the merged model's own.

        Raises:
            IncompatibleModelsError: there are no tokens: channels come before space, as in convolutions.
        """
        found: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in self.widths}
        begin = 0
        for batch, waiting in self._batches:
            places = torch.arange(begin, begin + batch.stop - batch.start)
            begin += len(places)
            own = torch.isin(places, chosen).nonzero()[:, 0]
            if not len(own):
                continue
            inputs = replace(batch, inputs=_inputs(batch, waiting)).inputs_of(own)
            state, side = self.pool.chain.start(on_device(inputs, self.pool.device, self.pool.dtype))
            for layer_map in self.maps:
                layer = layer_map.layer
                attachment = (attached or {}).get(layer.index)
                state = _with(layer_map, attachment, weights)(state, side)
                if attachment is not None:
                    _require_tokens(layer, state[layer.stream])
                if layer.index in found:
                    merged, mask = state[layer.stream], side.mask(layer.stream)
                    wanted = waiting.get(str(layer.index))[layer.stream]
                    wanted = wanted[own.to(wanted.device)]
                    pair = (
                        (_token_rows(merged, mask), _token_rows(wanted, mask))
                        if self.of_tokens
                        else (_token_means(merged, mask), wanted)
                    )
                    found[layer.index].append(pair)
        joined = {index: zip(*pairs, strict=True) for index, pairs in found.items()}
        return {index: (torch.cat(own), torch.cat(wanted)) for index, (own, wanted) in joined.items()}

    @torch.no_grad()
    def joined(self) -> dict[int, tuple[str, int]]:
        """Of every block with linear modules, the first site whose output is added to what entered it, and its width.

        In a transformer that is the projection behind its attention.

        Raises:
            IncompatibleModelsError: a block has no such site.
        """
        found = {}
        batch, waiting = self._batches[0]
        inputs = replace(batch, inputs=_inputs(batch, waiting)).inputs_of(torch.arange(1))
        state, side = self.pool.chain.start(on_device(inputs, self.pool.device, self.pool.dtype))
        for layer_map in self.maps:
            layer = layer_map.layer
            names = {site.name for site in layer.sites if site.kind == "linear"}
            if layer.role == "block" and names:  # the norm behind T5's encoder is a block without
                sums = added_to(layer, layer_map.parameters, state, side, names)
                site = next((name for name, stream in sums.items() if not stream), None)
                if site is None:
                    raise IncompatibleModelsError(
                        f"in {layer.path} no linear module's output is added to what entered it as it is",
                        hint="Choose a method that attaches behind layers, such as surgery_v2.",
                    )
                found[layer.index] = site, len(layer_map.parameters[f"{site}.weight"])
            state = layer_map(state, side)
        return found

    def leaves(self) -> dict[Slot, Tensor]:
        """Copies of the merged model's parameters, each to be trained; what is saved beside parameters is left out."""
        trainable = self.pool.parameter_names
        found = {}
        for layer_map in self.maps:
            for slot in self.pool.chain.owned(layer_map.layer).values():
                if slot.key in trainable:
                    stored = self.pool.stored(_MERGED, slot)
                    found[slot] = stored.to(self.pool.device, self.pool.dtype, copy=True).requires_grad_()
        return found


def _with(
    layer_map: LayerMap, attachment: Attachment | None, weights: Mapping[Slot, Tensor] | None
) -> LayerMap:
    slots = layer_map.layer.parameters.items() if weights else ()
    own = {name: weights[slot] for name, slot in slots if weights and slot in weights}
    return replace(layer_map, attachment=attachment, parameters={**layer_map.parameters, **own})


def _inputs(batch: Batch, waiting: WaitingBatch) -> Any:
    """Raw inputs of a batch, wherever they wait."""
    if batch.inputs is not None:
        return batch.inputs
    found = waiting.get(_INPUTS)
    return found.get(_INPUTS, found)


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


def _token_rows(features: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens that count, [T, d]; [n, d] as it is. A head may give tokens of its own, which no mask is of."""
    is_masked = mask is not None and features.dim() == 3 and mask.shape == features.shape[:2]
    return features[mask.bool()] if mask is not None and is_masked else features.flatten(0, -2)


class Trainer:
    """What learns: a map at every boundary by itself, all maps of a task, or the weights; see the subclasses."""

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """The layers that are changed, or behind or in which something is attached."""
        return (num_layers,)

    def targets(self, num_layers: int) -> Sequence[int]:
        """The boundaries at which the expert's features are wanted; boundary l is what leaves layer l."""
        return self.boundaries(num_layers)


class LayerTrainer(Trainer, ABC):
    """Learns every boundary's map by itself, in forward order, from features that no longer change."""

    @abstractmethod
    def train(self, features: BoundaryFeatures, course: Course) -> Attachment:
        """The map for one task and boundary.

        Args:
            features: what is to be mapped, and onto what.
            course: what it draws from, and is to tell of each epoch.
        """


class JointTrainer(Trainer, ABC):
    """Learns the maps of all boundaries together, through the layers between them.

    Attributes:
        of_tokens: whether features are compared token by token, or as means over the tokens that count.
    """

    of_tokens: ClassVar[bool] = False

    @abstractmethod
    def train_jointly(self, walk: FrozenWalk, course: Course) -> Mapping[int, Attachment]:
        """The maps of one task by the layer that they belong to; `course` as for `LayerTrainer.train`."""


class WeightTrainer(Trainer, ABC):
    """Learns weights from the samples of all tasks; nothing is attached."""

    @abstractmethod
    def train_weights(self, walks: Sequence[FrozenWalk], course: Course) -> Mapping[Slot, Tensor]:
        """New parameters by where they lie; `course` as for `LayerTrainer.train`."""


def train_attachments(
    pool: ModelPool,
    parts: Parts,
    trainer: LayerTrainer | JointTrainer,
    *,
    seed: int = 0,
    feature_budget: int = 2 * 2**30,
    spill: Path | None = None,
    memory: Memory | None = None,
    make: Callable[[Mapping[str, Tensor], str], Attachment] | None = None,
    on_step: Callable[[int, str], None],
    on_epoch: OnEpoch,
) -> Iterator[tuple[str, int, Attachment]]:
    """Task, boundary and what is attached there, task after task, in forward order.

    Nothing of the pool is modified. A later boundary's features have passed what was attached before it.

    Args:
        pool: merged model and one expert per task.
        parts: calibration samples by task.
        trainer: learns each map.
        seed: every task and boundary draws from a generator of its own.
        feature_budget: bytes of waiting features of one task that may stay in memory.
        spill: folder for features beyond the budget; None keeps all in memory.
        memory: keeps what is finished, and how far the rest is; what it has is not trained again.
        make: puts attachments that were kept together again; needed with `memory`.
        on_step: called with layer index and task before every batch; it may raise, `Cancelled` for instance.
        on_epoch: told of each epoch.

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    last = max(trainer.targets(len(pool.chain.layers)))
    for task in sorted(parts):
        finished = {} if memory is None or make is None else memory.read(f"finished {task}")
        if finished and make is not None:
            for (_, boundary), attachment in attachments_from(finished.items(), make).items():
                yield task, boundary, attachment
            continue

        def course(boundary: int, task: str = task) -> Course:
            name = f"{boundary} {task}"
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            return Course(generator, on_epoch, name, memory)

        found: dict[tuple[str, int], Attachment] = {}
        with FeatureStore(feature_budget, spill) as store:
            if isinstance(trainer, JointTrainer):
                walk = _frozen_walk(pool, parts, task, trainer, store, on_step)
                with torch.enable_grad():
                    found = {
                        (task, at): each for at, each in trainer.train_jointly(walk, course(last)).items()
                    }
            else:
                for at, each in _layer_by_layer(pool, parts, task, trainer, store, on_step, course):
                    found[task, at] = each
        if memory is not None:
            memory.write(f"finished {task}", attachment_tensors(found))
        for (_, boundary), attachment in found.items():
            yield task, boundary, attachment


def _layer_by_layer(
    pool: ModelPool,
    parts: Parts,
    task: str,
    trainer: LayerTrainer,
    store: FeatureStore,
    on_step: Callable[[int, str], None],
    course: Callable[[int], Course],
) -> Iterator[tuple[int, Attachment]]:
    """Boundary and map, each learnt from features that have passed those before it."""
    wanted = frozenset(trainer.boundaries(len(pool.chain.layers)))
    batches = (batch for part in parts[task] for batch in part.batches())
    waiting = list(read_batches(pool, batches, store, "train", (_EXPERT, _MERGED)))
    ids = [sample for part in parts[task] for sample in part.ids]
    for layer in pool.chain.layers[: max(wanted)]:
        maps = {
            _EXPERT: pool.layer_map(expert_of(task), layer, task),
            _MERGED: pool.layer_map(_MERGED, layer, task),
        }
        watch = FiniteWatch(layer, task, ids)
        for batch in waiting:
            on_step(layer.index, task)
            _advance(batch, maps, watch)
        watch.check()
        if layer.index in wanted:
            features = _gathered(waiting, layer, task)
            with torch.enable_grad():
                attachment = trainer.train(features, course(layer.index))
            _attach(waiting, layer, attachment)
            yield layer.index, attachment


def train_weights(
    pool: ModelPool,
    parts: Parts,
    trainer: WeightTrainer,
    *,
    seed: int = 0,
    feature_budget: int = 2 * 2**30,
    spill: Path | None = None,
    memory: Memory | None = None,
    on_step: Callable[[int, str], None],
    on_epoch: OnEpoch,
) -> dict[int, dict[str, Tensor]]:
    """New parameters by layer and name of the layer's own; arguments and errors as for `train_attachments`.

    The budget is for the features of all tasks together, as the weights serve them all.
    """
    chain = pool.chain
    with FeatureStore(feature_budget, spill) as store:
        walks: list[FrozenWalk] = []
        for task in sorted(parts):
            maps = walks[0].maps if walks else None  # the weights are the same for every task
            walks.append(_frozen_walk(pool, parts, task, trainer, store, on_step, maps))
        generator = torch.Generator().manual_seed(seed)
        with torch.enable_grad():
            found = trainer.train_weights(walks, Course(generator, on_epoch, "weights", memory))
    own = {layer.index: chain.owned(layer) for layer in chain.layers}
    return {
        index: {name: found[slot] for name, slot in slots.items() if slot in found}
        for index, slots in own.items()
    }


@torch.no_grad()
def _frozen_walk(
    pool: ModelPool,
    parts: Parts,
    task: str,
    trainer: JointTrainer | WeightTrainer,
    store: FeatureStore,
    on_step: Callable[[int, str], None],
    maps: Sequence[LayerMap] | None = None,
) -> FrozenWalk:
    """The merged model's layers up to the last boundary, and what the expert has at each; inputs wait, too."""
    wanted = sorted(trainer.targets(len(pool.chain.layers)))
    of_tokens = isinstance(trainer, WeightTrainer) or trainer.of_tokens
    ids = [sample for part in parts[task] for sample in part.ids]
    batches = []
    for number, batch in enumerate(batch for part in parts[task] for batch in part.batches()):
        # A file's name has to be a task's own, whatever the task is called.
        name = f"train-{number}-{zlib.crc32(task.encode()):08x}"
        [waiting] = read_batches(pool, [batch], store, name, (_EXPERT,))
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {_INPUTS: batch.inputs}
        if all(isinstance(value, Tensor) for value in inputs.values()):
            waiting.put(_INPUTS, dict(inputs))
            batch = replace(batch, inputs=None)
        batches.append((batch, waiting))
    layers, widths = pool.chain.layers[: wanted[-1]], {}
    for layer in layers:
        layer_map, watch = pool.layer_map(expert_of(task), layer, task), FiniteWatch(layer, task, ids)
        for _, waiting in batches:
            on_step(layer.index, task)
            state = layer_map(waiting.get(_EXPERT), waiting.side)
            features = state[layer.stream]
            watch.see("the expert model", features)
            waiting.put(_EXPERT, {} if layer is layers[-1] else state)
            if layer.index in wanted:
                _require_tokens(layer, features)
                kept = features if of_tokens else _token_means(features, waiting.side.mask(layer.stream))
                waiting.put(str(layer.index), {layer.stream: kept})
                widths[layer.index] = features.shape[-1]
        watch.check()
    maps = maps or [pool.layer_map(_MERGED, layer, task) for layer in layers]
    return FrozenWalk(task, len(ids), maps, widths, pool, of_tokens, batches)


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
