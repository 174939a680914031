"""What all walks that calibrate have in common: features that wait at a boundary, and their way to the next one.

Alive at a time: one layer of the expert at hand, the merged model and the base, what is summed up of one layer, and the
features that wait, those beyond a budget on disk.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from driftlens.base.errors import DataError
from driftlens.base.team import Team
from driftlens.base.variants import expert_of
from driftlens.data.samples import Batch
from driftlens.engine.exactness import exact_products
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.engine.waiting import FeatureStore, WaitingBatch, read_batches
from driftlens.engine.walk import FiniteWatch
from driftlens.linalg.gram import GramPool
from driftlens.models.chain import Layer, Parameters, Pool

EXPERT, TRUNK = "expert", "merged"

Solved = tuple[dict[str, Tensor], list[SiteReport]]
"""A layer's new parameters by its own names, and a report per site."""


class Part(Protocol):
    """Some of a task's calibration samples: a `SampleSet`, for instance."""

    @property
    def ids(self) -> Sequence[str]:
        """Names of the samples, for messages; none where they are not known."""
        ...

    def batches(self) -> Iterable[Batch]:
        """The samples, each time anew."""
        ...


Parts = Mapping[str, Sequence[Part]]
"""Task -> its calibration samples in parts that don't overlap; every task has as many parts."""


class Branch:
    """Lanes that still have the merged model's features in common: which parts of the samples each may read."""

    def __init__(self, name: str, lanes: Mapping[int, frozenset[int]]) -> None:
        self.name = name
        self.lanes = lanes
        self.parts = frozenset[int]().union(*lanes.values())


@dataclass
class CalibrationWalk(ABC):
    """What stays the same from layer to layer, and the features that wait at the boundary reached.

    `lanes` says of every calibration which parts of the samples it may read; a subclass adds `calibrate`. `parts` holds
    the samples of this process, `tasks` are those of all, and `divided` has the ranks of those that share a task, of
    which the first holds its sums in the end.
    """

    pool: ModelPool
    parts: Parts
    lanes: Sequence[frozenset[int]]
    store: FeatureStore
    base: str | None
    on_step: Callable[[int, str], None]
    pooling: Pool
    team: Team
    tasks: Sequence[str]
    divided: Mapping[str, Sequence[int]]
    waiting: dict[tuple[str, int], list[WaitingBatch]] = field(default_factory=dict, init=False)
    grams: GramPool = field(default_factory=GramPool, init=False)
    sites: Mapping[int, Collection[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.branches = [Branch(TRUNK, dict(enumerate(self.lanes)))]
        self.seconds = [0.0] * len(self.lanes)

    def layers(
        self, sites: Mapping[int, Collection[str]], done: Mapping[int, Mapping[str, Tensor]]
    ) -> Iterator[list[CalibratedLayer]]:
        """Calibrated layers of all lanes in forward order; those of `done` are applied."""
        self.sites = {index: names for index, names in sites.items() if names and index not in done}
        last = max(self.sites, default=0)
        with self.store:
            for layer in self.pool.chain.layers[:last]:
                if layer.index in self.sites:
                    yield self.calibrate(layer, self.sites[layer.index], is_last=layer.index == last)
                else:
                    passed = partial(self.pass_through, layer, done.get(layer.index, {}))
                    self.team.together(passed)

    @abstractmethod
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> list[CalibratedLayer]:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""

    @torch.no_grad()
    @exact_products()
    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Take all features to the next boundary, the merged model's through the parameters in `done`."""
        merged = self.pool.parameters("merged", layer)
        merged |= {name: value.to(merged[name]) for name, value in done.items()}
        for task in self.parts:
            expert = self.expert(layer, task)
            for part, of in enumerate(self.parts[task]):
                watch = FiniteWatch(layer, task, of.ids)
                for batch in self.batches(layer, task, part, waits=False):
                    models = [(EXPERT, expert)]
                    models += [(branch.name, merged) for branch in self.branches if part in branch.parts]
                    for model, parameters in models:
                        out = layer.call(parameters, batch.get(model), batch.side)
                        watch.see(in_words(model), out[layer.stream])
                        batch.put(model, out)
                watch.check()

    def expert(self, layer: Layer, task: str) -> Parameters:
        """The parameters of a task's expert. The next one is expected: the next task's, or the next layer's first."""
        found, tasks = self.pool.parameters(expert_of(task), layer), [*self.parts]
        layers_on, place = divmod(tasks.index(task) + 1, len(tasks))
        if layer.index + layers_on <= max(self.sites, default=0):
            self.pool.expect([expert_of(tasks[place])], layer.index + layers_on)
        return found

    def advance(self, layer: Layer, merged: Parameters, found: Sequence[Solved]) -> dict[str, float]:
        """Take every lane's features through its calibrated layer; the mean drift behind it, by task."""
        splits = len(self.branches) < len(self.lanes)
        if splits:  # from here on every lane is on its own
            self.branches = [Branch(f"{index}", {index: parts}) for index, parts in enumerate(self.lanes)]
        parameters = [{**merged, **updates} for updates, _ in found]
        by_rank = self.team.together(partial(self._advanced, layer, parameters, splits=splits))
        sizes = {task: [size for of in by_rank for size in of.get(task, [])] for task in self.tasks}
        return {task: float(torch.tensor(of, dtype=torch.float64).mean()) for task, of in sizes.items() if of}

    def _advanced(
        self, layer: Layer, parameters: Sequence[Parameters], *, splits: bool
    ) -> dict[str, list[float]]:
        """The same of this process's samples, one by one."""
        drift: dict[str, list[Tensor]] = {task: [] for task in self.parts}
        for (task, part), batches in self.waiting.items():
            watch = FiniteWatch(layer, task, self.parts[task][part].ids)
            for batch in batches:
                for branch in self.branches:
                    if part not in branch.parts:
                        continue
                    self.on_step(layer.index, task)
                    with self.shared(branch.lanes):
                        [lane] = branch.lanes
                        state = batch.get(TRUNK if splits else branch.name)
                        out = layer.call(parameters[lane], state, batch.side)
                        watch.see(in_words(branch.name, calibrated=True), out[layer.stream])
                        if len(self.lanes) == 1:
                            both = out, batch.get(EXPERT)
                            mine, theirs = (layer.vectors(of, batch.side, self.pooling) for of in both)
                            difference = (mine - theirs).double()
                            drift[task].append(torch.linalg.vector_norm(difference, dim=1))
                        batch.put(branch.name, out)
                if splits:
                    batch.put(TRUNK, {})  # nobody asks for it again
            watch.check()
        return {task: torch.cat(sizes).tolist() for task, sizes in drift.items() if sizes}

    def batches(
        self,
        layer: Layer,
        task: str,
        part: int,
        *,
        waits: bool = True,
        tell: Callable[[], None] | None = None,
    ) -> Iterator[WaitingBatch]:
        """The batches of a part at the boundary before the layer, before each a word to the caller, else `tell`.

        Whether they will be asked for again at this boundary, `waits` says; it matters for the raw inputs alone.
        """
        known = self.waiting.get((task, part))
        for batch in self._read(task, part, waits=waits) if known is None else known:
            (tell or partial(self.on_step, layer.index, task))()
            yield batch

    def _read(self, task: str, part: int, *, waits: bool) -> Iterator[WaitingBatch]:
        """The batches of a part at boundary 0, kept for the layers behind; a task without any is refused."""
        batches: list[WaitingBatch] = []
        name = f"{list(self.tasks).index(task)}-{part}-{self.team.rank}"
        samples = self.parts[task][part].batches()
        for batch in read_batches(self.pool, samples, self.store, name, (EXPERT, TRUNK), waits=waits):
            batches.append(batch)
            yield batch
        self.waiting[task, part] = batches
        if not any(self.waiting.get((task, number), [None]) for number in range(len(self.parts[task]))):
            raise DataError(
                f"task {task!r} has no calibration samples",
                hint="Give every task at least one, or leave the task out.",
                task=task,
            )

    @contextmanager
    def shared(self, lanes: Collection[int]) -> Iterator[None]:
        """Work whose time these lanes have in common."""
        started = time.perf_counter()
        yield
        share = (time.perf_counter() - started) / len(lanes)
        for index in lanes:
            self.seconds[index] += share


def solved_by_all(team: Team, merged: Parameters, work: Callable[[], list[Solved]]) -> list[Solved]:
    """What the processes solve, each some sites of every lane, for all of them.

    Args:
        team: the processes.
        merged: the layer's parameters, whose shapes solutions have.
        work: solves what this process has; an error in one is raised by all.
    """
    if team.size == 1:
        return work()
    own: list[Solved] = []

    def said() -> list[tuple[list[str], list[SiteReport]]]:
        own.extend(work())
        return [([*updates], reports) for updates, reports in own]

    found: list[Solved] = []
    for rank, lanes in enumerate(team.together(said)):
        found = found or [({}, []) for _ in lanes]
        new = (
            [updates for updates, _ in own]
            if rank == team.rank
            else [{name: torch.empty_like(merged[name]) for name in names} for names, _ in lanes]
        )
        team.share([value for updates in new for value in updates.values()], of=rank)
        for (updates, reports), more, (_, told) in zip(found, new, lanes, strict=True):
            updates |= more
            reports += told
    return found


def in_words(model: str, *, calibrated: bool = False) -> str:
    """What messages call the model whose features they are about."""
    plain = {EXPERT: "the expert", TRUNK: "the calibrated model" if calibrated else "the merged model"}
    return plain.get(model, f"calibrated model {model}")
