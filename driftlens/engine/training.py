"""The walk that trains attachments: features of the merged model and of the expert meet at chosen boundaries."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from driftlens.engine.carried import Parts
from driftlens.engine.pool import Attachment, LayerMap, ModelPool
from driftlens.engine.waiting import FeatureStore, WaitingBatch, read_batches
from driftlens.engine.walk import FiniteWatch
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
        if self.merged.dim() > 3:
            raise IncompatibleModelsError(
                f"{self.layer.path} gives features {list(self.merged.shape)}, channels before space; a map of tokens "
                "can't be attached there",
                hint="Choose a method that attaches behind the last layer, or one that changes weights.",
            )
        merged, expert = (
            (self.merged, self.expert) if chosen is None else (self.merged[chosen], self.expert[chosen])
        )
        if self.mask is None:
            return merged.flatten(0, -2), expert.flatten(0, -2)
        mask = self.mask if chosen is None else self.mask[chosen]
        return merged[mask], expert[mask]


class Trainer(ABC):
    """What learns the attachments."""

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """Where something is attached; boundary l is what leaves layer l."""
        return (num_layers,)

    @abstractmethod
    def train(self, features: BoundaryFeatures, generator: torch.Generator, on_epoch: OnEpoch) -> Attachment:
        """The map for one task and boundary.

        Args:
            features: what is to be mapped, and onto what.
            generator: for whatever is drawn at random.
            on_epoch: to be told of each epoch.
        """


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
