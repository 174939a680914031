"""A function of the user's that yields images; it runs only when the user says that the code is trusted."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.data.sources import Split, SplitView, as_picture, class_name, data_sources, names_of, refused

if TYPE_CHECKING:
    from driftlens.spec.data import PythonData

DEBUG_HINT = "The traceback is shown with --debug."


@data_sources.register("python")
def open_python(entry: PythonData, split: Split, access: Access) -> SplitView:
    """What `package.module:function` returns for a split: (image, label) pairs, with a length and an index.

    A data set of torchvision is one. Images are PIL images or uint8 arrays. Labels are class names, numbers that
    index the attribute `class_names` or `classes` of what was returned, or None. Ids are positions.
    """
    function, where = access.function(entry.target, "data source"), f"{entry.target}({split!r})"
    with refused(f"{where} failed", DEBUG_HINT):
        items = function(split)
    names = _class_names(items, where)
    return SplitView(
        origin=where,
        ids=tuple(str(position) for position in range(_length(items, where))),
        class_names=names,
        label=lambda position: _label(_item(items, position, where)[1], names, f"{where}[{position}]"),
        read=lambda position: as_picture(_item(items, position, where)[0], f"{where}[{position}]"),
    )


def _length(items: Any, where: str) -> int:
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise DataError(
            f"{where} returned {type(items).__name__}, expected something with a length and an index",
            hint="Return a list of (image, label) pairs, or a map-style data set.",
        )
    if not len(items):
        raise DataError(f"{where} returned no samples", hint="Return at least one (image, label) pair.")
    return len(items)


def _class_names(items: Any, where: str) -> tuple[str, ...] | None:
    names = names_of(items)
    if not isinstance(names, Iterable):  # a method or a number of that name says nothing about classes
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: the class names are {names!r}", hint="Make them a list of text.")
    return tuple(names)


def _item(items: Any, position: int, where: str) -> tuple[Any, Any]:
    with refused(f"{where}[{position}] failed", DEBUG_HINT):
        item = items[position]
    if not isinstance(item, tuple) or len(item) != 2:
        raise DataError(
            f"{where}[{position}] is {type(item).__name__}, expected a pair (image, label)",
            hint="Without labels, return (image, None).",
        )
    return item


def _label(label: Any, names: tuple[str, ...] | None, where: str) -> str | None:
    if label is None or isinstance(label, str):
        return label
    if not hasattr(label, "__index__") or isinstance(label, bool):
        raise DataError(
            f"{where}: the label {label!r} is neither text nor a whole number", hint="Return class names."
        )
    return class_name(operator.index(label), names, where)
