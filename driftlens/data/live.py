"""Samples from live Python objects: tensors, torch data sets, loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.data.samples import SampleSet
from driftlens.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

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

    def cut(self, count: int) -> _Part:
        """The first `count` samples."""
        labels = None if self.labels is None else self.labels[:count]
        return _Part({name: tensor[:count] for name, tensor in self.inputs.items()}, labels)


def live_samples(
    task: str,
    source: Any,
    *,
    n: int | None = None,
    split: str = "diagnosis",
    batch_size: int = 32,
    class_names: Sequence[str] | None = None,
) -> SampleSet:
    """The first `n` samples of `source`, copied to memory; ids are `0`, `1` and so on.

    Args:
        task: the task's name.
        source: a tensor [n, ...]; a torch Dataset or DataLoader; or an iterable of batches. A batch is a
            tensor, a dict of tensors, or a pair of one of these and a tensor of labels [n].
        n: how many samples to keep; None keeps all. Fewer are kept where there are fewer.
        split: what the samples are for.
        batch_size: samples per batch of the result.
        class_names: what the numbers among the labels mean; None makes the numbers themselves the names.

    Raises:
        DataError: the first batch differs when it is drawn again (a shuffling loader), batches that don't fit
            together, labels that are no whole numbers, or no samples at all.
    """
    import torch

    where = f"data[{task!r}]"
    parts = list(_first(_repeatable(source, batch_size, where), n, where))
    inputs = {name: _joined([part.inputs[name] for part in parts], where) for name in parts[0].inputs}
    numbers = (
        None
        if parts[0].labels is None
        else torch.cat([part.labels for part in parts if part.labels is not None])
    )

    def load(positions: Sequence[int]) -> Any:
        chosen = torch.as_tensor(list(positions), dtype=torch.long)
        picked = {name: tensor[chosen] for name, tensor in inputs.items()}
        return picked.get(_ONLY, picked)

    ids = tuple(str(position) for position in range(sum(len(part) for part in parts)))
    return SampleSet(task, split, ids, _names(numbers, class_names, where), load, batch_size)


def _repeatable(source: Any, batch_size: int, where: str) -> Callable[[], Iterator[Any]]:
    """A function that starts `source` from its beginning and yields batches."""
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(source, Tensor):
        return lambda: iter(torch.split(source, batch_size))
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        # A generator of its own, because starting a loader draws from the global one.
        return lambda: iter(DataLoader(source, batch_size=batch_size, generator=torch.Generator()))
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
    return lambda: iter(source)


def _first(start: Callable[[], Iterator[Any]], n: int | None, where: str) -> Iterator[_Part]:
    """Batches up to `n` samples, after the first was drawn twice and compared."""
    probe = next(start(), None)
    if probe is None:
        raise DataError(f"{where}: no batches", hint="Give at least one batch with one sample.")
    left = n
    for index, batch in enumerate(start()):
        part = _parsed(batch, where)
        if index == 0:
            first = part
            _check_same(_parsed(probe, where), part, where)
        _check_form(first, part, where)
        yield part if left is None else part.cut(left)
        left = None if left is None else left - len(part)
        if left is not None and left <= 0:
            return


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
    part = _Part(
        {str(name): tensor.detach().cpu() for name, tensor in inputs.items()}, _checked(labels, where)
    )
    lengths = {len(tensor) for tensor in part.inputs.values()} | (
        {len(part)} if part.labels is None else {len(part.labels)}
    )
    if len(lengths) > 1 or 0 in lengths:
        raise DataError(
            f"{where}: lengths within a batch are {sorted(lengths)}", hint="One row per sample, at least one."
        )
    return part


def _checked(labels: Any, where: str) -> Tensor | None:
    from torch import Tensor

    if labels is None:
        return None
    is_whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if not is_whole or labels.dim() != 1:
        found = (
            f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        )
        raise DataError(
            f"{where}: the second entry of a batch is {found}, expected labels: whole numbers [n]",
            hint="Several inputs go into a dict of tensors.",
        )
    labels_on_cpu: Tensor = labels.detach().cpu()
    return labels_on_cpu


def _check_same(first: _Part, again: _Part, where: str) -> None:
    same = len(first) == len(again) and first.inputs.keys() == again.inputs.keys()
    if same and all(_equal(first.inputs[name], again.inputs[name]) for name in first.inputs):
        return
    raise DataError(
        f"{where}: the first batch differs when it is drawn again",
        hint="Every model must see the same samples: shuffle=False, no random augmentation.",
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit by bit, not-a-number included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _check_form(first: _Part, part: _Part, where: str) -> None:
    if first.inputs.keys() != part.inputs.keys() or (first.labels is None) != (part.labels is None):
        raise DataError(
            f"{where}: batches differ in what they hold", hint="Give every batch the same entries."
        )


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


def _names(numbers: Tensor | None, class_names: Sequence[str] | None, where: str) -> tuple[str, ...] | None:
    if numbers is None:
        return None
    found = [int(number) for number in numbers]
    if class_names is None:
        return tuple(str(number) for number in found)
    outside = [number for number in found if not 0 <= number < len(class_names)]
    if outside:
        raise DataError(
            f"{where}: label {outside[0]} is outside 0 to {len(class_names) - 1}",
            hint="Labels index the class names.",
        )
    return tuple(class_names[number] for number in found)
