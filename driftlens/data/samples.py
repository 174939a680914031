"""Samples of one task and split: which are used, in what order, and how they are read batch by batch."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from driftlens.data.sources import Split, SplitView
from driftlens.models.texts import Pictured, Text, TextReader
from driftlens.utils.errors import DataError

if TYPE_CHECKING:
    from driftlens.config.data import Views
    from driftlens.data.related import Comparison

COUNT_KEYS: Mapping[Split, str] = {"calibration": "n", "diagnosis": "n_diagnosis", "test": "n_test"}
"""The spec's key for the number of samples of each split."""
_PROBES = 8
"""Samples that are read to tell data from other data of the same ids."""
_MASKS = ("attention_mask", "decoder_attention_mask")
"""Which tokens of a sequence count; the second is that of entries whose names begin with `decoder_`."""


_parts: ContextVar[int] = ContextVar("batch_parts", default=1)


def fitting_batch(size: int) -> int:
    """A batch size, halved as often as memory has been too little for the work at hand."""
    return max(1, size // _parts.get())


@contextmanager
def halving_batches(
    size: int, tell: Callable[[str], None], *, sums: bool = False
) -> Iterator[Callable[[Callable[[], object]], None]]:
    """A function that does some work, again with less at once while memory is too little.

    Batches, the largest of which has `size` samples, are halved down to one sample. Where the work `sums` up moments
    these are kept on the host if it was they that had no room, or if nothing else helps. Work has to begin anew
    whenever it is called; `tell` is told what it goes on with, which stays so until this is closed.
    """

    import torch

    from driftlens.utils.devices import SumsTooLarge, free_cached, sums_moving

    def done(work: Callable[[], object]) -> None:
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
            # Only here is nothing left of what the error has gone through.
            gc.collect()
            free_cached()
            tell(goes_on_with)

    token = _parts.set(_parts.get())
    try:
        with sums_moving() as move:
            yield done
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
        """Its first samples, padded as they are."""
        return self._part(0, count)

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of every sample's content, however far it is padded at its end."""
        parts = (self._part(row, row + 1).inputs for row in range(self.stop - self.start))
        return tuple(_digest(_unpadded(inputs)) for inputs in parts)

    def _part(self, first: int, last: int) -> Batch:
        inputs = cut(self.inputs, slice(first, last))
        return Batch(self.start + first, min(self.stop, self.start + last), inputs, self.copied[first:last])


def cut(inputs: Any, places: slice) -> Any:
    """Raw inputs of some samples: of every tensor in them the rows, all else as it is."""
    if isinstance(inputs, Mapping):
        return {name: cut(entry, places) for name, entry in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(cut(entry, places) for entry in inputs)
    return inputs[places] if hasattr(inputs, "shape") else inputs


Shown = Literal["target", "expert", "none"]
"""The answers that calibration shows a model: the data's, the expert's own, or none."""


@dataclass(frozen=True)
class Texts:
    """What the samples of a set are as text, whatever of it the model is given.

    Attributes:
        read: position -> question and answer, as the model is asked and should say them.
        reader: what makes token ids of them; None where nobody knows the model.
        answer: how an answer is written; the word stands for `{target}`.
        shown: which answers `SampleSet.load` gives the model beside the questions.
        answers: questions -> how the task's expert answers them, as answers are written; None where nobody can ask it.
        compared: what test samples are compared with; None where that is nothing.
    """

    read: Callable[[int], Text]
    reader: TextReader | None = None
    answer: str = "{target}"
    shown: Shown = "none"
    compared: Comparison | None = None
    answers: Callable[[Sequence[Any]], list[str]] | None = None

    def answered(self, word: str) -> str:
        """How the model should say a word, such as the name of a class."""
        return self.answer.replace("{target}", word)


@dataclass(frozen=True)
class SampleSet:
    """What one split of one task offers, drawn once and kept in this order.

    Attributes:
        ids: one identifier per sample (see contract: path, `test/17`, row index).
        labels: class name per sample, or None when the data has no labels.
        load: positions -> raw inputs of those samples, preprocessed and stacked.
        source: digest of the data that the samples were drawn from, where that is more than the samples themselves;
            None for samples that a caller has handed in, whose ids are mere places in what that was.
        notices: what a reader of the results must be told about the samples.
        texts: what the samples are as text; None where they are none.
        picture: position -> the image as its source holds it; None where samples are no images of a data source.
        preprocess: what `load` makes raw inputs of images or texts with, where there are any.
        views: which copies calibrations read beside the samples, see `driftlens.data.views`; None for none.
        original: the samples that some of these are copies of, in their order again and again; None where none is.
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
        """How many samples a calibration reads, copies among them."""
        return len(self) * (1 + (0 if self.views is None else self.views.count))

    @property
    def num_batches(self) -> int:
        """Of all samples; the last one may be smaller."""
        return -(-len(self.ids) // self.at_once)

    @property
    def at_once(self) -> int:
        """The size of batches where memory bears it, else less."""
        return fitting_batch(self.batch_size)

    def fitting(self, per_sample: int, budget: int) -> int:
        """How many samples of so many bytes fit into a budget, in whole batches; a batch at least."""
        return max(1, budget // max(1, per_sample) // self.at_once) * self.at_once

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches of the samples [start, stop), each read when it is asked for."""
        end = len(self.ids) if stop is None else stop
        size = self.at_once
        for first in range(start, end, size):
            last = min(first + size, end)
            copied = (
                ()
                if (original := self.original) is None
                else tuple(original.digests[position % len(original)] for position in range(first, last))
            )
            yield Batch(first, last, self.load(range(first, last)), copied)

    def text(self, position: int) -> Text:
        """What a sample asks and what its answer should be, whatever of it `load` gives the model.

        Raises:
            DataError: the samples are no texts.
        """
        if self.texts is None:
            raise DataError(
                f"task {self.task}: the {self.split} samples are no texts",
                hint="Texts come from `kind: jsonl`, `table` or `hf`.",
            )
        return self.texts.read(position)

    @property
    def all_texts(self) -> list[Text]:
        """What all samples ask and should answer; nothing where they are no texts."""
        return [] if self.texts is None else [self.texts.read(position) for position in range(len(self))]

    def answering(self, answers: Sequence[str]) -> SampleSet:
        """The same questions of a model's with these answers, which `load` shows it; an empty one shows none."""
        answered = tuple(self.text(row)._replace(target=answer) for row, answer in enumerate(answers))
        texts = replace(cast("Texts", self.texts), read=answered.__getitem__, shown="target")
        reader = cast("TextReader", texts.reader)

        def load(positions: Sequence[int]) -> Any:
            return reader([answered[position] for position in positions])

        return replace(self, load=load, texts=texts)

    def origin(self) -> str:
        """Digest of what the ids are ids of: equal ids of equal origin are the same samples, wherever the files lie."""
        if self.source is not None:
            return self.source()
        return data_digest(self.ids, lambda position: self.load([position]))

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Digest of every sample's content, however far it is padded at its end; all samples are read."""
        return tuple(_digest(_unpadded(self.load([position]))) for position in range(len(self)))

    @property
    def identities(self) -> tuple[str, ...]:
        """What tells every sample from others: its id, or its content where a caller has handed it in."""
        return self.digests if self.source is None else self.ids


def part_of(samples: SampleSet, positions: Sequence[int]) -> SampleSet:
    """The samples at some positions, perhaps none, in this order."""
    chosen, texts, picture = tuple(positions), samples.texts, samples.picture
    return replace(
        samples,
        ids=tuple(samples.ids[position] for position in chosen),
        labels=None if samples.labels is None else tuple(samples.labels[position] for position in chosen),
        load=lambda wanted: samples.load([chosen[position] for position in wanted]),
        texts=texts
        and replace(
            texts,
            read=lambda position: texts.read(chosen[position]),
            compared=texts.compared and texts.compared.at(chosen),
        ),
        picture=picture and (lambda position: picture(chosen[position])),
    )


def few_of(samples: SampleSet, count: int) -> SampleSet:
    """At most so many of the samples, drawn at random and the same every time; all may be sorted by class."""
    return part_of(samples, shuffled(len(samples), 0, task=samples.task, split="test")[:count])


def mask_beside(inputs: Mapping[str, Any], name: str) -> Any:
    """The mask of the inputs of this name, which says what of a sequence counts; None where there is none."""
    return inputs.get(_MASKS[name.startswith("decoder_")])


def _unpadded(inputs: Any) -> Any:
    """One sample [1, ...] without what stands before the first token that counts or follows the last one."""
    if not isinstance(inputs, Mapping):
        return inputs
    cut = {}
    for name, value in inputs.items():
        mask = mask_beside(inputs, name)
        is_masked = mask is not None and value.shape[:2] == mask.shape
        # The first of the largest sums stands where the last token counts.
        sums = (mask[0] != 0).cumsum(0) if is_masked else None
        cut[name] = (
            value if sums is None else value[:, int((sums == 0).sum()) % len(sums) : int(sums.argmax()) + 1]
        )
    return cut


def _digest(sample: Any) -> str:
    digest = hashlib.sha256()
    for part in _contents(sample):
        digest.update(part)
    return digest.hexdigest()


def data_digest(ids: Sequence[str], read: Callable[[int], Any]) -> str:
    """Digest of all ids, in any order, and of the contents of a few samples, evenly spread; in hexadecimal.

    A sample is text, numbers, an image or tensor, or a mapping or sequence of such.
    """
    order = sorted(range(len(ids)), key=lambda position: ids[position])
    digest = hashlib.sha256("\n".join(ids[position] for position in order).encode("utf-8", "surrogatepass"))
    for place in np.unique(np.linspace(0, len(order) - 1, _PROBES).astype(int)) if order else ():
        try:
            sample = read(order[place])
        except DataError:  # perhaps nobody draws it, and then it is no reason to stop
            sample = "unreadable"
        for part in _contents(sample):
            digest.update(part)
    return digest.hexdigest()


def _contents(value: Any) -> Iterable[bytes]:
    if isinstance(value, Pictured):  # wherever its images lie
        yield from _contents([value.input, value.target, *(np.asarray(image()) for image in value.images)])
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _contents(value[key])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _contents(entry)
    elif isinstance(value, str | bytes):
        yield value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    else:
        # float64 holds every other float exactly; not every dtype of a tensor is one of numpy's.
        value = value.detach().cpu().double() if hasattr(value, "detach") else value
        array = np.ascontiguousarray(value)
        yield f"{array.shape}".encode()
        yield array.tobytes()


DRAWN_BY = "the names of split and task: a task that is renamed draws other samples of the same data"


def draw(
    view: SplitView,
    n: int | Literal["all"],
    seed: int,
    *,
    task: str,
    split: Split,
    exclude_ids: Collection[str] = (),
) -> tuple[int, ...]:
    """Positions of the drawn samples, in the order drawn; `all` keeps the split's own order.

    The same arguments give the same samples on every machine, and a smaller `n` a beginning of a larger one. Two tasks
    on the same data draw differently, and so does one under another name. Samples of `exclude_ids` are not drawn.

    Raises:
        DataError: fewer samples than `n` are left; the hint names the key to change.
    """
    excluded = frozenset(exclude_ids)
    left = [position for position, sample in enumerate(view.ids) if sample not in excluded]
    wanted = len(left) if n == "all" else n
    if wanted > len(left) or not left:
        raise _too_few(view, n, len(left), task, split)
    if n == "all":
        return tuple(left)
    return tuple(left[index] for index in shuffled(len(left), seed, task=task, split=split)[:wanted])


def shuffled(count: int, seed: int, *, task: str, split: Split) -> list[int]:
    """The numbers 0 to count - 1 in the order in which samples are drawn; `draw` says what decides it."""
    return [int(index) for index in drawing(seed, f"{split}/{task}").permutation(count)]


def drawing(seed: int, name: str) -> np.random.Generator:
    """What draws the same for the same seed and name, on every machine."""
    # Python's own hash() of text changes from process to process; this one does not.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return np.random.default_rng(np.random.SeedSequence([seed, *words]))


def _too_few(view: SplitView, n: int | Literal["all"], left: int, task: str, split: Split) -> DataError:
    taken = len(view) - left
    also = f", {taken} of which serve calibration" if taken else ""
    hint = f"Ask for no more than that (data.{task}.{COUNT_KEYS[split]}: {left}), or bring more samples."
    if not left:
        hint = "Give calibration a folder, file or split of its own."
    return DataError(
        f"task {task}: {n} {split} samples asked for, but {view.origin} holds {len(view)}{also}",
        hint=hint,
        asked=n,
        available=left,
    )


def unequal_counts(counts: Mapping[str, int], split: Split) -> tuple[str, ...]:
    """A notice that tasks use different numbers of samples, or nothing where they agree."""
    if len(set(counts.values())) < 2:
        return ()
    listed = ", ".join(f"{task} {count}" for task, count in sorted(counts.items()))
    return (f"the number of {split} samples differs between tasks: {listed}",)
