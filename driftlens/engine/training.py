"""The walk that trains: features of the merged model and of the expert meet at chosen boundaries.

What is learnt is a map behind a layer or a site, per task (`LayerTrainer`, `JointTrainer`), or the weights themselves,
for all tasks together (`WeightTrainer`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from driftlens.base.devices import moved, wide
from driftlens.base.errors import IncompatibleModelsError
from driftlens.base.variants import expert_of
from driftlens.data.samples import Batch
from driftlens.engine.attached import Attachment, InSites, attachment_tensors, attachments_from
from driftlens.engine.calibrating import Ground, Memory, Method, Step
from driftlens.engine.pool import LayerMap, ModelPool
from driftlens.engine.problems import CalibratedLayer
from driftlens.engine.sites import (
    ENTERED,
    UNIFORM,
    added_to,
    row_weights,
    rows_and_output,
    stacked_shape,
    stream_of,
)
from driftlens.engine.step_weights import Group, groups_of
from driftlens.engine.walk import Passage, WaitingBatch, forward_order
from driftlens.linalg.joint_ridge import BIAS_INPUT
from driftlens.models.chain import Layer, LayerChain, Parameters, SideInputs, Site, Slot, State

EXPERT, MERGED = "expert", "merged"
_INPUTS, _WANTED = "inputs", "wanted"


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
        places = slice(None) if chosen is None else moved(chosen, self.merged.device)
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
            state, side = self.pool.begun(inputs)
            for layer_map in self.maps:
                layer = layer_map.layer
                attachment = (attached or {}).get(layer.index)
                state = _with(layer_map, attachment, weights)(state, side)
                if attachment is not None:
                    _require_tokens(layer, state[layer.stream])
                if layer.index in compared:
                    merged, mask = state[layer.stream], side.mask(layer.stream)
                    wanted = waiting.get(str(layer.index))[layer.stream]
                    wanted = wanted[moved(rows, wanted.device)]
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
        state, side = self.pool.begun(inputs)
        for layer_map in self.maps:
            layer = layer_map.layer
            names = {site.name for site in layer.sites if site.kind == "linear"}
            if layer.role == "block" and names and layer.sees(side):  # the norm behind T5's encoder has none
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
    layers, widths = passage.pool.chain.layers[: max(targets)], dict[int, int]()

    def visit(layer: Layer) -> Iterator[None]:
        layer_map = passage.pool.layer_map(expert_of(task), layer, task)
        crossing = passage.crossing(layer, task)
        for batch in crossing:
            state = crossing.take(batch, EXPERT, layer_map, named="the expert model")
            if layer.index == max(targets):
                batch.drop(EXPERT)
            if layer.index in targets and layer.sees(batch.side):
                features = state[layer.stream]
                _require_tokens(layer, features)
                mask = batch.side.mask(layer.stream)
                batch.put(
                    str(layer.index), {layer.stream: features if of_tokens else _token_means(features, mask)}
                )
                widths[layer.index] = features.shape[-1]
        yield None

    deque(forward_order(visit, layers), maxlen=0)
    maps = maps or [passage.pool.layer_map(MERGED, layer, task) for layer in layers]
    count = sum(batch.stop - batch.start for batch, _ in batches)
    return FrozenWalk(task, count, maps, widths, passage.pool, of_tokens, batches)


def gathered(waiting: Sequence[WaitingBatch], layer: Layer, task: str) -> BoundaryFeatures:
    """The features of all batches; shorter texts are padded to the longest."""
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
    return BoundaryFeatures(layer, task, merged, expert, mask)


def _padded(tokens: Tensor, length: int) -> Tensor:
    """[n, t, ...] with zeros behind, up to a length."""
    return torch.cat(
        [tokens, tokens.new_zeros(len(tokens), length - tokens.shape[1], *tokens.shape[2:])], dim=1
    )


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
    """Learns what is attached for every task, from the samples of that task alone; `in_sites` to outputs of sites."""

    in_sites: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> Attachment:
        """The map that these tensors make up, as `Attachment.tensors` gave them; of the output of a site, if any."""

    @abstractmethod
    def maps(
        self, passage: Passage, task: str, course: Callable[[int], Course]
    ) -> Iterator[tuple[int, Attachment]]:
        """Layer and what is attached behind or in it, for one task; `course` is that of a boundary's training.

        Features are checked before something is learnt from them.
        """

    def calibrated(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """See `Trainer`; every task is learnt by one process. A later boundary has passed what was attached before."""
        team, boundaries = ground.team, self.boundaries(len(ground.pool.chain.layers))
        if not self.in_sites:
            ground.pool.require_attachable(boundaries)
        owners = team.owners(ground.tasks)
        tasks = [task for task in ground.tasks if owners[task] == team.rank]
        steps = _Steps(ground, len(tasks) * len(boundaries))
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
            parts, models = {task: ground.parts[task]}, (EXPERT, MERGED)
            passage = Passage(ground.pool, parts, models, store, steps.batch, is_patient=True)
            learnt = {(task, boundary): each for boundary, each in self.maps(passage, task, course)}
            passage.check()
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
        pool = passage.pool
        wanted = frozenset(self.boundaries(len(pool.chain.layers)))

        @torch.no_grad()
        def take(layer: Layer) -> None:
            maps = {
                EXPERT: pool.layer_map(expert_of(task), layer, task),
                MERGED: pool.layer_map(MERGED, layer, task),
            }
            crossing = passage.crossing(layer, task)
            for batch in crossing:
                for model, layer_map in maps.items():
                    crossing.take(batch, model, layer_map, named=f"the {model} model")

        def visit(layer: Layer) -> Iterator[tuple[int, Attachment]]:
            take(layer)
            sides = [batch.side for batch in passage.waiting[task, 0]]
            if layer.index in wanted and all(map(layer.sees, sides)):
                passage.check()
                features = gathered(passage.waiting[task, 0], layer, task)
                with torch.enable_grad():
                    attachment = self.train(features, course(layer.index))
                with torch.no_grad():
                    for batch in passage.all_waiting:
                        state = batch.get(MERGED)
                        batch.put(MERGED, {**state, layer.stream: attachment(state[layer.stream])})
                yield layer.index, attachment

        return forward_order(visit, pool.chain.layers[: max(wanted)])


@dataclass(frozen=True)
class SiteSums:
    """What a linear site reads and what its output lacks, summed up over a task's rows that count, in float64.

    With x~ the input, behind which `BIAS_INPUT` stands where the site has a bias, and r what is missing: `gram` is
    sum x~ x~', [k, k], and `cross` sum r x~', [o, k].
    """

    site: Site
    has_bias: bool
    gram: Tensor
    cross: Tensor


class SiteTrainer(AttachmentTrainer):
    """Learns what linear modules inside blocks are given beside their weights, one after the other as they run.

    What a site should give is what the expert's gives, and where that is added to a stream also what the stream lacks,
    as in residual calibration. Every one is learnt from what those before it leave to it.
    """

    in_sites = True

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """Every block."""
        return range(2, num_layers)

    @abstractmethod
    def solve(self, sums: SiteSums) -> tuple[Attachment, Mapping[str, Tensor]]:
        """What is put on the site's output, and the same as changes of its `weight` and, where it has one, `bias`."""

    def maps(
        self, passage: Passage, task: str, course: Callable[[int], Course]
    ) -> Iterator[tuple[int, Attachment]]:
        """See above; modules that the library doesn't run by themselves stay as they are."""
        pool = passage.pool

        @torch.no_grad()
        def visit(layer: Layer) -> Iterator[tuple[int, Attachment]]:
            merged = pool.layer_map(MERGED, layer, task).parameters
            names, streams, parts = pool.apart(layer), dict[str, str](), list[Attachment]()
            seeing = [batch for batch in passage.all_waiting if layer.sees(batch.side)]
            if names and seeing:
                streams = added_to(layer, merged, seeing[0].get(MERGED), seeing[0].side, names)
            _run_expert(passage, layer, task, names, streams)
            passage.check()
            student = dict(merged)
            for group in groups_of(layer, names) if seeing else ():
                for sums in _site_sums(pool.chain, seeing, layer, student, group, streams):
                    part, changes = self.solve(sums)
                    parts.append(part)
                    for name, change in changes.items():
                        key = f"{sums.site.name}.{name}"
                        student[key] = student[key] + change.to(student[key])
            crossing = passage.crossing(layer, task)
            for batch in crossing:
                batch.drop(_WANTED)
                crossing.take(batch, MERGED, LayerMap(layer, student), named="the merged model")
            if parts:
                yield layer.index, InSites(tuple(parts)) if len(parts) > 1 else parts[0]

        return forward_order(visit, pool.chain.layers[:-1])


def _run_expert(
    passage: Passage, layer: Layer, task: str, names: Sequence[str], streams: Mapping[str, str]
) -> None:
    """Take the expert through a layer; what its sites give waits, with what that is added to."""
    expert = passage.pool.layer_map(expert_of(task), layer, task)

    def hear(batch: WaitingBatch, state: State, side: SideInputs) -> State:
        tapped = {*streams.values()} - {ENTERED}
        seen, left = rows_and_output(layer, expert.parameters, state, side, tapped, names)
        wanted = seen.outputs.items()
        batch.put(
            _WANTED, {name: y + _stream(layer, streams, name, state, seen.inputs) for name, y in wanted}
        )
        return left

    crossing = passage.crossing(layer, task, waits=True)
    for batch in crossing:
        through = partial(hear, batch) if names and layer.sees(batch.side) else expert
        crossing.take(batch, EXPERT, through, named="the expert model")


def _stream(
    layer: Layer, streams: Mapping[str, str], name: str, state: State, inputs: Mapping[str, Tensor]
) -> Tensor | float:
    """What the output of a site is added to; 0 where it isn't added to anything."""
    if name not in streams:
        return 0.0
    return stream_of(layer, streams[name], state, inputs)


def _site_sums(
    chain: LayerChain,
    batches: Sequence[WaitingBatch],
    layer: Layer,
    student: Parameters,
    group: Group,
    streams: Mapping[str, str],
) -> Iterator[SiteSums]:
    """The sums of sites that read the same rows."""
    first = group.sites[0]
    outputs, inputs = stacked_shape(student, group.sites)
    zeros = wide(next(iter(student.values())).new_zeros(()))
    width = inputs + group.has_bias
    gram, cross = zeros.new_zeros(width, width), zeros.new_zeros(outputs, width)
    tapped = {first.name, *(streams[name] for name in group.names if name in streams)} - {ENTERED}
    for batch in batches:
        state, side, wanted = batch.get(MERGED), batch.side, batch.get(_WANTED)
        seen, _ = rows_and_output(layer, student, state, side, tapped, group.names, stops=True)
        x = seen.inputs[first.name]
        weights = row_weights(chain, layer, first, x, state, side, UNIFORM)
        lacking = [
            wanted[name] - seen.outputs[name] - _stream(layer, streams, name, state, seen.inputs)
            for name in group.names
        ]
        x = x.reshape(-1, x.shape[-1])
        rows = torch.cat([y.reshape(len(x), -1) for y in lacking], dim=1)
        x = torch.cat([x, x.new_full((len(x), 1), BIAS_INPUT)], dim=1) if group.has_bias else x
        x, rows = wide(x), wide(rows)
        counted = x if weights is None else x * wide(weights)[:, None]
        gram.addmm_(counted.mT, x)
        cross.addmm_(rows.mT, counted)
    parts = torch.split(cross, [len(student[f"{name}.weight"]) for name in group.names])
    yield from (
        SiteSums(site, group.has_bias, gram, part) for site, part in zip(group.sites, parts, strict=True)
    )


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
        passage.check()
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
            passage = Passage(ground.pool, parts, (EXPERT,), store, steps.batch, is_patient=True)
            walks: list[FrozenWalk] = []
            for task in parts:
                maps = walks[0].maps if walks else None  # the weights are the same for every task
                walks.append(
                    frozen_walk(passage, task, self.targets(len(chain.layers)), of_tokens=True, maps=maps)
                )
            passage.check()
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
