"""The samples of one task: opened, compared with its head, drawn, and read as images or as questions and answers."""

from __future__ import annotations

import functools
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from driftlens.data.rows import related_text_columns
from driftlens.data.samples import COUNT_KEYS, SampleSet, SampleTexts, Shown, data_digest, sample_positions
from driftlens.data.sources import RelatedTexts, Split, SplitView, open_split
from driftlens.models.texts import Form, ImageTextProcessor, ImageTextSample, TextProcessor, TextSample
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError, SpecError, add_error_context, shorten_list

if TYPE_CHECKING:
    from driftlens.config.data import DataDefaults, TaskData as TaskEntry, TextEntry

# Images (or pairs of texts) of a batch -> the model's raw inputs, stacked.
Preprocess = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _PassageCorpus:
    """The passages that retrieval queries search, each once, and their positions by the names that queries use.

    With `is_whole` every query searches all of them; otherwise each has its own.
    """

    texts: tuple[str, ...]
    keys: Mapping[str, tuple[int, ...]]
    is_whole: bool = True

    def candidates(self, row: RelatedTexts) -> list[int]:
        """List the positions of the passages that a query ranks, its positives last."""
        # Positives come last, so that a tie counts as wrong: a model that scores all alike gets nothing right.
        if self.is_whole:
            return list(range(len(self.texts)))
        return [place for name in (*row.negative, *row.positive) for place in self.keys.get(name, ())]

    def positives(self, row: RelatedTexts) -> frozenset[int]:
        """Return the positions of the positive passages of a query."""
        return frozenset(place for name in row.positive for place in self.keys.get(name, ()))


@dataclass(frozen=True)
class SimilarityTask:
    """The texts that test samples are compared with: a second text each or, for retrieval, `passages`."""

    of: Callable[[int], RelatedTexts]
    reader: TextProcessor | None
    passages: _PassageCorpus | None = None

    @property
    def similarity(self) -> str:
        """The name of the similarity function of embeddings, as the model's folder defines it."""
        prompts = None if self.reader is None else self.reader.prompts
        return "cosine" if prompts is None else prompts.similarity

    def select(self, chosen: Sequence[int]) -> SimilarityTask:
        """Select samples by position."""
        return replace(self, of=lambda position: self.of(chosen[position]))


@dataclass(frozen=True)
class TaskData:
    """The calibration, diagnosis and test samples of one task, made by `open_task_data`.

    Attributes:
        class_names: all classes, in the head's order if it names them.
        diagnosis: samples on which drift is measured; from the test split unless they have their own.
        test: samples on which scores are measured; never calibration samples.
    """

    task: str
    class_names: tuple[str, ...] | None
    notices: tuple[str, ...]
    calibration: SampleSet
    diagnosis: SampleSet
    test: SampleSet
    origins: Mapping[Split, str]

    def has_shared_source(self, split: Split) -> bool:
        """Return True if a split and calibration read the same data, so that equal ids are the same samples."""
        return self.origins[split] == self.origins["calibration"]

    def class_answers(self) -> dict[str, str]:
        """Map class names, or the labels that occur, to their formatted answers in text tasks."""
        sets = (self.test, self.diagnosis, self.calibration)
        labels = {label for samples in sets for label in samples.labels or ()}
        texts, names = self.test.texts, self.class_names or sorted(labels)
        return {} if texts is None else {name: texts.format_answer(name) for name in names}


def open_task_data(
    task: str,
    entry: TaskEntry,
    defaults: DataDefaults,
    preprocess: Preprocess,
    *,
    reads: str | None,
    reader: TextProcessor | None = None,
    head_classes: Sequence[str] | None = None,
    access: Permissions = Permissions(),
) -> TaskData:
    """Open a task's data, check its class names, and sample its splits; images are read later in batches.

    Args:
        task: the task's name.
        entry: the spec's entry.
        defaults: counts, seed and batch size.
        preprocess: images (or pairs of texts) of a batch -> the model's raw inputs.
        reads: the model's modality, if known.
        reader: the tokenizer and its rules, which replace `preprocess` for texts.
        head_classes: names of the head's rows; None takes the data's own.
        access: permissions.
    """
    from driftlens.config.data import TextEntry

    # Kinds from other packages have no rules for texts.
    rules = entry if isinstance(entry, TextEntry) else TextEntry(kind=entry.kind)
    has_own = getattr(entry, "diagnosis", None) is not None
    stated: tuple[Split, ...] = ("calibration", "test", "diagnosis") if has_own else ("calibration", "test")
    with add_error_context(f"the data of task {task}"):
        views = {split: open_split(entry, split, access) for split in stated}
    views.setdefault("diagnosis", views["test"])
    origin, holds = views["test"].origin, views["test"].holds
    if reads is not None and holds != reads:
        raise DataError(
            f"task {task}: {origin} (kind {entry.kind}) has {holds} samples, but the model reads {reads}",
            hint="For texts use kind: jsonl, or `input:` in a table or hf entry; for images a source of images.",
        )
    class_names = _common_class_names(task, views, head_classes)

    def draw_samples(split: Split, taken: Sequence[str] = ()) -> SampleSet:
        view, count = views[split], getattr(entry, COUNT_KEYS[split]) or getattr(defaults, COUNT_KEYS[split])
        positions = sample_positions(view, count, defaults.seed, task=task, split=split, exclude_ids=taken)
        samples = build_sample_set(task, split, view, positions, class_names, preprocess, defaults.batch_size)
        if holds != "text":
            return samples
        rows = [view.read(position) for position in positions]
        if split != "test":
            return to_text_samples(samples, rows, rules, reader)
        compared, reads_by = _similarity_task(task, rules, view, positions, reader, access), reader
        if reader is not None and reader.prompts and compared is not None and compared.passages is not None:
            reads_by = replace(reader, lead=reader.prompts.find_by_name("query"))
        return to_text_samples(samples, rows, rules, reads_by, compared)

    requested_views = defaults.views if entry.views is None else entry.views
    calibration = replace(draw_samples("calibration"), views=requested_views)
    # Accuracy is never measured on calibration samples, and diagnosis draws from the test samples unless
    # it has a split of its own: then overlap is the user's choice, and reported.
    taken = calibration.ids if origin == views["calibration"].origin else ()
    sets: dict[Split, SampleSet] = {
        "calibration": calibration,
        "diagnosis": draw_samples("diagnosis", taken if views["diagnosis"] is views["test"] else ()),
        "test": draw_samples("test", taken),
    }
    origins = {split: view.origin for split, view in views.items()}
    return TaskData(task, class_names, tuple(_task_notices(task, class_names, views, sets)), **sets, origins=origins)


def _common_class_names(
    task: str, views: Mapping[Split, SplitView], head_classes: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return the task's class names after checking that head and splits agree on them."""
    # The test split comes first: its message also lists classes that only the head has.
    order: tuple[Split, ...] = ("test", "calibration", "diagnosis")
    named = {split: names for split in order if (names := views[split].class_names) is not None}
    agreed = tuple(head_classes) if head_classes is not None else next(iter(named.values()), None)
    if agreed is None:
        return None
    for split, names in named.items():
        where = f"task {task}, {split} split {views[split].origin}"
        # A head may have more classes than its data.
        is_subset = {*names} <= {*agreed}
        require_same_classes(names, agreed, where=where, all_of_head=split == "test" and not is_subset)
    return agreed


def build_sample_set(
    task: str,
    split: Split,
    view: SplitView,
    drawn: Sequence[int],
    class_names: tuple[str, ...] | None,
    preprocess: Preprocess,
    batch_size: int,
) -> SampleSet:
    """Build the sample set of a split's chosen positions; refuse labels that are not class names."""
    where = f"task {task}, {split} split {view.origin}"
    ids = tuple(view.ids[position] for position in drawn)
    drawn_labels = [view.label(position) for position in drawn]
    labels = tuple(label for label in drawn_labels if label is not None) or None
    if labels is not None and len(labels) < len(ids):
        raise DataError(
            f"{where}: sample {ids[drawn_labels.index(None)]} has no label, others do",
            hint="Label all samples of the split, or none.",
        )
    if labels is not None and class_names is not None:
        require_same_classes(labels, class_names, where=where, all_of_head=False)

    def read_sample(position: int) -> Any:
        return view.read(drawn[position])

    def load_batch(positions: Sequence[int]) -> Any:
        return preprocess([read_sample(position) for position in positions])

    return SampleSet(
        *(task, split, ids, labels, load_batch, batch_size),
        source=functools.partial(data_digest, view.ids, view.read),
        picture=read_sample if view.holds == "image" else None,
        preprocess=preprocess,
    )


def to_text_samples(
    samples: SampleSet,
    rows: Sequence[TextSample],
    entry: TextEntry,
    reader: TextProcessor | None,
    compared: SimilarityTask | None = None,
) -> SampleSet:
    """Turn samples into texts, tokenized by `reader` or the model's own code; only calibration may show answers."""
    task, split = samples.task, samples.split
    have = [bool(row.target) for row in rows]
    if any(have) and not all(have):
        raise DataError(
            f"task {task}: {split} sample {samples.ids[have.index(False)]} has no target, others do",
            hint="Give all rows a target, or none.",
        )
    form = None if reader is None else reader.form
    reads_images = isinstance(reader, ImageTextProcessor)
    if reader is not None and any(isinstance(row, ImageTextSample) != reads_images for row in rows):
        content, reads = ("no images", "images and texts") if reads_images else ("images", "texts alone")
        raise DataError(
            f"task {task}: {split} samples have {content}, but the model reads {reads}",
            hint="For images with texts use the loader hf-vlm and `image: COLUMN`.",
        )
    if reader is not None and entry.max_length is not None:
        reader = reader.with_max_length(entry.max_length, f"data.{task}.max_length")
    if reader is not None and entry.prompt is not None:
        # The task's prompt replaces the model's.
        reader = replace(reader, lead="")
    if reader is not None and entry.chat:
        questions = reader.chat_prompts(rows)
        rows = [row._replace(input=question) for question, row in zip(questions, rows, strict=True)]
    answer = entry.answer or (" {target}" if form == "decoder" and not entry.chat else "{target}")
    shows = split == "calibration" and not related_text_columns(entry)
    shown = _shown_answers(task, entry, form, any(have)) if shows else "none"
    texts = SampleTexts(rows.__getitem__, reader, answer, shown, compared)
    rows = [row._replace(target=texts.format_answer(row.target) if row.target else "") for row in rows]
    shown_rows = [row if shown == "target" else row._replace(target="") for row in rows]
    on_answers = (f"{task}: calibration uses the expert's greedy answers",) if shown == "expert" else ()
    read: Any = reader or samples.preprocess
    return replace(
        samples,
        load=lambda positions: read([shown_rows[position] for position in positions]),
        preprocess=read,
        notices=samples.notices + on_answers + _truncation_notice(samples, shown_rows, entry, reader),
        texts=replace(texts, read=rows.__getitem__),
    )


def _truncation_notice(
    samples: SampleSet, texts: Sequence[TextSample], entry: TextEntry, reader: TextProcessor | None
) -> tuple[str, ...]:
    """Return a notice of how many samples exceed the token limit; samples with images are not counted."""
    if reader is None:
        return ()
    # Counting the tokens of an image means decoding it.
    if isinstance(reader, ImageTextProcessor):
        reader(texts[:1])
        return ()
    long = [place for place, length in enumerate(reader.row_lengths(texts)) if length > reader.max_length]
    if not long:
        return ()
    task = samples.task
    count = f"{len(long)} of {len(texts)} {samples.split} samples are longer than {reader.max_length} tokens"
    if entry.too_long == "refuse":
        raise DataError(
            f"task {task}: {count}, such as {samples.ids[long[0]]}",
            hint=f"Remove them, set data.{task}.too_long: cut, or raise max_length.",
        )
    return (f"{task}: {count}; {reader.truncation_rule}",)


def _shown_answers(task: str, entry: TextEntry, form: Form | None, has_targets: bool) -> Shown:
    """Return which answers calibration shows the model: the data's, the expert's, or none."""
    if form == "encoder":
        if entry.decoder_inputs is not None:
            raise SpecError(f"data.{task}.decoder_inputs: the model has no decoder", hint="Remove it.")
        return "none"
    if entry.decoder_inputs == "target" and not has_targets:
        raise DataError(
            f"task {task}: decoder_inputs is target, but calibration has no targets",
            hint=f"Set data.{task}.target, or decoder_inputs: expert.",
        )
    # Without answers a decoder still reads its question; the decoder of an encoder-decoder would read nothing.
    unlabelled: Shown = "expert" if form == "encoder-decoder" else "none"
    return entry.decoder_inputs or ("target" if has_targets else unlabelled)


def _similarity_task(
    task: str,
    entry: TextEntry,
    view: SplitView,
    drawn: Sequence[int],
    reader: TextProcessor | None,
    access: Permissions,
) -> SimilarityTask | None:
    """Build the similarity or retrieval task of the test samples; None if the entry defines none."""
    if view.related is None or not related_text_columns(entry):
        return None
    rows = [view.related(position) for position in drawn]
    if reader is not None:
        if entry.max_length is not None:
            reader = reader.with_max_length(entry.max_length, f"data.{task}.max_length")
        # A prompt in the spec replaces that of the model's folder.
        if entry.prompt is not None or (entry.corpus is not None and entry.corpus.prompt is not None):
            reader = replace(reader, lead="")
        elif reader.prompts is not None and entry.pair is None:
            # Names that sentence-transformers uses for the prompt of passages.
            reader = replace(reader, lead=reader.prompts.find_by_name("document", "passage", "corpus"))
    if entry.pair is None:
        passages = _read_passages(entry, rows, access)
        if lost := [number for number, row in enumerate(rows) if not passages.positives(row)]:
            raise DataError(
                f"task {task}: test: {len(lost)} of {len(rows)} queries have no positive in the corpus, such as "
                f"sample {view.ids[drawn[lost[0]]]}, whose {entry.positive!r} is "
                f"{', '.join(rows[lost[0]].positive)[:80]!r}",
                hint="Add these positives to the corpus (as texts, or in its `key` column), or remove the queries.",
            )
        return SimilarityTask(rows.__getitem__, reader, passages)
    for position in drawn:
        if math.isnan(parse_number(target := view.read(position).target)):
            raise DataError(
                f"task {task}: test sample {view.ids[position]} has the similarity {target!r}, expected a number",
                hint="Set `target` to the column of numbers.",
            )
    return SimilarityTask(rows.__getitem__, reader)


def parse_number(text: str) -> float:
    """Parse a finite number; return NaN for other text."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _read_passages(entry: TextEntry, rows: Sequence[RelatedTexts], access: Permissions) -> _PassageCorpus:
    """Read the passages of an entry's corpus; without a corpus, collect the passages that its queries list."""
    corpus = entry.corpus
    if corpus is None:
        named = dict.fromkeys(name for row in rows for name in (*row.positive, *row.negative))
        return _PassageCorpus(
            tuple(named), {name: (row,) for row, name in enumerate(named)}, is_whole=entry.negative is None
        )
    fields: dict[str, Any] = dict.fromkeys(("pair", "positive", "negative", "corpus"))
    fields |= {"input": corpus.text, "prompt": corpus.prompt, "target": corpus.key}
    fields |= {"test": corpus.file, "file": None} if corpus.file else {"test": corpus.split}
    # Kinds of data have different fields; the corpus is read as a test split of the same kind.
    own_fields = {name: value for name, value in fields.items() if name in type(entry).model_fields}
    view = open_split(entry.model_copy(update=own_fields), "test", access)
    texts: dict[str, int] = {}
    keys: dict[str, dict[int, None]] = {}
    for position in range(len(view)):
        passage = view.read(position)
        place = texts.setdefault(passage.input, len(texts))
        keys.setdefault(passage.target if corpus.key else passage.input, {})[place] = None
    return _PassageCorpus(tuple(texts), {key: tuple(places) for key, places in keys.items()})


def _task_notices(
    task: str,
    class_names: Sequence[str] | None,
    views: Mapping[Split, SplitView],
    sets: Mapping[Split, SampleSet],
) -> Iterator[str]:
    unused = [name for name in class_names or () if name not in (views["test"].class_names or class_names or ())]
    if class_names and unused:
        yield (
            f"{task}: the head has {len(class_names)} classes, of which the test data lacks {len(unused)} "
            f"({shorten_list([*map(repr, unused)], 3)}); scores compare all classes of the head"
        )
    origin, num_calibration = views["calibration"].origin, len(sets["calibration"])
    for samples in sets.values():
        yield from samples.notices
    yield from dict.fromkeys(f"{task}: {notice}" for view in views.values() for notice in view.notices)
    if views["diagnosis"].origin == origin:
        # Equal ids mean equal samples only if the origins are equal.
        overlap = len({*sets["calibration"].ids} & {*sets["diagnosis"].ids})
        # Reports find this notice in saved runs by its words.
        yield (
            f"{task}: calibration and diagnosis draw from the same samples, {origin}; "
            f"{overlap} of {len(sets['diagnosis'])} diagnosis samples are in both"
        )
    if views["test"].origin == origin:
        yield (
            f"{task}: calibration and test samples both come from {origin}; "
            f"the {num_calibration} calibration samples are excluded from the test"
        )
    texts = sets["test"].texts
    beside = None if texts is None else texts.compared
    if sets["test"].labels is None and beside is None and (texts is None or not texts.read(0).target):
        lacking = "labels, so accuracy is not measured" if texts is None else "targets, so answers are not scored"
        yield f"{task}: test samples have no {lacking}"


def require_same_classes(data: Iterable[str], head: Iterable[str], *, where: str, all_of_head: bool = True) -> None:
    """Raise an error if the class names of data and head differ; their order does not matter.

    Args:
        data: classes of the data.
        head: classes of the head.
        where: the place in messages.
        all_of_head: True if the data must have every class of the head.
    """
    only_data = sorted(set(data) - set(head))
    only_head = sorted(set(head) - set(data))
    if not only_data and not (only_head and all_of_head):
        return
    lists = {"data": only_data, "head": only_head if all_of_head else []}
    parts = [f"; only in {owner}: {shorten_list([*map(repr, names)], 10)}" for owner, names in lists.items() if names]
    raise DataError(
        f"{where}: the classes of data and head differ{''.join(parts)}",
        hint="Use the class names of `heads.<task>.classes` in the data. If sub-folders of images "
        "are not classes, set `unlabelled: [calibration]`.",
    )


def normalize_name(name: str) -> str:
    """Normalize a name for comparison: no case, spaces or punctuation, and one Unicode form."""
    # A name of punctuation alone would become empty, and equal to all such names.
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(character for character in folded if character.isalnum()) or folded
