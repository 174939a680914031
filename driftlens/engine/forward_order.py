"""The forward order: samples go through the layers of several models, one layer after the other.

There is one loop over layers, `forward_order`, and one way through a layer, `Crossing`. The loop hands every layer to a
visitor, which looks at what waits before the layer, may change the layer, and lets what waits cross it. Visitors are
the walk beside the expert (drift, library check, scores), the sums and solves of calibrations, and what is trained.

Only the features of one boundary wait at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from driftlens.base.errors import DataError, NumericsError
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.engine.waiting import FeatureStore, WaitingBatch, on_device
from driftlens.models.chain import Layer, SideInputs, State

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

OnStep = Callable[[int, str], None]
"""Called with layer index and task before every batch; it may raise, `Cancelled` for instance."""


class Part(Protocol):
    """Some of a task's samples: a `SampleSet`, for instance."""

    @property
    def ids(self) -> Sequence[str]:
        """Names of the samples, for messages; none where they are not known."""
        ...

    def batches(self) -> Iterable[Batch]:
        """The samples, each time anew."""
        ...


@dataclass(frozen=True)
class Given:
    """Samples that lie ready, as a `Part`.

    Attributes:
        read: gives them, batch by batch.
        ids: see `Part`.
        batch_size: of all batches but the last; 0 where nobody knows.
    """

    read: Callable[[], Iterable[Batch]]
    ids: Sequence[str] = ()
    batch_size: int = 0

    def batches(self) -> Iterable[Batch]:
        """The samples."""
        return self.read()


Parts = Mapping[str, Sequence[Part]]
"""Task -> its samples in parts that don't overlap; every task has as many parts."""


class Visitor(Protocol[T_co]):
    """What is sent every layer, in forward order."""

    def visit(self, layer: Layer) -> Iterator[T_co]:
        """What there is to tell of a layer; behind the last of it, all that goes on waits at the next boundary."""
        ...


def forward_order(visitor: Visitor[T], layers: Sequence[Layer]) -> Iterator[T]:
    """What a visitor tells of some layers, one after the other.

    Args:
        visitor: is sent every layer.
        layers: in forward order. All, up to some layer; or a few, each of which takes what the one before it gives,
            where only their cost is asked for.
    """
    for layer in layers:
        yield from visitor.visit(layer)


@dataclass
class Passage:
    """Some samples on their way through the layers, as features of several models.

    Attributes:
        pool: says where and how models are computed.
        parts: the samples, by task.
        models: names under which features wait, all beginning with the same inputs.
        store: where they wait.
        on_step: called before every batch.
        on_read: called with every batch that is read, and with what waits of it.
        file_prefix: begins the names of files, unlike that of other passages in one store.
        is_full: whether a task without samples is refused.
    """

    pool: ModelPool
    parts: Parts
    models: Sequence[str]
    store: FeatureStore = field(default_factory=FeatureStore)
    on_step: OnStep = lambda layer, task: None
    on_read: Callable[[Batch, WaitingBatch], None] = lambda batch, waiting: None
    file_prefix: str = ""
    is_full: bool = True
    waiting: dict[tuple[str, int], list[WaitingBatch]] = field(default_factory=dict, init=False)

    @property
    def all_waiting(self) -> Iterator[WaitingBatch]:
        """What was read of all tasks."""
        return (batch for batches in self.waiting.values() for batch in batches)

    def crossing(
        self,
        layer: Layer,
        task: str,
        part: int = 0,
        *,
        waits: bool = False,
        tell: Callable[[], None] | None = None,
    ) -> Crossing:
        """The batches of a part before a layer, to be taken through it; arguments as for `batches`."""
        watch = FiniteWatch(layer, task, self.parts[task][part].ids)
        return Crossing(layer, watch, self.batches(layer, task, part, waits=waits, tell=tell))

    def batches(
        self,
        layer: Layer,
        task: str,
        part: int = 0,
        *,
        waits: bool = True,
        tell: Callable[[], None] | None = None,
    ) -> Iterator[WaitingBatch]:
        """The batches of a part at the boundary before the layer.

        Args:
            layer: which one.
            task: whose samples.
            part: number of the part.
            waits: whether they will be asked for again at this boundary; it matters for the raw inputs alone.
            tell: called before each in the place of `on_step`.

        Raises:
            DataError: the task has no sample.
        """
        known = self.waiting.get((task, part))
        for batch in self._read(task, part, waits=waits) if known is None else known:
            if tell is None:
                self.on_step(layer.index, task)
            else:
                tell()
            yield batch

    def _read(self, task: str, part: int, *, waits: bool) -> Iterator[WaitingBatch]:
        """The batches of a part at boundary 0, kept for the layers behind."""
        batches: list[WaitingBatch] = []
        name = f"{self.file_prefix}{list(self.parts).index(task)}-{part}"
        for number, batch in enumerate(self.parts[task][part].batches()):
            state, side = self.pool.chain.start(on_device(batch.inputs, self.pool.device, self.pool.dtype))
            waiting = WaitingBatch(self.store, f"{name}-{number}", side, batch.start, batch.stop)
            for model in self.models:
                (waiting.put if waits else waiting.lend)(model, state)
            self.on_read(batch, waiting)
            batches.append(waiting)
            yield waiting
        self.waiting[task, part] = batches
        if self.is_full and not any(
            self.waiting.get((task, number), [None]) for number in range(len(self.parts[task]))
        ):
            raise DataError(
                f"task {task!r} has no calibration samples",
                hint="Give every task at least one, or leave the task out.",
                task=task,
            )


@dataclass
class Crossing:
    """The batches of one task before one layer, which models take through it one by one.

    Behind the last batch, features that are NaN or infinite are refused.
    """

    layer: Layer
    watch: FiniteWatch
    batches: Iterator[WaitingBatch]

    def __iter__(self) -> Iterator[WaitingBatch]:
        yield from self.batches
        self.watch.check()

    def take(
        self,
        batch: WaitingBatch,
        model: str,
        through: Callable[[State, SideInputs], State],
        *,
        named: str = "",
        entered: str = "",
    ) -> State:
        """What leaves the layer, which waits in the place of what entered it.

        Args:
            batch: the one at hand.
            model: under whose name it waits.
            through: the layer, of that model.
            named: what messages call the model.
            entered: under whose name waits what enters the layer, where it is another.
        """
        left = through(batch.get(entered or model), batch.side)
        self.watch.see(named or model, left[self.layer.stream], batch.start)
        batch.put(model, left)
        return left


class FiniteWatch:
    """Remembers the streams of one task and layer as one number per sample, and looks at them all at once.

    Args:
        layer: whose output is watched.
        task: whose samples they are.
        ids: names of the samples, where they are known.
    """

    def __init__(self, layer: Layer, task: str, ids: Sequence[str] = ()) -> None:
        self._layer = layer
        self._task = task
        self._ids = ids
        self._first = 0
        self._totals: dict[str, list[Tensor]] = {}

    def see(self, model: str, stream: Tensor, start: int = 0) -> None:
        """Remember the next batch of a model's features, [n, ...]; `start` is its first sample's position."""
        if model not in self._totals:
            self._first = start
        # A sum is NaN or infinite as soon as one entry is, and is cheaper than looking at each.
        self._totals.setdefault(model, []).append(stream.flatten(1).sum(dim=1, dtype=torch.float64))

    def check(self) -> None:
        """Refuse what was seen.

        Raises:
            NumericsError: some entry is NaN or infinite; names the layer, the task and the first sample.
        """
        for model, totals in self._totals.items():
            bad = (~torch.isfinite(torch.cat(totals))).nonzero()
            if len(bad):
                row = self._first + int(bad[0])
                sample = self._ids[row] if row < len(self._ids) else str(row)
                raise NumericsError(
                    f"features of {model} are NaN or infinite after layer {self._layer.index} "
                    f"({self._layer.path}), task {self._task!r}, first in sample {sample!r}",
                    hint="Look at that input and at the layer's weights; "
                    "in a half-precision dtype, try compute.dtype: float32.",
                    layer=self._layer.index,
                    task=self._task,
                    sample=sample,
                )
