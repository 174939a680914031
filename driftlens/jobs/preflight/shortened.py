"""A study cut short, on which every job runs as on the whole one: stem, some blocks of each kind, head, few samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from driftlens.base.variants import expert_of
from driftlens.checkpoints.sources import TensorHeader, renamed
from driftlens.data.samples import SampleSet, part_of
from driftlens.engine.pool import ModelPool
from driftlens.jobs.study.opening import OpenModels, with_own_answers
from driftlens.jobs.study.study import Study, TaskSamples
from driftlens.models.architecture import Architecture
from driftlens.models.chain import Layer, LayerChain, State


@dataclass(frozen=True)
class Size:
    """What is left of a study: at most so many blocks of each kind, and so many samples of every task.

    The tasks are copies of one, so that they differ in these numbers alone. Of each, `followed` samples at most have
    their drift traced back to layers.
    """

    blocks: int
    samples: tuple[int, ...]
    batch: int
    followed: int = 16
    rounds: int = 4


@dataclass(frozen=True)
class Shortened:
    """A study cut short."""

    study: Study
    models: OpenModels
    size: Size

    @property
    def blocks(self) -> int:
        """How many are left, of all kinds."""
        return len(self.study.pool.chain.blocks)


def kept_layers(chain: LayerChain, headers: Mapping[str, TensorHeader], blocks: int) -> list[Layer]:
    """Stem, head and the first blocks of each kind, as the whole chain has them.

    Blocks whose parameters have the same names and shapes are of one kind. Of those without parameters, which may
    change the shape of what passes through them, none is left out.
    """
    counts, kept = Counter[Hashable](), []
    for layer in chain.layers:
        shapes = ((name, slot.shape(headers[slot.key].shape)) for name, slot in layer.parameters.items())
        kind = layer.stream, tuple(shapes)
        counts[kind] += 1
        if layer.role != "block" or not layer.parameters or counts[kind] <= blocks:
            kept.append(layer)
    return kept


def shortened(study: Study, models: OpenModels, size: Size) -> Shortened:
    """The study with fewer blocks and samples of copies of its first task."""
    task, settings = next(iter(study.tasks)), study.settings
    pool = ShortPool.of(study.pool, models.architecture, study.pool.names, size.blocks)
    kept = kept_layers(study.pool.chain, study.pool.source(study.pool.names[0]).headers, size.blocks)
    stored = frozenset(
        index for index, layer in enumerate(kept, start=1) if layer.index in settings.stored_layers
    )
    sources = {name: pool.source(name) for name in pool.names}
    copies = {f"{number}": count for number, count in enumerate(size.samples)}
    for copy in copies:
        pool.add(expert_of(copy), sources[study.pool.expert(task)])
    jacobian = settings.jacobian and dataclasses.replace(
        settings.jacobian, samples=min(settings.jacobian.samples, size.followed)
    )
    cut = dataclasses.replace(
        study,
        pool=pool,
        tasks={
            copy: first_samples(study.tasks[task], count, study.pool, size.batch)
            for copy, count in copies.items()
        },
        settings=dataclasses.replace(settings, stored_layers=stored, jacobian=jacobian),
        provenance={},
        adapters={},
    )
    # Without a layout, whose rules are for whole checkpoints, what is saved has the skeleton's own names.
    architecture = dataclasses.replace(models.architecture, chain=pool.chain, layout=None)
    return Shortened(cut, OpenModels(architecture, sources, sources, models.origins), size)


class ShortPool(ModelPool):
    """A pool of shortened models; where only the library's own module will do, a whole one of `whole` stands in."""

    def __init__(self, whole: ModelPool, chain: LayerChain, skeleton: nn.Module) -> None:
        super().__init__(chain, skeleton, {}, device=whole.device, dtype=whole.dtype, budget=whole.budget)
        self._whole = whole

    @classmethod
    def of(cls, whole: ModelPool, architecture: Architecture, names: Sequence[str], blocks: int) -> ShortPool:
        """Some models of a pool with so many blocks of each kind."""
        kept = kept_layers(whole.chain, whole.source(names[0]).headers, blocks)
        layers = tuple(dataclasses.replace(layer, index=index) for index, layer in enumerate(kept, start=1))
        short = cls(whole, dataclasses.replace(whole.chain, layers=layers), architecture.skeleton)
        keys = {*short.chain.parameter_keys(), *(() if architecture.lm is None else architecture.lm.keys)}
        for name in names:
            source = whole.source(name)
            short.add(name, renamed(source, {key: key for key in source.headers if key in keys}))
        return short

    def library_states(self, model: str, inputs: Any, task: str = "") -> list[State]:
        """What the library would record of a model so short, which it can't build."""
        state, side = self.chain.start(inputs)
        states = []
        for layer in self.chain.layers:
            state = self.layer_map(model, layer, task)(state, side)
            states.append(state)
        return states

    def require_room(self, model: str) -> None:
        """As for a whole model."""
        self._whole.require_room(self._like(model))

    @contextmanager
    def loaded(self, model: str, task: str = "") -> Iterator[nn.Module]:
        """The library's module with a whole model's weights."""
        with self._whole.loaded(self._like(model)) as module:
            yield module

    def _like(self, model: str) -> str:
        """A whole model, of the size of which all are."""
        return model if model in self._whole else self._whole.names[0]


def first_samples(task: TaskSamples, count: int, pool: ModelPool, batch: int) -> TaskSamples:
    """A task with the first samples of every split; `pool` gives the answers that an expert is to show itself."""

    def first(samples: SampleSet) -> SampleSet:
        part = part_of(dataclasses.replace(samples, batch_size=batch), range(min(count, len(samples))))
        texts = part.texts
        if texts is None or texts.compared is None or texts.compared.passages is None:
            return part
        passages = texts.compared.passages  # as many of them as of the queries
        few = passages.first(-(-len(passages.texts) * len(part) // len(samples)))
        beside = dataclasses.replace(texts.compared, passages=few)
        return dataclasses.replace(part, texts=dataclasses.replace(texts, compared=beside))

    return dataclasses.replace(
        task,
        diagnosis=first(task.diagnosis),
        test=task.test and first(task.test),
        calibration=task.calibration and with_own_answers(first(task.calibration), pool),
    )
