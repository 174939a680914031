"""Samples from live Python objects: tensors, torch data sets, loaders."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.data.samples import SampleSet, shuffled
from driftlens.data.sources import Split, class_name
from driftlens.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

Inputs = dict[str, "Tensor"]
_ONLY = ""
"""The key under which a batch that is one tensor is kept."""


@dataclass(frozen=True)
class _Part:
    """A batch: its inputs by name (one tensor alone stands under `_ONLY`) and its labels."""

    inputs: Inputs
    labels: Tensor | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def pick(self, rows: Sequence[int]) -> _Part:
        """Some of the samples, in the order asked for."""
        import torch

        index = torch.as_tensor(list(rows), dtype=torch.long)
        labels = None if self.labels is None else self.labels[index]
        return _Part({name: tensor[index] for name, tensor in self.inputs.items()}, labels)


@dataclass(frozen=True)
class _Source:
    """What can be read from its beginning as often as one likes.

    Attributes:
        start: yields the samples at these positions, or all there are, in parts.
        total: how many samples there are; None where nobody knows before the end.
        notices: what a reader must be told.
    """

    start: Callable[[Sequence[int] | None], Iterator[_Part]]
    total: int | None
    notices: tuple[str, ...] = ()


def live_samples(
    task: str,
    source: Any,
    *,
    n: int | None = None,
    seed: int = 0,
    split: Split = "diagnosis",
    batch_size: int = 32,
    class_names: Sequence[str] | None = None,
) -> SampleSet:
    """`n` samples of `source`, drawn at random and copied to memory; ids are their positions in the source.

    Whether a loader shuffles doesn't matter: its data set is read instead, in its own order. Of iterables whose length
    nobody knows, the first `n` samples are taken. The result's notices say so.

    Args:
        task: the task's name.
        source: a tensor [n, ...]; a torch Dataset or DataLoader; or an iterable of batches. A batch is a
            tensor, a mapping to tensors (a dict, a tokenizer's `BatchEncoding`), or a pair of one of these and a
            tensor of labels [n].
        n: how many samples to keep; None keeps all. All are kept, in their order, where there are no more.
        seed: decides which samples are drawn, together with task and split.
        split: what the samples are for.
        batch_size: samples per batch of the result.
        class_names: what the numbers among the labels mean; None makes the numbers themselves the names.

    Raises:
        DataError: the first batch differs when it is drawn again (a random augmentation), batches that don't fit
            together, labels that are no whole numbers, or no samples at all.
    """
    where = f"data[{task!r}]"
    found = _opened(source, batch_size, where)
    positions, notices = None, list(found.notices)
    if n is not None and found.total is not None and n < found.total:
        positions = shuffled(found.total, seed, task=task, split=split)[:n]
        notices.append(f"{n} of {found.total} samples are drawn at random with seed {seed}")
    parts = list(_read(found, positions, n, where))
    count = sum(len(part) for part in parts)
    if found.total is None and count == n:
        notices.append(f"the first {n} samples are taken; give a Dataset to have them drawn at random")
    inputs = {name: _joined([part.inputs[name] for part in parts], where) for name in parts[0].inputs}
    numbers = [number for part in parts if part.labels is not None for number in part.labels.tolist()]

    def load(rows: Sequence[int]) -> Any:
        picked = _Part(inputs, None).pick(rows).inputs
        return picked.get(_ONLY, picked)

    return SampleSet(
        task,
        split,
        tuple(str(position) for position in (range(count) if positions is None else positions)),
        tuple(class_name(number, class_names, where) for number in numbers) or None,
        load,
        batch_size,
        notices=tuple(f"task {task}: {notice}" for notice in notices),
    )


def _opened(source: Any, batch_size: int, where: str) -> _Source:
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

    if isinstance(source, Tensor):
        return _in_memory([source], where)
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return _from_dataset(DataLoader(source, batch_size=batch_size), where)
    if isinstance(source, DataLoader) and source.batch_size is not None:
        if type(source.sampler) is RandomSampler:
            notice = "the loader shuffles; its data set is read in its own order instead"
            return _from_dataset(source, where, notice)
        if type(source.sampler) is SequentialSampler:
            return _from_dataset(source, where)
    if isinstance(source, list | tuple):
        return _in_memory(source, where)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise DataError(
            f"{where}: expected a tensor, a Dataset or an iterable of batches, got {type(source).__name__}",
            hint="A single batch may be given as a list with one entry.",
        )
    if isinstance(source, Iterator):
        raise DataError(
            f"{where}: a {type(source).__name__} can be read only once",
            hint="Give list(batches) or a DataLoader.",
        )
    return _Source(lambda _: (_parsed(batch, where) for batch in source), None)


def _in_memory(batches: Sequence[Any], where: str) -> _Source:
    parts = [_parsed(batch, where) for batch in batches]
    ends = list(itertools.accumulate(len(part) for part in parts))

    def at(position: int) -> _Part:
        index = bisect.bisect_right(ends, position)
        return parts[index].pick([position - ends[index]])  # counted from the part's end

    return _Source(lambda chosen: iter(parts) if chosen is None else map(at, chosen), sum(map(len, parts)))


def _from_dataset(loader: DataLoader[Any], where: str, *notices: str) -> _Source:
    """A loader's data set in its own order, collated and read as the loader does."""
    import torch
    from torch.utils.data import DataLoader, Subset

    dataset: Any = loader.dataset

    def start(positions: Sequence[int] | None) -> Iterator[_Part]:
        again: DataLoader[Any] = DataLoader(
            dataset if positions is None else Subset(dataset, list(positions)),
            batch_size=loader.batch_size,
            drop_last=loader.drop_last and positions is None,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            # A generator of its own, because starting a loader draws from the global one.
            generator=torch.Generator(),
        )
        return (_parsed(batch, where) for batch in again)

    return _Source(start, len(dataset), notices)


def _read(source: _Source, positions: Sequence[int] | None, n: int | None, where: str) -> Iterator[_Part]:
    """Batches up to `n` samples, after the first was drawn twice and compared."""
    first = next(source.start(positions), None)
    if first is None:
        raise DataError(f"{where}: no batches", hint="Give at least one batch with one sample.")
    left = n
    for index, part in enumerate(source.start(positions)):
        if index == 0 and not _same(first.inputs, part.inputs):
            raise DataError(
                f"{where}: the first batch differs when it is drawn again",
                hint="Every model must see the same samples: no random augmentation, and shuffle=False where "
                "batches come from anything but a DataLoader.",
            )
        if first.inputs.keys() != part.inputs.keys() or (first.labels is None) != (part.labels is None):
            raise DataError(
                f"{where}: batches differ in what they hold", hint="Give every batch the same entries."
            )
        yield part if left is None else part.pick(range(min(left, len(part))))
        left = None if left is None else left - len(part)
        if left is not None and left <= 0:
            return


def _same(one: Inputs, other: Inputs) -> bool:
    """Whether two batches agree bit by bit, not-a-number included."""
    return one.keys() == other.keys() and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in ((one[name], other[name]) for name in one)
    )


def _parsed(batch: Any, where: str) -> _Part:
    from torch import Tensor

    values, labels = batch, None
    if isinstance(batch, tuple | list) and len(batch) in (1, 2):
        values, labels = batch[0], batch[1] if len(batch) == 2 else None
    inputs = dict(values) if isinstance(values, Mapping) else {_ONLY: values}
    odd = [value for value in inputs.values() if not isinstance(value, Tensor) or value.dim() == 0]
    if odd or not inputs:
        found = type(odd[0]).__name__ if odd else "an empty dict"
        raise DataError(
            f"{where}: a batch holds {found}, expected tensors whose first axis is the sample",
            hint="A batch is a tensor, a dict of tensors, or one of these with labels: (inputs, labels).",
        )
    is_whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if labels is not None and not (is_whole and labels.dim() == 1):
        found = type(labels).__name__
        if isinstance(labels, Tensor):
            found = f"{labels.dtype} {list(labels.shape)}"
        raise DataError(
            f"{where}: the second entry of a batch is {found}, expected labels: whole numbers [n]",
            hint="Several inputs go into a dict of tensors.",
        )
    lengths = sorted({len(tensor) for tensor in (*inputs.values(), labels) if tensor is not None})
    if len(lengths) > 1 or 0 in lengths:
        raise DataError(
            f"{where}: lengths within a batch are {lengths}", hint="One row per sample, at least one."
        )
    on_cpu = {str(name): tensor.detach().cpu() for name, tensor in inputs.items()}
    return _Part(on_cpu, None if labels is None else labels.detach().cpu())


def _joined(tensors: list[Tensor], where: str) -> Tensor:
    import torch

    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        listed = ", ".join(str(list(shape)) for shape in sorted(shapes))
        raise DataError(
            f"{where}: samples differ in shape between batches: {listed}",
            hint="Pad or crop all samples to one shape.",
        )
    return torch.cat(tensors)
