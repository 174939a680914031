"""The rows of a published task's head by the names that somebody's data gives its classes."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.base.errors import DataError
from driftlens.data.task_data import plain_form, require_same_classes
from driftlens.spec.published import PublishedTask


def rows_of(task: PublishedTask, named: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in label order, by the data's own names.

    Those may be the words of the prompts or the data set's own labels, in any case and with any spaces or punctuation,
    or the numbers of the labels. None, for data that names none, gives the words of the prompts.

    Raises:
        DataError: the data has other classes.
    """
    if named is None:
        return task.classes
    theirs = {str(int(name)) if name.isdecimal() else plain_form(name): name for name in named}
    numbers = tuple(map(str, range(len(task.classes))))
    if len(theirs) == len(named) == len(task.classes):
        for spelt in (task.classes, task.labels, numbers):
            if theirs.keys() == {plain_form(name) for name in spelt}:
                return tuple(theirs[plain_form(name)] for name in spelt)
    require_same_classes(named, task.classes, where=f"the suite's {task.title}")
    raise DataError(f"the suite's {task.title}: class names occur more than once")
