"""Training of corrections: final features of the merged model and of each task's expert, then one loop per task."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from driftlens.base.devices import moved
from driftlens.base.errors import IncompatibleModelsError
from driftlens.base.variants import expert_of
from driftlens.engine.attached import Attachment, attachment_tensors, attachments_from
from driftlens.engine.calibrating import Ground, Method, Step
from driftlens.engine.problems import CalibratedLayer
from driftlens.engine.walk import OnStep, Passage, WaitingBatch, forward_order
from driftlens.models.chain import Layer

EXPERT, MERGED = "expert", "merged"


@dataclass(frozen=True)
class FinalFeatures:
    """Final features of a task's calibration samples, [n, t, d] or [n, d] each.

    `mask` [n, t] is true where a token counts, None everywhere.
    """

    layer: Layer
    task: str
    merged: Tensor
    expert: Tensor
    mask: Tensor | None = None

    def rows(self, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the merged model's and the expert's vectors, [T, d] each, of every token that counts.

        `chosen` are positions of samples, [m]; None takes them all.

        Raises:
            IncompatibleModelsError: features are channels before space, as in convolutions, which are no tokens.
        """
        if self.merged.dim() > 3:
            raise IncompatibleModelsError(
                f"{self.layer.path} gives features {list(self.merged.shape)}, channels before space; a map of tokens "
                "can't be attached there",
                hint="Choose a method that changes weights.",
            )
        places = slice(None) if chosen is None else moved(chosen, self.merged.device)
        mask = None if self.mask is None else self.mask[places]
        return _token_rows(self.merged[places], mask), _token_rows(self.expert[places], mask)


def _token_rows(features: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens that count, [T, d]; [n, d] as it is. A head may give tokens of its own, which no mask is of."""
    is_masked = mask is not None and features.dim() == 3 and mask.shape == features.shape[:2]
    return features[mask.bool()] if mask is not None and is_masked else features.flatten(0, -2)


@torch.no_grad()
def final_features(ground: Ground, task: str, on_step: OnStep) -> FinalFeatures:
    """Run the merged model and the task's expert on the task's calibration samples, layer by layer."""
    pool = ground.pool
    with ground.store() as store:
        passage = Passage(pool, {task: ground.parts[task]}, (EXPERT, MERGED), store, on_step, is_patient=True)

        def visit(layer: Layer) -> Iterator[None]:
            maps = {
                EXPERT: pool.layer_map(expert_of(task), layer, task),
                MERGED: pool.layer_map(MERGED, layer, task),
            }
            crossing = passage.crossing(layer, task)
            for batch in crossing:
                for model, layer_map in maps.items():
                    crossing.take(batch, model, layer_map, named=f"the {model} model")
            yield None

        deque(forward_order(visit, pool.chain.layers), maxlen=0)
        passage.check()
        return gathered(passage.waiting[task, 0], pool.chain.layers[-1], task)


def gathered(waiting: Sequence[WaitingBatch], layer: Layer, task: str) -> FinalFeatures:
    """Return the features of all batches; shorter texts are padded to the longest."""
    states = [(batch.get(MERGED)[layer.stream], batch.get(EXPERT)[layer.stream]) for batch in waiting]
    masks = [batch.side.mask(layer.stream) for batch in waiting]
    mask = None
    if states[0][0].dim() == 3:
        longest = max(merged.shape[1] for merged, _ in states)
        is_padded = any(merged.shape[1] < longest for merged, _ in states)
        if is_padded or any(side_mask is not None for side_mask in masks):
            tokens = (
                merged.new_ones(merged.shape[:2]) if side_mask is None else side_mask
                for (merged, _), side_mask in zip(states, masks, strict=True)
            )
            mask = torch.cat([_padded(counts, longest) for counts in tokens]).bool()
        states = [(_padded(merged, longest), _padded(expert, longest)) for merged, expert in states]
    merged, expert = (torch.cat(parts) for parts in zip(*states, strict=True))
    return FinalFeatures(layer, task, merged, expert, mask)


def _padded(tokens: Tensor, length: int) -> Tensor:
    """[n, t, ...] with zeros behind, up to a length."""
    return torch.cat(
        [tokens, tokens.new_zeros(len(tokens), length - tokens.shape[1], *tokens.shape[2:])], dim=1
    )


@dataclass(frozen=True)
class Course:
    """The random numbers of one training, and whom it reports its steps to: (step from 1, of how many, loss).

    `told` may raise, `Cancelled` for instance.
    """

    generator: torch.Generator
    told: Callable[[int, int, float], None]


class AttachmentTrainer(Method, ABC):
    """A calibrator that trains a correction of the final feature per task, from the samples of that task alone."""

    takes_sites: ClassVar[bool] = False

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """Return the last layer, behind which the correction is attached."""
        return (num_layers,)

    @classmethod
    @abstractmethod
    def attachment(cls, tensors: Mapping[str, Tensor]) -> Attachment:
        """Build the correction from its tensors, as `Attachment.tensors` returned them."""

    @abstractmethod
    def train(self, features: FinalFeatures, course: Course) -> Attachment:
        """Train the correction of one task; every step is reported to `course`."""

    def calibrated(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """Yield the correction of every task; each task is trained by one process.

        Raises:
            NumericsError: weights or features are NaN or infinite.
        """
        team, last = ground.team, len(ground.pool.chain.layers)
        tasks = team.mine(ground.tasks)

        def trained() -> Iterator[tuple[str, Attachment]]:
            for done, task in enumerate(tasks):
                yield task, self._of_task(ground, task, done, len(tasks))

        def tensors() -> dict[str, Tensor]:
            return {name: each.cpu() for name, each in attachment_tensors(dict(trained()), last).items()}

        if team.size == 1:
            for task, attachment in trained():
                yield CalibratedLayer(last, attachments={task: attachment})
        else:
            for of_rank in team.gather(tensors()):
                for task, attachment in attachments_from(of_rank.items(), self.attachment).items():
                    yield CalibratedLayer(last, attachments={task: attachment})
        ground.on_step(Step(0, "", len(tasks), len(tasks), ""))

    def _of_task(self, ground: Ground, task: str, done: int, total: int) -> Attachment:
        last = len(ground.pool.chain.layers)

        def walked(layer: int, task: str) -> None:
            ground.on_step(Step(layer, task, done, total, f"layer {layer}, task {task}"))

        def told(step: int, steps: int, loss: float) -> None:
            label = f"layer {last}, task {task}: step {step} of {steps}"
            progress = (done, total) if total > 1 else (step, steps)
            ground.on_step(Step(last, task, *progress, label, loss))

        features = final_features(ground, task, walked)
        seed = ground.seed + zlib.crc32(f"{last} {task}".encode())
        with torch.enable_grad():
            return self.train(features, Course(torch.Generator().manual_seed(seed), told))
