"""Samples of one task and split: the choice, its order, and how batches are read."""

from __future__ import annotations

import gc
import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from driftlens.data.sources import Split, SplitView
from driftlens.models.texts import ImageTextSample, TextProcessor, TextSample
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


def reduced_batch_size(size: int) -> int:
    """Return a batch size, halved once for every out-of-memory error so far."""
    return max(1, size // _parts.get())


@contextmanager
def halve_batch_on_oom(
    size: int, tell: Callable[[str], None], *, sums: bool = False
) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield a function that runs work and repeats it from its start with smaller batches after out-of-memory errors.

    Args:
        size: samples of the largest batch, halved down to one.
        tell: reports the new batch size.
        sums: True if the work accumulates moments, which move to the host where they or nothing else fit.
    """
    import torch

    from driftlens.utils.devices import MomentsOutOfMemory, empty_cache, offload_moments

    def run_halving_batches(work: Callable[[], object]) -> None:
        while True:
            try:
                work()
                return
            except torch.OutOfMemoryError as error:
                is_least = reduced_batch_size(size) == 1
                moves = is_least or isinstance(error, MomentsOutOfMemory)
                if sums and moves and move():
                    goes_on_with = "moments and solves on the host"
                elif is_least:
                    raise
                else:
                    _parts.set(2 * _parts.get())
                    goes_on_with = f"batches of {reduced_batch_size(size)}"
            # Only after the handler are the tensors in the traceback released.
            gc.collect()
            empty_cache()
            tell(goes_on_with)

    token = _parts.set(_parts.get())
    try:
        with offload_moments() as move:
            yield run_halving_batches
    finally:
        _parts.reset(token)


@dataclass(frozen=True)
class Batch:
    """A batch of consecutive samples: their positions in the set and the model's raw inputs.

    `copied` are digests of the samples that these are copies of; empty where none is a copy.
    """

    start: int
    stop: int
    inputs: Any
    copied: tuple[str, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The content digest of every sample; trailing padding does not change it."""
        parts = (self.select_rows(row, row + 1).inputs for row in range(self.stop - self.start))
        return tuple(_content_digest(_remove_padding(inputs)) for inputs in parts)

    def select_rows(self, begin: int, end: int) -> Batch:
        """Return a batch of the samples [begin, end), padded as before."""
        inputs = map_tensors(operator.itemgetter(slice(begin, end)), self.inputs)
        return Batch(self.start + begin, min(self.stop, self.start + end), inputs, self.copied[begin:end])


def map_tensors(change: Callable[..., Any], *inputs: Any) -> Any:
    """Apply `change` to corresponding tensors of raw inputs of equal structure (a tensor, mapping or sequence)."""
    sample = inputs[0]
    if isinstance(sample, Mapping):
        return {name: map_tensors(change, *(batch[name] for batch in inputs)) for name in sample}
    if isinstance(sample, list | tuple):
        return tuple(map_tensors(change, *parts) for parts in zip(*inputs, strict=True))
    return change(*inputs) if hasattr(sample, "is_floating_point") else sample


# Answers that calibration shows a model: the data's, the expert's, or none.
Shown = Literal["target", "expert", "none"]


@dataclass(frozen=True)
class SampleTexts:
    """The questions and answers of a sample set; without a `reader`, the model's own code tokenizes them.

    Attributes:
        read: position -> question and answer.
        answer: format of an answer, with `{target}`.
        shown: answers that `SampleSet.load` shows the model after the questions.
        answers: questions -> the expert's answers, formatted; None if it cannot be asked.
    """

    read: Callable[[int], TextSample]
    reader: TextProcessor | None = None
    answer: str = "{target}"
    shown: Shown = "none"
    # A `SimilarityTask` of task_data.py, which imports this module.
    compared: Any = None
    answers: Callable[[Sequence[Any]], list[str]] | None = None

    def format_answer(self, word: str) -> str:
        """Format a word, such as a class name, by the answer template."""
        return self.answer.replace("{target}", word)


@dataclass(frozen=True)
class SampleSet:
    """The samples chosen from one split of one task, in fixed order.

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
    texts: SampleTexts | None = None
    picture: Callable[[int], Any] | None = None
    preprocess: Callable[[list[Any]], Any] | None = None
    views: Views | None = None
    original: SampleSet | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_with_views(self) -> int:
        """The number of samples that a calibration reads, augmented copies included."""
        return len(self) * (1 + (0 if self.views is None else self.views.count))

    @property
    def safe_batch_size(self) -> int:
        """The batch size after any halving by out-of-memory errors."""
        return reduced_batch_size(self.batch_size)

    def num_in_budget(self, per_sample: int, budget: int) -> int:
        """Return how many samples of `per_sample` bytes fit into a memory budget, in whole batches, at least one."""
        return max(1, budget // max(1, per_sample) // self.safe_batch_size) * self.safe_batch_size

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield the samples [start, stop) in batches, each loaded when needed."""
        end = len(self.ids) if stop is None else stop
        size = self.safe_batch_size
        for begin in range(start, end, size):
            last = min(begin + size, end)
            digests = () if self.original is None else self.original.digests
            copied = tuple(digests[place % len(digests)] for place in range(begin, last) if digests)
            yield Batch(begin, last, self.load(range(begin, last)), copied)

    def text(self, position: int) -> TextSample:
        """Return the question and answer of one sample; refuse samples that are not texts."""
        if self.texts is None:
            raise DataError(
                f"task {self.task}: the {self.split} samples are not texts", hint="Use `kind: jsonl`, `table` or `hf`."
            )
        return self.texts.read(position)

    @property
    def all_texts(self) -> list[TextSample]:
        """The questions and answers of all samples; empty if they are not texts."""
        return [] if self.texts is None else [self.texts.read(position) for position in range(len(self))]

    def with_answers(self, answers: Sequence[str]) -> SampleSet:
        """Return the same questions with other answers, which `load` shows the model unless they are empty."""
        assert self.texts is not None and self.texts.reader is not None
        reader = self.texts.reader
        answered = tuple(self.text(row)._replace(target=answer) for row, answer in enumerate(answers))
        return replace(
            self,
            load=lambda positions: reader([answered[position] for position in positions]),
            texts=replace(self.texts, read=answered.__getitem__, shown="target"),
        )

    @property
    def without_answers(self) -> SampleSet:
        """The same samples, without answers that `load` shows; the model's prediction of an answer can be judged."""
        texts = self.texts
        is_answered = texts is not None and texts.reader is not None and texts.shown != "none"
        return self.with_answers([""] * len(self)) if is_answered else self

    def source_digest(self) -> str:
        """Return a digest of the source data: samples of equal id and digest are the same, at any path."""
        if self.source is not None:
            return self.source()
        return data_digest(self.ids, lambda position: self.load([position]))

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The content digest of every sample, independent of trailing padding; all samples are read."""
        return tuple(self._read_digests())

    def _read_digests(self) -> Iterator[str]:
        return (_content_digest(_remove_padding(self.load([position]))) for position in range(len(self)))

    @property
    def has_one_content(self) -> bool:
        """True if all samples are equal; reading stops at the first that differs."""
        digests = self._read_digests()
        first = next(digests)
        return all(digest == first for digest in digests)

    @property
    def unique_ids(self) -> tuple[str, ...]:
        """A unique id per sample: its id, or a content digest for data in memory."""
        return self.digests if self.source is None else self.ids


def select_samples(samples: SampleSet, positions: Sequence[int]) -> SampleSet:
    """Return the sample set with only the samples at these positions, in this order."""
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
            compared=texts.compared and texts.compared.select(chosen),
        ),
        picture=picture and (lambda position: picture(chosen[position])),
    )


def order_by_length(samples: SampleSet) -> list[int]:
    """Return the positions of texts from the shortest to the longest; of other samples in their order."""
    # Texts of similar length share a batch, as padding costs as much as tokens do.
    lengths = [sum(map(len, text)) for text in samples.all_texts]
    return sorted(range(len(samples)), key=lengths.__getitem__ if lengths else None)


def sort_by_length(samples: SampleSet) -> SampleSet:
    """Return the samples with texts from the shortest to the longest; other samples as they are."""
    return samples if samples.texts is None else select_samples(samples, order_by_length(samples))


def random_subset(samples: SampleSet, count: int) -> SampleSet:
    """Select at most `count` samples at random, always the same ones."""
    return select_samples(samples, random_order(len(samples), 0, task=samples.task, split="test")[:count])


def mask_for_input(inputs: Mapping[str, Any], name: str) -> Any:
    """Return the attention mask that belongs to an input; None if there is none."""
    return inputs.get(_MASKS[name.startswith("decoder_")])


def _remove_padding(inputs: Any) -> Any:
    """Remove the masked tokens before and after the text of one sample [1, ...]."""
    if not isinstance(inputs, Mapping):
        return inputs
    kept = dict(inputs)
    for name, value in inputs.items():
        mask = mask_for_input(inputs, name)
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
    """Compute a hexadecimal digest of all ids, in any order, and of a few evenly spaced samples."""
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
    if isinstance(value, ImageTextSample):
        yield from _content_bytes([value.input, value.target, *(np.asarray(image()) for image in value.images)])
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


def sample_positions(
    view: SplitView, n: int | Literal["all"], seed: int, *, task: str, split: Split, exclude_ids: Collection[str] = ()
) -> tuple[int, ...]:
    """Sample positions of a split at random, in random order; `all` keeps the split's order.

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
        hint = f"Set data.{task}.{COUNT_KEYS[split]} to {len(left)} or less, or add samples."
        raise DataError(
            f"task {task}: {n} {split} samples requested, but {view.origin} has {len(view)}{also}",
            hint=hint if left else "Use a separate folder, file or split for calibration.",
        )
    if n == "all":
        return tuple(left)
    return tuple(left[index] for index in random_order(len(left), seed, task=task, split=split)[:count])


def random_order(count: int, seed: int, *, task: str, split: Split) -> list[int]:
    """Return the numbers 0 to count - 1 in a random order that depends on seed, task and split."""
    return [int(index) for index in seeded_rng(seed, f"{split}/{task}").permutation(count)]


def seeded_rng(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends on seed and name only, on every machine."""
    # Python's own hash() of text changes from process to process; this one does not.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return np.random.default_rng(np.random.SeedSequence([seed, *words]))


def unequal_count_notice(counts: Mapping[str, int], split: Split) -> tuple[str, ...]:
    """Return a notice if the number of samples differs between tasks."""
    if len(set(counts.values())) < 2:
        return ()
    listed = ", ".join(f"{task} {count}" for task, count in sorted(counts.items()))
    return (f"numbers of {split} samples differ: {listed}",)
