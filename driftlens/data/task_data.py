"""The samples of one task, opened, compared with its head and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from driftlens.access import Access
from driftlens.data.classes import require_same_classes
from driftlens.data.drawing import COUNT_KEYS, draw
from driftlens.data.pictures import Picture
from driftlens.data.samples import SampleSet, data_digest
from driftlens.data.sources import ImageView, Split, SplitView, TextView, data_sources
from driftlens.errors import DataError

if TYPE_CHECKING:
    from driftlens.spec import DataDefaults
    from driftlens.spec import TaskData as TaskEntry

Preprocess = Callable[[list[Any]], Any]
"""Pictures (or pairs of texts) of a batch -> the model's raw inputs, stacked."""


@dataclass(frozen=True)
class _Drawn:
    """A split and the positions drawn from it."""

    view: SplitView
    positions: tuple[int, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.view.ids[position] for position in self.positions)

    def labels(self, where: str) -> tuple[str, ...] | None:
        """Class name per drawn sample, or None where the split has no labels."""
        found = [self.view.label(position) for position in self.positions]
        labels = [label for label in found if label is not None]
        if not labels:
            return None
        if len(labels) < len(found):
            bare = self.ids[found.index(None)]
            raise DataError(
                f"{where}: sample {bare} has no label, others have", hint="Label all samples or none."
            )
        return tuple(labels)


@dataclass(frozen=True)
class TaskData:
    """The calibration, diagnosis and test samples of one task. `open_task_data` makes one.

    Attributes:
        task: the task's name.
        class_names: all classes, in the head's order where it names them; None for data without labels.
        notices: what a reader of the results must be told about the samples.
        overlap: how many diagnosis samples are also calibration samples; results are stamped unless it is 0.
    """

    task: str
    class_names: tuple[str, ...] | None
    notices: tuple[str, ...]
    overlap: int
    _sets: Mapping[Split, SampleSet]
    _views: Mapping[Split, SplitView]

    def calibration(self) -> SampleSet:
        """Samples to calibrate on."""
        return self._sets["calibration"]

    def diagnosis(self) -> SampleSet:
        """Samples on which drift is measured; drawn from the test split unless they have one of their own."""
        return self._sets["diagnosis"]

    def test(self) -> SampleSet:
        """Samples on which accuracy is measured; never one of the calibration samples."""
        return self._sets["test"]

    @property
    def has_pictures(self) -> bool:
        """Whether the samples are images."""
        return isinstance(self._views["diagnosis"], ImageView)

    def picture(self, split: Split, sample_id: str) -> Picture:
        """One sample's image as the source holds it, before any preprocessing.

        Raises:
            DataError: there is no such sample, or the task has no images.
        """
        view = self._views[split]
        if not isinstance(view, ImageView) or sample_id not in view.ids:
            raise DataError(f"task {self.task}: {view.origin} has no image {sample_id!r}")
        return view.image(view.ids.index(sample_id))


def open_task_data(
    task: str,
    entry: TaskEntry,
    defaults: DataDefaults,
    preprocess: Preprocess,
    *,
    head_classes: Sequence[str] | None = None,
    reads: Literal["image", "text"] = "image",
    access: Access = Access(),
) -> TaskData:
    """The task's samples, drawn, with labels as class names; images are read batch by batch, later.

    Args:
        task: the task's name.
        entry: its entry in the spec's `data` section.
        defaults: counts, seed and batch size that the entry doesn't set.
        preprocess: what turns a batch of pictures (or pairs of texts) into the model's raw inputs.
        head_classes: the names of the head's rows; None takes the data's own names.
        reads: what the model takes.
        access: what may be used, and on which device.

    Raises:
        DataError: something is missing or unreadable, fewer samples than asked for, or classes
            that differ from the head's.
        SpecError: the entry names Python code and `trust` is false.
    """
    source = data_sources[entry.kind]
    views = {split: source(entry, split, access) for split in _own_splits(entry)}
    views.setdefault("diagnosis", views["test"])
    _check_modality(task, views["test"], reads)
    class_names = _agreed_classes(task, views, head_classes)
    drawn = _draw_all(task, views, entry, defaults)
    sets = {
        split: _sample_set(task, split, part, class_names, preprocess, defaults.batch_size)
        for split, part in drawn.items()
    }
    overlap = _overlap(drawn)
    return TaskData(task, class_names, tuple(_notices(task, drawn, sets, overlap)), overlap, sets, views)


def _own_splits(entry: TaskEntry) -> list[Split]:
    has_diagnosis = getattr(entry, "diagnosis", None) is not None
    return ["calibration", "test", "diagnosis"] if has_diagnosis else ["calibration", "test"]


def _check_modality(task: str, view: SplitView, reads: Literal["image", "text"]) -> None:
    holds = "text" if isinstance(view, TextView) else "image"
    if holds != reads:
        raise DataError(
            f"task {task}: {view.origin} holds {holds} samples, but the model reads {reads}",
            hint="Text tasks (kind: jsonl) need a text model; image models need a source of images.",
        )


def _agreed_classes(
    task: str, views: Mapping[Split, SplitView], head_classes: Sequence[str] | None
) -> tuple[str, ...] | None:
    """The task's class names, after every split's own names were compared with them."""
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


def _draw_all(
    task: str, views: Mapping[Split, SplitView], entry: TaskEntry, defaults: DataDefaults
) -> dict[Split, _Drawn]:
    def drawn(split: Split, exclude_ids: Sequence[str] = ()) -> _Drawn:
        key = COUNT_KEYS[split]
        count = getattr(entry, key) or getattr(defaults, key)
        view = views[split]
        positions = draw(view, count, defaults.seed, task=task, split=split, exclude_ids=exclude_ids)
        return _Drawn(view, positions)

    calibration = drawn("calibration")
    # Accuracy is never measured on calibration samples, and diagnosis draws from the test samples unless
    # it has a split of its own: then overlap is the user's choice, and reported.
    is_shared = views["test"].origin == calibration.view.origin
    taken = calibration.ids if is_shared else ()
    is_of_test = views["diagnosis"] is views["test"]
    return {
        "calibration": calibration,
        "diagnosis": drawn("diagnosis", taken if is_of_test else ()),
        "test": drawn("test", taken),
    }


def _sample_set(
    task: str,
    split: Split,
    drawn: _Drawn,
    class_names: tuple[str, ...] | None,
    preprocess: Preprocess,
    batch_size: int,
) -> SampleSet:
    where = f"task {task}, {split} split {drawn.view.origin}"
    labels = drawn.labels(where)
    if labels is not None and class_names is not None:
        require_same_classes(labels, class_names, where=where, all_of_head=False)
    read = _reader(drawn.view)

    def load(positions: Sequence[int]) -> Any:
        return preprocess([read(drawn.positions[position]) for position in positions])

    view = drawn.view
    return SampleSet(
        task, split, drawn.ids, labels, load, batch_size, source=lambda: data_digest(view.ids, read)
    )


def _reader(view: SplitView) -> Callable[[int], Any]:
    if isinstance(view, TextView):
        return view.text
    assert isinstance(view, ImageView)
    return view.image


def _overlap(drawn: Mapping[Split, _Drawn]) -> int:
    calibration, diagnosis = drawn["calibration"], drawn["diagnosis"]
    if calibration.view.origin != diagnosis.view.origin:
        return 0  # Equal ids then mean different samples.
    return len(set(calibration.ids) & set(diagnosis.ids))


def _notices(
    task: str, drawn: Mapping[Split, _Drawn], sets: Mapping[Split, SampleSet], overlap: int
) -> list[str]:
    calibration, diagnosis, test = (drawn[split] for split in ("calibration", "diagnosis", "test"))
    notices = []
    if diagnosis.view.origin == calibration.view.origin:
        notices.append(
            f"{task}: calibration and diagnosis draw from the same samples, {calibration.view.origin}; "
            f"{overlap} of {len(diagnosis.ids)} diagnosis samples are also calibration samples"
        )
    if test.view.origin == calibration.view.origin:
        notices.append(
            f"{task}: calibration and test draw from the same samples, {calibration.view.origin}; "
            f"the {len(calibration.ids)} calibration samples are kept out of the test"
        )
    if isinstance(test.view, ImageView) and sets["test"].labels is None:
        notices.append(f"{task}: the test samples have no labels, so there is no accuracy")
    return notices
