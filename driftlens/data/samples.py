"""Samples of one task and split: the choice, its order, and how batches are read."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from driftlens.data.sources import Split, SplitView
from driftlens.models.texts import Pictured, Text, TextReader
from driftlens.utils.errors import DataError

if TYPE_CHECKING:
    from driftlens.config.data import Views

# Keys of the spec for the number of samples per split.
COUNT_KEYS: Mapping[Split, str] = {"calibration": "n", "diagnosis": "n_diagnosis", "test": "n_test"}
# Samples read to distinguish data sets with equal ids.
_PROBES = 8
# Attention masks; the second belongs to inputs whose names begin with `decoder_`.
_MASKS = ("attention_mask", "decoder_attention_mask")


_parts: ContextVar[int] = ContextVar("batch_parts", default=1)


def fitting_batch(size: int) -> int:
    """Return a batch size, halved once for every time that memory ran out."""
    return max(1, size // _parts.get())


@contextmanager
def halving_batches(
    size: int, tell: Callable[[str], None], *, sums: bool = False
) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield a function that runs work, and repeats it with smaller batches when memory runs out.

    Work must start from the beginning whenever it is called.

    Args:
        size: samples of the largest batch, halved down to one.
        tell: reports the new batch size.
        sums: True if the work accumulates moments, which move to the host where they or nothing else fit.
    """
    import torch

    from driftlens.utils.devices import SumsTooLarge, free_cached, sums_moving

    def run_halving_batches(work: Callable[[], object]) -> None:
        while True:
            try:
                work()
                return
            except torch.OutOfMemoryError as error:
                is_least = fitting_batch(size) == 1
                moves = is_least or isinstance(error, SumsTooLarge)
                if sums and moves and move():
                    goes_on_with = "moments and solves on the host"
                elif is_least:
                    raise
                else:
                    _parts.set(2 * _parts.get())
                    goes_on_with = f"batches of {fitting_batch(size)}"
            # Only after the handler are the tensors in the traceback released.
            gc.collect()
            free_cached()
            tell(goes_on_with)

    token = _parts.set(_parts.get())
    try:
        with sums_moving() as move:
            yield run_halving_batches
    finally:
        _parts.reset(token)


@dataclass(frozen=True)
class Batch:
    """Consecutive samples: positions in the set, and the model's raw inputs (tensor or dict of tensors).

    `copied` are digests of the samples that these are copies of, or are; empty where none is a copy.
    """

    start: int
    stop: int
    inputs: Any
    copied: tuple[str, ...] = ()

    def first(self, count: int) -> Batch:
        """Return the first samples, with their padding."""
        return self._select_rows(0, count)

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of every sample's content, however far it is padded at its end."""
        parts = (self._select_rows(row, row + 1).inputs for row in range(self.stop - self.start))
        return tuple(_content_digest(_remove_padding(inputs)) for inputs in parts)

    def _select_rows(self, begin: int, end: int) -> Batch:
        inputs = cut(self.inputs, slice(begin, end))
        return Batch(self.start + begin, min(self.stop, self.start + end), inputs, self.copied[begin:end])


def cut(inputs: Any, places: slice) -> Any:
    """Slice the rows of every tensor in raw inputs."""
    if isinstance(inputs, Mapping):
        return {name: cut(entry, places) for name, entry in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(cut(entry, places) for entry in inputs)
    return inputs[places] if hasattr(inputs, "shape") else inputs


# Answers that calibration shows a model: the data's, the expert's, or none.
Shown = Literal["target", "expert", "none"]


@dataclass(frozen=True)
class Texts:
    """The texts of a set of samples; without a `reader`, the model's own code reads them.

    Attributes:
        read: position -> question and answer.
        answer: format of an answer, with `{target}`.
        shown: answers that `SampleSet.load` shows the model after the questions.
        answers: questions -> the expert's answers, formatted; None if it cannot be asked.
    """

    read: Callable[[int], Text]
    reader: TextReader | None = None
    answer: str = "{target}"
    shown: Shown = "none"
    # A `SimilarityTask` of task_data.py, which imports this module.
    compared: Any = None
    answers: Callable[[Sequence[Any]], list[str]] | None = None

    def answered(self, word: str) -> str:
        """Format a word, such as a class name, as an answer."""
        return self.answer.replace("{target}", word)


@dataclass(frozen=True)
class SampleSet:
    """The sampled samples of one split of one task, in fixed order.

    Attributes:
        ids: one identifier per sample (path, `test/17`, row index).
        labels: class name per sample.
        load: positions -> raw inputs of those samples, preprocessed and stacked.
        source: digest of the data that was sampled; None for samples in memory, whose ids are positions.
        picture: position -> the image of a data source.
        preprocess: converts images or texts to raw inputs.
        views: copies that calibrations read in addition, see `driftlens.data.altered`.
        original: the samples that copies were made from, repeated in order.
    """

    task: str
    split: str
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None
    load: Callable[[Sequence[int]], Any]
    batch_size: int = 32
    source: Callable[[], str] | None = None
    notices: tuple[str, ...] = ()
    texts: Texts | None = None
    picture: Callable[[int], Any] | None = None
    preprocess: Callable[[list[Any]], Any] | None = None
    views: Views | None = None
    original: SampleSet | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_read(self) -> int:
        """The number of samples that a calibration reads, copies included."""
        return len(self) * (1 + (0 if self.views is None else self.views.count))

    @property
    def at_once(self) -> int:
        """The size of batches where memory bears it, else less."""
        return fitting_batch(self.batch_size)

    def fitting(self, per_sample: int, budget: int) -> int:
        """Return how many samples of a given size fit into a budget, in whole batches, at least one."""
        return max(1, budget // max(1, per_sample) // self.at_once) * self.at_once

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield batches of the samples [start, stop), each read when needed."""
        end = len(self.ids) if stop is None else stop
        size = self.at_once
        for begin in range(start, end, size):
            last = min(begin + size, end)
            digests = () if self.original is None else self.original.digests
            copied = tuple(digests[place % len(digests)] for place in range(begin, last) if digests)
            yield Batch(begin, last, self.load(range(begin, last)), copied)

    def text(self, position: int) -> Text:
        """Return a sample's question and answer; refuse samples that are not texts."""
        if self.texts is None:
            raise DataError(
                f"task {self.task}: the {self.split} samples are not texts",
                hint="Use `kind: jsonl`, `table` or `hf`.",
            )
        return self.texts.read(position)

    @property
    def all_texts(self) -> list[Text]:
        """The questions and answers of all samples; empty if they are not texts."""
        return [] if self.texts is None else [self.texts.read(position) for position in range(len(self))]

    def answering(self, answers: Sequence[str]) -> SampleSet:
        """Return the same questions with these answers, which `load` shows the model; an empty one shows none."""
        assert self.texts is not None and self.texts.reader is not None
        reader = self.texts.reader
        answered = tuple(self.text(row)._replace(target=answer) for row, answer in enumerate(answers))
        return replace(
            self,
            load=lambda positions: reader([answered[position] for position in positions]),
            texts=replace(self.texts, read=answered.__getitem__, shown="target"),
        )

    def origin(self) -> str:
        """Return a digest of the data: samples of equal id and origin are the same, at any path."""
        if self.source is not None:
            return self.source()
        return data_digest(self.ids, lambda position: self.load([position]))

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Digest of every sample's content, however far it is padded at its end; all samples are read."""
        return tuple(_content_digest(_remove_padding(self.load([position]))) for position in range(len(self)))

    @property
    def identities(self) -> tuple[str, ...]:
        """A unique value per sample: its id, or its content for data in memory."""
        return self.digests if self.source is None else self.ids


def part_of(samples: SampleSet, positions: Sequence[int]) -> SampleSet:
    """Select samples at positions, possibly none, in this order."""
    chosen, texts, picture = tuple(positions), samples.texts, samples.picture
    return replace(
        samples,
        ids=tuple(samples.ids[position] for position in chosen),
        labels=None if samples.labels is None else tuple(samples.labels[position] for position in chosen),
        load=lambda places: samples.load([chosen[place] for place in places]),
        texts=texts
        and replace(
            texts,
            read=lambda position: texts.read(chosen[position]),
            compared=texts.compared and texts.compared.at(chosen),
        ),
        picture=picture and (lambda position: picture(chosen[position])),
    )


def few_of(samples: SampleSet, count: int) -> SampleSet:
    """Select at most `count` samples at random, the same every time."""
    return part_of(samples, shuffled(len(samples), 0, task=samples.task, split="test")[:count])


def mask_beside(inputs: Mapping[str, Any], name: str) -> Any:
    """Return the mask that belongs to an input; None without."""
    return inputs.get(_MASKS[name.startswith("decoder_")])


def _remove_padding(inputs: Any) -> Any:
    """Remove padding before the first and after the last token of one sample [1, ...]."""
    if not isinstance(inputs, Mapping):
        return inputs
    kept = dict(inputs)
    for name, value in inputs.items():
        mask = mask_beside(inputs, name)
        if mask is not None and value.shape[:2] == mask.shape:
            # The first maximum of the sums is the last unmasked token.
            sums = (mask[0] != 0).cumsum(0)
            kept[name] = value[:, int((sums == 0).sum()) % len(sums) : int(sums.argmax()) + 1]
    return kept


def _content_digest(sample: Any) -> str:
    digest = hashlib.sha256()
    for part in _content_bytes(sample):
        digest.update(part)
    return digest.hexdigest()


def data_digest(ids: Sequence[str], read: Callable[[int], Any]) -> str:
    """Compute a digest of all ids, in any order, and of a few evenly spread samples, in hexadecimal.

    A sample is text, numbers, an image or tensor, or a mapping or sequence of these.
    """
    order = sorted(range(len(ids)), key=lambda position: ids[position])
    # File names that are not valid UTF-8 contain surrogates, which a strict encoder refuses.
    digest = hashlib.sha256("\n".join(ids[position] for position in order).encode("utf-8", "surrogatepass"))
    for place in np.unique(np.linspace(0, len(order) - 1, _PROBES).astype(int)) if order else ():
        try:
            sample = read(order[place])
        except DataError:  # it may never be sampled
            sample = "unreadable"
        for part in _content_bytes(sample):
            digest.update(part)
    return digest.hexdigest()


def _content_bytes(value: Any) -> Iterable[bytes]:
    # Hash the images themselves, not their paths.
    if isinstance(value, Pictured):
        yield from _content_bytes(
            [value.input, value.target, *(np.asarray(image()) for image in value.images)]
        )
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _content_bytes(value[key])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _content_bytes(entry)
    elif isinstance(value, str | bytes):
        yield value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    else:
        # float64 holds every other float exactly; not every dtype of a tensor is one of numpy's.
        value = value.detach().cpu().double() if hasattr(value, "detach") else value
        array = np.ascontiguousarray(value)
        yield f"{array.shape}".encode()
        yield array.tobytes()


DRAWN_BY = "the names of split and task, so a renamed task gets other samples"


def draw(
    view: SplitView,
    n: int | Literal["all"],
    seed: int,
    *,
    task: str,
    split: Split,
    exclude_ids: Collection[str] = (),
) -> tuple[int, ...]:
    """Sample positions at random, in random order; `all` keeps the split's order.

    Equal arguments give equal samples on every machine, and a smaller `n` gives a prefix of a larger one.

    Args:
        view: the split.
        n: number of samples; fewer left is an error.
        seed: of the sampling.
        task: the task's name; tasks on the same data get different samples.
        split: the split's name.
        exclude_ids: samples that must not be chosen.
    """
    excluded = frozenset(exclude_ids)
    left = [position for position, sample in enumerate(view.ids) if sample not in excluded]
    count = len(left) if n == "all" else n
    if count > len(left) or not left:
        taken = len(view) - len(left)
        also = f", {taken} of which are calibration samples" if taken else ""
        hint = f"Set data.{task}.{COUNT_KEYS[split]}: {len(left)} or less, or add samples."
        raise DataError(
            f"task {task}: {n} {split} samples requested, but {view.origin} has {len(view)}{also}",
            hint=hint if left else "Use a separate folder, file or split for calibration.",
        )
    if n == "all":
        return tuple(left)
    return tuple(left[index] for index in shuffled(len(left), seed, task=task, split=split)[:count])


def shuffled(count: int, seed: int, *, task: str, split: Split) -> list[int]:
    """Return the numbers 0 to count - 1 in the random order that `draw` uses."""
    return [int(index) for index in drawing(seed, f"{split}/{task}").permutation(count)]


def drawing(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends on seed and name only, on every machine."""
    # Python's own hash() of text changes from process to process; this one does not.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return np.random.default_rng(np.random.SeedSequence([seed, *words]))


def unequal_counts(counts: Mapping[str, int], split: Split) -> tuple[str, ...]:
    """Return a notice if tasks use different numbers of samples."""
    if len(set(counts.values())) < 2:
        return ()
    listed = ", ".join(f"{task} {count}" for task, count in sorted(counts.items()))
    return (f"numbers of {split} samples differ: {listed}",)
