"""The walk that trains: features of the merged model and of the expert meet at chosen boundaries.

What is learnt is a map behind a layer or a site, per task (`LayerTrainer`, `JointTrainer`), or the weights themselves,
for all tasks together (`WeightTrainer`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from driftlens.base.variants import expert_of
from driftlens.engine.attached import Attachment, attachment_tensors, attachments_from
from driftlens.engine.calibrating import Ground, Memory, Step
from driftlens.engine.compared import EXPERT, MERGED, BoundaryFeatures, FrozenWalk, frozen_walk, gathered
from driftlens.engine.forward_order import Passage, forward_order
from driftlens.engine.problems import CalibratedLayer, Method
from driftlens.models.chain import Layer, Slot

OnEpoch = Callable[[int, int, float], None]
"""Told of each epoch: its number from 1, of how many, and the loss."""


@dataclass(frozen=True)
class Course:
    """How one training goes: what it draws from, whom it tells of epochs (which may raise, `Cancelled` for instance).

    `name` is unlike that of any other training of the calibration; a `memory` keeps how far it is.
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


class Trainer(Method, ABC):
    """What learns: a map at every boundary by itself, all maps of a task, or the weights; see the subclasses."""

    takes_sites: ClassVar[bool] = False

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """The layers that are changed, or behind or in which something is attached."""
        return (num_layers,)

    def targets(self, num_layers: int) -> Sequence[int]:
        """The boundaries at which the expert's features are wanted; boundary l is what leaves layer l."""
        return self.boundaries(num_layers)

    @abstractmethod
    def calibrated(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """What is learnt: attachments task after task, in forward order, or new parameters layer by layer.

        Raises:
            NumericsError: weights or features are NaN or infinite.
        """


class AttachmentTrainer(Trainer):
    """Learns what is attached for every task, from the samples of that task alone."""

    @classmethod
    @abstractmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> Attachment:
        """The map that these tensors make up, as `Attachment.tensors` gave them; of the output of a site, if any."""

    @abstractmethod
    def maps(
        self, passage: Passage, task: str, course: Callable[[int], Course]
    ) -> Iterator[tuple[int, Attachment]]:
        """Layer and what is attached behind or in it, for one task; `course` is that of a boundary's training."""

    def calibrated(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """See `Trainer`; every task is learnt by one process. A later boundary has passed what was attached before."""
        team = ground.team
        owners = team.owners(ground.tasks)
        tasks = [task for task in ground.tasks if owners[task] == team.rank]
        steps = _Steps(ground, len(tasks) * len(self.boundaries(len(ground.pool.chain.layers))))
        learnt: dict[tuple[str, int], Attachment] = {}

        def learn() -> Iterator[CalibratedLayer]:
            for task in tasks:
                for boundary, attachment in self._of_task(ground, task, steps):
                    learnt[task, boundary] = attachment
                    steps.done += 1
                    yield CalibratedLayer(boundary, attachments={task: attachment})

        def tensors() -> dict[str, Tensor]:
            deque(learn(), maxlen=0)
            return attachment_tensors(learnt)

        if team.size == 1:
            yield from learn()
        else:
            for of_rank in team.together(tensors):
                for (task, boundary), attachment in attachments_from(
                    of_rank.items(), self.attachment
                ).items():
                    yield CalibratedLayer(boundary, attachments={task: attachment})
        ground.on_step(Step(0, "", steps.total, steps.total, ""))

    def _of_task(self, ground: Ground, task: str, steps: _Steps) -> Iterator[tuple[int, Attachment]]:
        memory = ground.memory
        if finished := {} if memory is None else memory.read(f"finished {task}"):
            for (_, boundary), attachment in attachments_from(finished.items(), self.attachment).items():
                yield boundary, attachment
            return

        def course(boundary: int) -> Course:
            name = f"{boundary} {task}"
            generator = torch.Generator().manual_seed(ground.seed + zlib.crc32(name.encode()))
            return Course(generator, steps.epoch, name, memory)

        with ground.store() as store:
            passage = Passage(ground.pool, {task: ground.parts[task]}, (EXPERT, MERGED), store, steps.batch)
            learnt = {(task, boundary): each for boundary, each in self.maps(passage, task, course)}
        if memory is not None:
            memory.write(f"finished {task}", attachment_tensors(learnt))
        for (_, boundary), attachment in learnt.items():
            yield boundary, attachment


class LayerTrainer(AttachmentTrainer):
    """Learns every boundary's map by itself, in forward order, from features that no longer change."""

    @abstractmethod
    def train(self, features: BoundaryFeatures, course: Course) -> Attachment:
        """The map for one task and boundary; `course` is what it draws from, and is to tell of each epoch."""

    def maps(
        self, passage: Passage, task: str, course: Callable[[int], Course]
    ) -> Iterator[tuple[int, Attachment]]:
        """See above; each is learnt from features that have passed those before it."""
        layers = passage.pool.chain.layers
        wanted = frozenset(self.boundaries(len(layers)))
        return forward_order(_EachBoundary(self, passage, task, wanted, course), layers[: max(wanted)])


class JointTrainer(AttachmentTrainer):
    """Learns the maps of all boundaries together, through the layers between them.

    With `of_tokens` features are compared token by token, else as means over the tokens that count.
    """

    of_tokens: ClassVar[bool] = False

    @abstractmethod
    def train_jointly(self, walk: FrozenWalk, course: Course) -> Mapping[int, Attachment]:
        """The maps of one task by the layer that they belong to; `course` as for `LayerTrainer.train`."""

    def maps(
        self, passage: Passage, task: str, course: Callable[[int], Course]
    ) -> Iterator[tuple[int, Attachment]]:
        """See above."""
        targets = self.targets(len(passage.pool.chain.layers))
        walk = frozen_walk(passage, task, targets, of_tokens=self.of_tokens)
        with torch.enable_grad():
            yield from self.train_jointly(walk, course(max(targets))).items()


class WeightTrainer(Trainer):
    """Learns weights from the samples of all tasks; nothing is attached."""

    @abstractmethod
    def train_weights(self, walks: Sequence[FrozenWalk], course: Course) -> Mapping[Slot, Tensor]:
        """New parameters by where they lie; `course` as for `LayerTrainer.train`."""

    def calibrated(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """See `Trainer`; one process learns them, and the budget is for the features of all tasks together."""
        for index, updates in ground.team.once(lambda: self._learnt(ground)).items():
            yield CalibratedLayer(index, updates)

    def _learnt(self, ground: Ground) -> dict[int, dict[str, Tensor]]:
        chain, steps = ground.pool.chain, _Steps(ground, 0)
        parts = {task: ground.parts[task] for task in ground.tasks}
        with ground.store() as store:
            passage = Passage(ground.pool, parts, (EXPERT,), store, steps.batch)
            walks: list[FrozenWalk] = []
            for task in parts:
                maps = walks[0].maps if walks else None  # the weights are the same for every task
                walks.append(
                    frozen_walk(passage, task, self.targets(len(chain.layers)), of_tokens=True, maps=maps)
                )
            generator = torch.Generator().manual_seed(ground.seed)
            with torch.enable_grad():
                course = Course(generator, steps.epoch, "weights", ground.memory)
                weights = self.train_weights(walks, course)
        owned = {layer.index: chain.owned(layer) for layer in chain.layers}
        return {
            index: {name: weights[slot] for name, slot in slots.items() if slot in weights}
            for index, slots in owned.items()
        }


@dataclass
class _Steps:
    """Tells of a training: of `total` maps, or where there are none of its epochs."""

    ground: Ground
    total: int
    done: int = 0
    layer: int = 0
    task: str = ""

    @property
    def label(self) -> str:
        return f"layer {self.layer}, task {self.task}"

    def batch(self, layer: int, task: str) -> None:
        self.layer, self.task = layer, task
        self.ground.on_step(Step(layer, task, self.done, self.total or 1, self.label))

    def epoch(self, number: int, count: int, loss: float) -> None:
        done, total = (self.done, self.total) if self.total > 1 else (number, count)
        label = f"{self.label}: step {number} of {count}"
        self.ground.on_step(Step(self.layer, self.task, done, total, label, loss))


@dataclass(frozen=True)
class _EachBoundary:
    """Takes merged model and expert through every layer; where a map is wanted, it is learnt and put behind."""

    trainer: LayerTrainer
    passage: Passage
    task: str
    wanted: frozenset[int]
    course: Callable[[int], Course]

    def visit(self, layer: Layer) -> Iterator[tuple[int, Attachment]]:
        with torch.no_grad():
            self._take(layer)
        if layer.index in self.wanted:
            features = gathered(self.passage.waiting[self.task, 0], layer, self.task)
            with torch.enable_grad():
                attachment = self.trainer.train(features, self.course(layer.index))
            with torch.no_grad():
                for batch in self.passage.all_waiting:
                    state = batch.get(MERGED)
                    batch.put(MERGED, {**state, layer.stream: attachment(state[layer.stream])})
            yield layer.index, attachment

    def _take(self, layer: Layer) -> None:
        pool = self.passage.pool
        maps = {
            EXPERT: pool.layer_map(expert_of(self.task), layer, self.task),
            MERGED: pool.layer_map(MERGED, layer, self.task),
        }
        crossing = self.passage.crossing(layer, self.task)
        for batch in crossing:
            for model, layer_map in maps.items():
                crossing.take(batch, model, layer_map, named=f"the {model} model")
