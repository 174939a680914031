"""Samples from live Python objects: tensors, torch data sets, loaders."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from driftlens.data.rows import related_text_columns, text_split_view
from driftlens.data.samples import SampleSet, mask_for_input, random_order, sample_positions
from driftlens.data.sources import Split, find_class_names, label_to_class
from driftlens.data.task_data import TaskData, build_sample_set, require_same_classes, to_text_samples
from driftlens.models.texts import TextProcessor
from driftlens.utils.errors import DataError, SpecError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

    from driftlens.config.data import TextEntry

Inputs = dict[str, "Tensor"]
# Key of the inputs of a batch that is a single tensor.
_ONLY = ""
# Entries of a mapping that hold labels; the others are inputs.
_LABELS = ("labels", "label")


@dataclass(frozen=True)
class _LiveBatch:
    """A batch of data in memory: inputs by name (`_ONLY` for a single tensor), labels, names of dropped entries."""

    inputs: Inputs
    labels: tuple[int | str, ...] | None
    dropped: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def select_samples(self, rows: Sequence[int]) -> _LiveBatch:
        import torch

        index = torch.as_tensor(list(rows), dtype=torch.long)
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        inputs = {name: tensor[index] for name, tensor in self.inputs.items()}
        return _LiveBatch(inputs, labels, self.dropped)


@dataclass(frozen=True)
class _LiveSource:
    """Data in memory that can be read repeatedly: `start` yields batches of the samples at positions, or of all.

    `total` is their number, if known before the end, and `class_names` the meaning of numeric labels, if there is any.
    """

    start: Callable[[Sequence[int] | None], Iterator[_LiveBatch]]
    total: int | None
    notices: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None


def sample_live_data(
    task: str,
    source: Any,
    *,
    n: int | None = None,
    seed: int = 0,
    split: Split = "diagnosis",
    batch_size: int = 32,
    class_names: Sequence[str] | None = None,
) -> SampleSet:
    """Sample `n` samples of a tensor, data set or loader and copy them to memory; ids are positions in it.

    Of iterables of unknown length, the first `n` samples are taken. Sequences of different lengths are padded at the
    end if there is an attention mask. Notices report this and all dropped entries.

    Args:
        task: with `seed` and `split`, determines the random samples.
        source: a tensor [n, ...]; a torch Dataset or DataLoader; a Hugging Face Dataset; or an iterable of batches. A
            batch is a tensor, a mapping to tensors, or a tuple of one of these, labels [n] (integers or names) and
            other values, which are dropped. Entries `labels` and `label` of a mapping are labels; text is dropped.
        n: number of samples; None keeps all, in their order.
        seed: see `task`.
        split: see `task`.
        batch_size: samples per batch of the result.
        class_names: the rows of the head. Labels match them by name: their own, or the data set's name of their
            number; other numbers index the rows.
    """
    where = f"data[{task!r}]"
    opened = _open_live_source(source, batch_size, where)
    positions, notices = None, list(opened.notices)
    if n is not None and opened.total is not None and n < opened.total:
        positions = random_order(opened.total, seed, task=task, split=split)[:n]
        notices.append(f"{n} of {opened.total} samples were sampled with seed {seed}")
    whole = _concatenate_batches(list(_read_batches(opened, positions, n, where)), where)
    count, inputs = len(whole), whole.inputs
    if opened.total is None and count == n:
        notices.append(f"the first {n} samples are used; give a Dataset to sample at random")
    notices += [f"ignored in every batch: {entry}" for entry in sorted(whole.dropped)]
    labels = None
    if whole.labels is not None:
        labels, remarks = _label_class_names(whole.labels, opened.class_names, class_names, where)
        notices += remarks

    def load_batch(rows: Sequence[int]) -> Any:
        picked = _LiveBatch(inputs, None).select_samples(rows).inputs
        return picked.get(_ONLY, picked)

    return SampleSet(
        task,
        split,
        tuple(str(position) for position in (range(count) if positions is None else positions)),
        labels,
        load_batch,
        batch_size,
        notices=tuple(f"task {task}: {notice}" for notice in notices),
    )


def sample_live_texts(
    task: str,
    sources: Mapping[Split, tuple[Any, int | None]],
    entry: TextEntry,
    reader: TextProcessor,
    seed: int,
    batch_size: int,
) -> TaskData:
    """Sample rows of text in memory; they are read and validated like rows of files.

    Args:
        task: the task's name.
        sources: per split (diagnosis, perhaps calibration) the rows and how many to keep (None: all). A row maps
            columns to values, or is a question, or a pair of question and answer.
        entry: the rules of a spec entry.
        reader: the tokenizer and its rules.
        seed: of the sampling.
        batch_size: samples per batch.
    """
    if related := related_text_columns(entry):
        raise SpecError(
            f"texts[{task!r}]: {next(iter(related))} is not supported for rows in memory",
            hint="Write them to a JSON lines file, and name it in a spec.",
        )
    sets, where, names = (
        dict[str, SampleSet](),
        f"data[{task!r}]",
        (entry.input or "input", entry.answer_column),
    )
    for split, (rows, n) in sources.items():
        pairs = [[row] if isinstance(row, str) else row for row in rows]
        values = [row if isinstance(row, Mapping) else dict(zip(names, row, strict=False)) for row in pairs]
        class_names = getattr((getattr(rows, "features", None) or {}).get(entry.answer_column), "names", None)
        columns, ids = dict.fromkeys(itertools.chain(*values)), [*map(str, range(len(values)))]
        view = text_split_view(
            entry, split, ids, columns, values.__getitem__, where=where, origin=where, names=class_names
        )
        drawn = sample_positions(view, "all" if n is None or n >= len(ids) else n, seed, task=task, split=split)
        sample_texts = build_sample_set(task, split, view, drawn, view.class_names, list, batch_size)
        texts = [view.read(position) for position in drawn]
        sets[split] = replace(to_text_samples(sample_texts, texts, entry, reader), source=None)
    notices = tuple(dict.fromkeys(notice for samples in sets.values() for notice in samples.notices))
    shown = replace(sets["diagnosis"], notices=notices)
    kept = (sets.get("calibration", shown), shown, shown)
    return TaskData(task, view.class_names, (), *kept, {})


def _label_class_names(
    labels: Sequence[int | str], names_of_data: tuple[str, ...] | None, rows: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], list[str]]:
    """Return the class name of every label, matched to the head's classes (`rows`) if there is a head, and notices."""
    plain = tuple(map(str, labels))
    names = plain if names_of_data is None else tuple(label_to_class(label, names_of_data, where) for label in labels)
    if rows is None:
        return names, []
    chosen = next((candidate for candidate in (names, plain) if {*candidate} <= {*rows}), None)
    if chosen is None:
        if names_of_data is not None or any(isinstance(label, str) for label in labels):
            require_same_classes(names, rows, where=where, all_of_head=False)
        chosen = tuple(label_to_class(label, rows, where) for label in labels)
        return chosen, [f"numeric labels index the head's classes: {labels[0]} is {chosen[0]!r}"]
    place = {name: row for row, name in enumerate(rows)}
    apart = [label for label, name in zip(labels, chosen, strict=True) if label not in (name, place[name])]
    if not apart or chosen is not plain:
        return chosen, []
    return chosen, [f"labels are used as names: {apart[0]} is row {place[str(apart[0])]} of the head"]


def _open_live_source(source: Any, batch_size: int, where: str) -> _LiveSource:
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

    if isinstance(source, Tensor):
        return _in_memory_source([source], where)
    if _is_datasets_instance(source, "iterable_dataset", "IterableDataset"):
        rows = source.with_format("torch")
        return _LiveSource(lambda _: (_parse_batch(batch, where) for batch in rows.iter(batch_size)), None)
    is_dataset = isinstance(source, Dataset) and not isinstance(source, IterableDataset)
    if _is_datasets_instance(source, "arrow_dataset", "Dataset"):
        source, is_dataset = _with_tensor_format(source, where), True
    if is_dataset:
        source = DataLoader(source, batch_size=batch_size)
    if isinstance(source, DataLoader) and source.batch_size is not None:
        # By exact type: a subclass may choose samples, so its order is part of the data.
        if type(source.sampler) is RandomSampler:
            return _dataset_source(source, where, "the loader shuffles; its data set is read in order instead")
        if type(source.sampler) is SequentialSampler:
            return _dataset_source(source, where)
    if isinstance(source, list | tuple):
        return _in_memory_source([source] if _is_labelled_batch(source) else source, where)
    if isinstance(source, Iterator):
        raise DataError(
            f"{where}: a {type(source).__name__} is read only once",
            hint="Give list(batches) or a DataLoader.",
        )
    return _LiveSource(lambda _: (_parse_batch(batch, where) for batch in source), None)


def _is_labelled_batch(source: Sequence[Any]) -> bool:
    """Return True if a pair is one batch of inputs with labels, False if it is two batches."""
    if not isinstance(source, tuple) or len(source) != 2:
        return False
    inputs, labels = source
    # A pair of label-like vectors is ambiguous; it counts as two batches.
    is_line = getattr(inputs, "ndim", 0) == 1
    return not is_line and getattr(labels, "ndim", 1) == 1 and bool(_class_labels_or_none(labels))


def _is_datasets_instance(value: Any, file: str, name: str) -> bool:
    """Return True if a value is an instance of this class of `datasets`; the library is not imported."""
    # A module called `datasets` may be the user's own file.
    module = sys.modules.get(f"datasets.{file}")
    return module is not None and isinstance(value, getattr(module, name))


def _with_tensor_format(rows: Any, where: str) -> Any:
    """Set a Hugging Face data set's format to torch tensors, unless a format is set."""
    if rows.format["type"] is not None:
        return rows
    columns = rows.features.items()
    pictures = [name for name, feature in columns if _is_datasets_instance(feature, "features.image", "Image")]
    if pictures:
        raise DataError(
            f"{where}: column {pictures[0]!r} holds images, expected model inputs",
            hint="Preprocess them: data.with_transform(lambda rows: {**processor(rows["
            f'"{pictures[0]}"], return_tensors="pt"), "label": rows["label"]}}).',
        )
    return rows.with_format("torch")


def _in_memory_source(batches: Sequence[Any], where: str) -> _LiveSource:
    parts = [_parse_batch(batch, where) for batch in batches]
    whole = [_concatenate_batches(parts, where)] if parts else []
    return _LiveSource(
        lambda chosen: (part if chosen is None else part.select_samples(chosen) for part in whole),
        sum(map(len, whole)),
    )


def _dataset_source(loader: DataLoader[Any], where: str, *notices: str) -> _LiveSource:
    """Read a DataLoader's data set in its stored order, with the loader's `collate_fn`."""
    import torch
    from torch.utils.data import DataLoader, Subset, default_collate

    dataset: Any = loader.dataset
    collate = loader.collate_fn
    if collate is default_collate:
        collate = partial(_collate_padded, where=where)

    def iterate_batches(positions: Sequence[int] | None) -> Iterator[_LiveBatch]:
        again: DataLoader[Any] = DataLoader(
            dataset if positions is None else Subset(dataset, list(positions)),
            batch_size=loader.batch_size,
            drop_last=loader.drop_last and positions is None,
            collate_fn=collate,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            # A separate generator, because starting a loader draws from the global one.
            generator=torch.Generator(),
        )
        return (_parse_batch(batch, where) for batch in again)

    return _LiveSource(iterate_batches, len(dataset), notices, _dataset_class_names(dataset))


def _collate_padded(rows: Sequence[Any], where: str) -> _LiveBatch:
    """Collate rows as torch does, but pad sequences of different lengths."""
    from torch.utils.data import default_collate

    return _concatenate_batches([_parse_batch(default_collate([row]), where) for row in rows], where)


def _dataset_class_names(dataset: Any) -> tuple[str, ...] | None:
    features = getattr(dataset, "features", None)
    of_labels = [features[key] for key in _LABELS if isinstance(features, Mapping) and key in features]
    names = next((feature.names for feature in of_labels if hasattr(feature, "names")), find_class_names(dataset))
    are_names = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if names and are_names else None


def _read_batches(
    source: _LiveSource, positions: Sequence[int] | None, n: int | None, where: str
) -> Iterator[_LiveBatch]:
    """Yield batches up to `n` samples; the first batch is read twice to check that data do not change."""
    probe = next(source.start(positions), None)
    if probe is None:
        raise DataError(f"{where}: no batches", hint="Give at least one sample.")
    left = n
    for index, part in enumerate(source.start(positions)):
        if index == 0 and not _is_equal_batch(probe.inputs, part.inputs):
            raise DataError(
                f"{where}: the first batch differs when read again",
                hint="Every model must see the same samples: remove random augmentation, and shuffle only "
                "in a DataLoader.",
            )
        yield part if left is None else part.select_samples(range(min(left, len(part))))
        left = None if left is None else left - len(part)
        if left is not None and left <= 0:
            return


def _is_equal_batch(one: Inputs, other: Inputs) -> bool:
    import torch

    forms = [{name: (value.shape, value.dtype) for name, value in batch.items()} for batch in (one, other)]
    return forms[0] == forms[1] and all(
        torch.allclose(one[name], other[name], rtol=0, atol=0, equal_nan=True) for name in one
    )


def _parse_batch(batch: Any, where: str) -> _LiveBatch:
    from torch import Tensor

    if isinstance(batch, _LiveBatch):
        return batch
    values, labels, dropped = batch, None, set[str]()
    if isinstance(batch, tuple | list) and batch:
        values, *rest = batch
        second = rest[0] if rest else None
        labels = _class_labels_or_none(second)
        if second is not None and labels is None:
            raise DataError(
                f"{where}: the second entry of a batch is {getattr(second, 'dtype', type(second).__name__)}, "
                "expected integer labels [n]",
                hint="Put several inputs into a dict of tensors.",
            )
        dropped |= {"what follows the labels"} if rest[1:] else set()
    inputs = dict(values) if isinstance(values, Mapping) else {_ONLY: values}
    nothing = "no inputs" if inputs else "an empty dict"
    for name in [name for name in _LABELS if name in inputs]:
        classes = _class_labels_or_none(inputs.pop(name))
        dropped |= {name} if classes is None or labels is not None else set()
        labels = classes if labels is None else labels
    lists = {name: value for name, value in inputs.items() if isinstance(value, list | tuple) and value}
    texts = {name for name, value in lists.items() if all(isinstance(entry, str) for entry in value)}
    inputs = {str(name): value for name, value in inputs.items() if name not in texts}
    odd = [value for value in inputs.values() if not isinstance(value, Tensor) or value.dim() == 0]
    if odd or not inputs:
        raise DataError(
            f"{where}: a batch holds {type(odd[0]).__name__ if odd else nothing}, expected tensors [n, ...]",
            hint="Give a tensor, a dict of tensors, or one of these with labels: (inputs, labels).",
        )
    lengths = sorted({len(entry) for entry in (*inputs.values(), labels) if entry is not None})
    if len(lengths) > 1 or 0 in lengths:
        raise DataError(f"{where}: a batch has lengths {lengths}", hint="Give one row per sample, at least one.")
    on_cpu = {name: tensor.detach().cpu() for name, tensor in inputs.items()}
    return _LiveBatch(on_cpu, labels, frozenset(dropped | texts))


def _class_labels_or_none(value: Any) -> tuple[int | str, ...] | None:
    classes = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(classes, list | tuple) and all(isinstance(label, int | str) for label in classes):
        return tuple(classes)
    return None


def _concatenate_batches(parts: Sequence[_LiveBatch], where: str) -> _LiveBatch:
    import torch

    if any(
        part.inputs.keys() != parts[0].inputs.keys() or (part.labels is None) != (parts[0].labels is None)
        for part in parts
    ):
        raise DataError(f"{where}: batches have different entries", hint="Give every batch the same entries.")
    inputs = {name: torch.cat(_pad_to_one_length(name, parts)) for name in parts[0].inputs}
    labels = [label for part in parts for label in part.labels or ()]
    dropped = frozenset().union(*(part.dropped for part in parts))
    return _LiveBatch(inputs, None if parts[0].labels is None else tuple(labels), dropped)


def _pad_to_one_length(name: str, parts: Sequence[_LiveBatch]) -> list[Tensor]:
    """Return the batches' tensors of one input, with masked sequences padded to the longest."""
    import torch.nn.functional as F

    tensors = [part.inputs[name] for part in parts]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) == 1:
        return tensors
    masks = [mask_for_input(part.inputs, name) for part in parts]
    pairs = list(zip(tensors, masks, strict=True))
    # Only a sequence as long as its mask may grow: padding anything else would change its meaning.
    are_masked = all(mask is not None and tensor.shape[:2] == mask.shape for tensor, mask in pairs)
    if not are_masked or len({shape[1:] for shape in shapes}) > 1:
        return tensors
    longest = max(shape[0] for shape in shapes)
    # At the end, where padding moves no other token and, masked, changes none.
    return [F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, longest - tensor.shape[1])) for tensor in tensors]
