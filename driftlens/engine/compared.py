"""What trainings compare: features of the merged model and of the expert that wait at chosen boundaries."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from driftlens.base.errors import IncompatibleModelsError
from driftlens.base.variants import expert_of
from driftlens.data.samples import Batch
from driftlens.engine.attached import Attachment
from driftlens.engine.forward_order import Passage, WaitingBatch, forward_order, on_device
from driftlens.engine.pool import LayerMap, ModelPool
from driftlens.engine.site_rows import added_to
from driftlens.models.chain import Layer, Slot

EXPERT, MERGED = "expert", "merged"
_INPUTS = "inputs"


@dataclass(frozen=True)
class BoundaryFeatures:
    """What leaves one layer on a task's calibration samples, [n, t, d] or [n, d] each.

    `merged` is of the model that is to be repaired, with what is attached before this boundary; `mask` [n, t] is true
    where a token counts, None everywhere.
    """

    layer: Layer
    task: str
    merged: Tensor
    expert: Tensor
    mask: Tensor | None = None

    def rows(self, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The merged model's and the expert's vectors, [T, d] each: of every token that counts, padding left out.

        `chosen` are positions of samples, [m]; None takes them all. Channels before space, as in convolutions, are no
        tokens.
        """
        _require_tokens(self.layer, self.merged)
        places = slice(None) if chosen is None else chosen.to(self.merged.device)
        mask = None if self.mask is None else self.mask[places]
        return _token_rows(self.merged[places], mask), _token_rows(self.expert[places], mask)


@dataclass(frozen=True)
class FrozenWalk:
    """One task's calibration samples through the merged model, and what its expert makes of them.

    `maps` are its layers, up to the last boundary; `widths` the features' by boundary at which the expert is compared;
    `of_tokens` says whether every token is compared that counts, or the mean over them.
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
        """
        compared: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in self.widths}
        begin = 0
        for batch, waiting in self._batches:
            places = torch.arange(begin, begin + batch.stop - batch.start)
            begin += len(places)
            rows = torch.isin(places, chosen).nonzero()[:, 0]
            if not len(rows):
                continue
            inputs = replace(batch, inputs=_inputs(batch, waiting)).inputs_of(rows)
            state, side = self.pool.chain.start(on_device(inputs, self.pool.device, self.pool.dtype))
            for layer_map in self.maps:
                layer = layer_map.layer
                attachment = (attached or {}).get(layer.index)
                state = _with(layer_map, attachment, weights)(state, side)
                if attachment is not None:
                    _require_tokens(layer, state[layer.stream])
                if layer.index in compared:
                    merged, mask = state[layer.stream], side.mask(layer.stream)
                    wanted = waiting.get(str(layer.index))[layer.stream]
                    wanted = wanted[rows.to(wanted.device)]
                    pair = (
                        (_token_rows(merged, mask), _token_rows(wanted, mask))
                        if self.of_tokens
                        else (_token_means(merged, mask), wanted)
                    )
                    compared[layer.index].append(pair)
        joined = {index: zip(*pairs, strict=True) for index, pairs in compared.items()}
        return {index: (torch.cat(merged), torch.cat(wanted)) for index, (merged, wanted) in joined.items()}

    @torch.no_grad()
    def joined(self) -> dict[int, tuple[str, int]]:
        """Of every block with linear modules, the first site whose output is added to what entered it, and that width.

        In a transformer that is the projection behind its attention.
        """
        sites = {}
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
                sites[layer.index] = site, len(layer_map.parameters[f"{site}.weight"])
            state = layer_map(state, side)
        return sites

    def leaves(self) -> dict[Slot, Tensor]:
        """Copies of the merged model's parameters, each to be trained; what is saved beside parameters is left out."""
        trainable = self.pool.parameter_names
        leaves = {}
        for layer_map in self.maps:
            for slot in self.pool.chain.owned(layer_map.layer).values():
                if slot.key in trainable:
                    stored = self.pool.stored(MERGED, slot)
                    leaves[slot] = stored.to(self.pool.device, self.pool.dtype, copy=True).requires_grad_()
        return leaves


def _with(
    layer_map: LayerMap, attachment: Attachment | None, weights: Mapping[Slot, Tensor] | None
) -> LayerMap:
    slots = layer_map.layer.parameters.items() if weights else ()
    new = {name: weights[slot] for name, slot in slots if weights and slot in weights}
    return replace(layer_map, attachment=attachment, parameters={**layer_map.parameters, **new})


def _inputs(batch: Batch, waiting: WaitingBatch) -> Any:
    """Raw inputs of a batch, wherever they wait."""
    if batch.inputs is not None:
        return batch.inputs
    inputs = waiting.get(_INPUTS)
    return inputs.get(_INPUTS, inputs)


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


@torch.no_grad()
def frozen_walk(
    passage: Passage,
    task: str,
    targets: Sequence[int],
    *,
    of_tokens: bool,
    maps: Sequence[LayerMap] | None = None,
) -> FrozenWalk:
    """The merged model's layers up to the last target, and what the expert has at each; inputs wait, too.

    `maps` are these layers, where they are known.
    """
    batches: list[tuple[Batch, WaitingBatch]] = []

    def keep(batch: Batch, waiting: WaitingBatch) -> None:
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {_INPUTS: batch.inputs}
        if all(isinstance(value, Tensor) for value in inputs.values()):
            waiting.put(_INPUTS, dict(inputs))
            batch = replace(batch, inputs=None)
        batches.append((batch, waiting))

    passage.on_read = keep
    layers, kept = passage.pool.chain.layers[: max(targets)], _Targets(passage, task, targets, of_tokens)
    deque(forward_order(kept, layers), maxlen=0)
    maps = maps or [passage.pool.layer_map(MERGED, layer, task) for layer in layers]
    count = sum(batch.stop - batch.start for batch, _ in batches)
    return FrozenWalk(task, count, maps, kept.widths, passage.pool, of_tokens, batches)


@dataclass(frozen=True)
class _Targets:
    """Takes the expert through every layer, and keeps what a training compares with; `widths` by boundary."""

    passage: Passage
    task: str
    targets: Sequence[int]
    of_tokens: bool
    widths: dict[int, int] = field(default_factory=dict)

    def visit(self, layer: Layer) -> Iterator[None]:
        layer_map = self.passage.pool.layer_map(expert_of(self.task), layer, self.task)
        crossing = self.passage.crossing(layer, self.task)
        for batch in crossing:
            state = crossing.take(batch, EXPERT, layer_map, named="the expert model")
            if layer.index == max(self.targets):
                batch.drop(EXPERT)
            if layer.index in self.targets:
                features = state[layer.stream]
                _require_tokens(layer, features)
                mask = batch.side.mask(layer.stream)
                kept = features if self.of_tokens else _token_means(features, mask)
                batch.put(str(layer.index), {layer.stream: kept})
                self.widths[layer.index] = features.shape[-1]
        yield None


def gathered(waiting: Sequence[WaitingBatch], layer: Layer, task: str) -> BoundaryFeatures:
    """The features of all batches; shorter texts are padded to the longest."""
    states = [(batch.get(MERGED)[layer.stream], batch.get(EXPERT)[layer.stream]) for batch in waiting]
    masks = [batch.side.mask(layer.stream) for batch in waiting]
    mask = None
    if states[0][0].dim() == 3:
        longest = max(merged.shape[1] for merged, _ in states)
        is_padded = any(merged.shape[1] < longest for merged, _ in states)
        if is_padded or any(given is not None for given in masks):
            tokens = (
                merged.new_ones(merged.shape[:2]) if given is None else given
                for (merged, _), given in zip(states, masks, strict=True)
            )
            mask = torch.cat([_padded(counts, longest) for counts in tokens]).bool()
        states = [(_padded(merged, longest), _padded(expert, longest)) for merged, expert in states]
    merged, expert = (torch.cat(parts) for parts in zip(*states, strict=True))
    return BoundaryFeatures(layer, task, merged, expert, mask)


def _padded(tokens: Tensor, length: int) -> Tensor:
    """[n, t, ...] with zeros behind, up to a length."""
    return torch.cat(
        [tokens, tokens.new_zeros(len(tokens), length - tokens.shape[1], *tokens.shape[2:])], dim=1
    )
