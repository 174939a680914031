"""The samples of one task, opened, compared with its head and drawn."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from driftlens.data.related import comparison
from driftlens.data.rows import as_texts
from driftlens.data.samples import COUNT_KEYS, SampleSet, data_digest, draw
from driftlens.data.sources import Picture, Split, SplitView, open_split
from driftlens.models.texts import TextReader
from driftlens.utils.distributed import Access
from driftlens.utils.errors import DataError, concerning, some_of

if TYPE_CHECKING:
    from driftlens.config.data import DataDefaults
    from driftlens.config.data import TaskData as TaskEntry

# Images (or pairs of texts) of a batch -> the model's raw inputs, stacked.
Preprocess = Callable[[list[Any]], Any]
# Names that a message lists of a long difference.
SHOWN = 10


@dataclass(frozen=True)
class TaskData:
    """The calibration, diagnosis and test samples of one task. `open_task_data` makes one.

    Attributes:
        class_names: all classes, in the head's order if it names them; None without labels.
        notices: for readers of the results.
        overlap: number of diagnosis samples that are also calibration samples; results are marked unless it is 0.
        diagnosis: samples on which drift is measured; from the test split unless they have their own.
        test: samples on which scores are measured; never calibration samples.
    """

    task: str
    class_names: tuple[str, ...] | None
    notices: tuple[str, ...]
    overlap: int
    calibration: SampleSet
    diagnosis: SampleSet
    test: SampleSet
    _views: Mapping[Split, SplitView]

    @property
    def has_pictures(self) -> bool:
        """True if the samples are images."""
        return self._views["diagnosis"].holds == "image"

    def shares(self, split: Split) -> bool:
        """Return True if a split and the calibration samples have one origin: equal ids are the same samples."""
        return self._views[split].origin == self._views["calibration"].origin

    def answers(self) -> dict[str, str]:
        """Map class names to their answers in text tasks; without classes, the labels that occur."""
        labels = {
            label
            for samples in (self.test, self.diagnosis, self.calibration)
            for label in samples.labels or ()
        }
        texts = self.test.texts
        return (
            {}
            if texts is None
            else {name: texts.answered(name) for name in self.class_names or sorted(labels)}
        )

    def picture(self, split: Split, sample_id: str) -> Picture:
        """Return a sample's original image."""
        view = self._views[split]
        if view.holds != "image" or sample_id not in view.ids:
            raise DataError(f"task {self.task}: {view.origin} has no image {sample_id!r}")
        return view.read(view.ids.index(sample_id))


def open_task_data(
    task: str,
    entry: TaskEntry,
    defaults: DataDefaults,
    preprocess: Preprocess,
    *,
    reads: str | None,
    reader: TextReader | None = None,
    head_classes: Sequence[str] | None = None,
    access: Access = Access(),
) -> TaskData:
    """Open and sample a task's data, with labels as class names. Images are read later, batch by batch.

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
    stated: list[Split] = ["calibration", "test"]
    if getattr(entry, "diagnosis", None) is not None:
        stated.append("diagnosis")
    with concerning(f"the data of task {task}"):
        views = {split: open_split(entry, split, access) for split in stated}
    views.setdefault("diagnosis", views["test"])
    holds = views["test"].holds
    if reads is not None and holds != reads:
        raise DataError(
            f"task {task}: {views['test'].origin} (kind {entry.kind}) has {holds} samples, but the model reads "
            f"{reads}",
            hint="For texts use kind: jsonl, or `input:` in a table or hf entry; for images a "
            "source of images.",
        )
    class_names = _agreed_classes(task, views, head_classes)

    def drawn(split: Split, taken: Sequence[str] = ()) -> SampleSet:
        view, count = views[split], getattr(entry, COUNT_KEYS[split]) or getattr(defaults, COUNT_KEYS[split])
        positions = draw(view, count, defaults.seed, task=task, split=split, exclude_ids=taken)
        samples = sample_set(task, split, view, positions, class_names, preprocess, defaults.batch_size)
        if holds != "text":
            return samples
        read_by, compared = reader, None
        rows = [view.read(position) for position in positions]
        if split == "test":
            compared = comparison(task, rules, view, positions, reader, access)
            if (
                compared is not None
                and compared.passages is not None
                and reader is not None
                and reader.prompts
            ):
                read_by = replace(reader, lead=reader.prompts.before("query"))
        return as_texts(samples, rows, rules, read_by, preprocess, compared)

    requested_views = defaults.views if entry.views is None else entry.views
    calibration = replace(drawn("calibration"), views=requested_views)
    # Accuracy is never measured on calibration samples, and diagnosis draws from the test samples unless
    # it has a split of its own: then overlap is the user's choice, and reported.
    taken = calibration.ids if views["test"].origin == views["calibration"].origin else ()
    sets: dict[Split, SampleSet] = {
        "calibration": calibration,
        "diagnosis": drawn("diagnosis", taken if views["diagnosis"] is views["test"] else ()),
        "test": drawn("test", taken),
    }
    # Equal ids mean equal samples only if the origins are equal.
    shares = views["diagnosis"].origin == views["calibration"].origin
    overlap = len(set(calibration.ids) & set(sets["diagnosis"].ids)) if shares else 0
    return TaskData(
        task, class_names, tuple(_notices(task, views, sets, overlap)), overlap, **sets, _views=views
    )


def _agreed_classes(
    task: str, views: Mapping[Split, SplitView], head_classes: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return the task's class names, after every split's own names were compared with them."""
    # The test split comes first: only there must every class appear, so its message is the fullest.
    order: tuple[Split, ...] = ("test", "calibration", "diagnosis")
    named = {split: names for split in order if (names := views[split].class_names) is not None}
    agreed = tuple(head_classes) if head_classes is not None else next(iter(named.values()), None)
    if agreed is None:
        return None
    for split, names in named.items():
        where = f"task {task}, {split} split {views[split].origin}"
        require_same_classes(names, agreed, where=where, all_of_head=split == "test")
    return agreed


def sample_set(
    task: str,
    split: Split,
    view: SplitView,
    drawn: Sequence[int],
    class_names: tuple[str, ...] | None,
    preprocess: Preprocess,
    batch_size: int,
) -> SampleSet:
    """Return the samples at some positions of a split, with labels compared to the classes.

    Args:
        task: the task's name.
        split: the split.
        view: its samples.
        drawn: positions.
        class_names: known classes.
        preprocess: images of a batch -> raw inputs.
        batch_size: samples per batch.
    """
    where = f"task {task}, {split} split {view.origin}"
    ids = tuple(view.ids[position] for position in drawn)
    drawn_labels = [view.label(position) for position in drawn]
    labels = tuple(label for label in drawn_labels if label is not None) or None
    if labels is not None and len(labels) < len(ids):
        raise DataError(f"{where}: sample {ids[drawn_labels.index(None)]} has no label, others do")
    if labels is not None and class_names is not None:
        require_same_classes(labels, class_names, where=where, all_of_head=False)

    def read(position: int) -> Any:
        return view.read(drawn[position])

    def load(positions: Sequence[int]) -> Any:
        return preprocess([read(position) for position in positions])

    digest = functools.partial(data_digest, view.ids, view.read)
    samples = SampleSet(task, split, ids, labels, load, batch_size, source=digest)
    return replace(samples, picture=read, preprocess=preprocess) if view.holds == "image" else samples


def _notices(
    task: str, views: Mapping[Split, SplitView], sets: Mapping[Split, SampleSet], overlap: int
) -> Iterator[str]:
    origin, num_calibration = views["calibration"].origin, len(sets["calibration"])
    for samples in sets.values():
        yield from samples.notices
    yield from dict.fromkeys(f"{task}: {notice}" for view in views.values() for notice in view.notices)
    if views["diagnosis"].origin == origin:
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
        lacking = (
            "labels, so accuracy is not measured" if texts is None else "targets, so answers are not scored"
        )
        yield f"{task}: test samples have no {lacking}"


def require_same_classes(
    data: Iterable[str], head: Iterable[str], *, where: str, all_of_head: bool = True
) -> None:
    """Refuse data whose classes differ from the head's, in any order.

    Args:
        data: classes of the data.
        head: classes of the head.
        where: the place in messages.
        all_of_head: True if the data must have every class; only the test split must.
    """
    only_data = sorted(set(data) - set(head))
    only_head = sorted(set(head) - set(data))
    if not only_data and not (only_head and all_of_head):
        return
    parts = ["the classes of data and head differ"]
    if only_data:
        parts.append(f"only in data: {_listed(only_data)}")
    if only_head and all_of_head:
        parts.append(f"only in head: {_listed(only_head)}")
    raise DataError(
        f"{where}: {'; '.join(parts)}",
        hint="Names in the data and in `heads.<task>.classes` must be equal. If sub-folders of images "
        "are not classes, set `unlabelled: [calibration]`.",
        only_in_data=only_data,
        only_in_head=only_head,
    )


def plain_form(name: str) -> str:
    """Normalize a name: no case, spaces or punctuation, accents in one encoding."""
    # A name of punctuation alone would become empty, and equal to all such names.
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(character for character in folded if character.isalnum()) or folded


def _listed(names: Sequence[str]) -> str:
    return some_of([*map(repr, names)], SHOWN)
