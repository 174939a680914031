"""What every kind of data source offers: a split as a list of samples that are read one at a time.

A source is a function registered under the `kind` it serves. It lists the samples of one split without
reading their contents; images are read when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from driftlens.access import Access
from driftlens.data.pictures import Picture
from driftlens.registry import Registry

Split: TypeAlias = Literal["calibration", "diagnosis", "test"]


@dataclass(frozen=True)
class SplitView:
    """The samples of one split, in a fixed order.

    Attributes:
        origin: where they lie, for messages; the same origin means the same samples under the same ids.
        ids: one identifier per sample (see contract: path, `test/17`, row index, line number).
        class_names: the classes as the source names them; None when it has no labels or doesn't name them.
        label: position -> class name, or None where the sample has no label.
    """

    origin: str
    ids: tuple[str, ...]
    class_names: tuple[str, ...] | None
    label: Callable[[int], str | None]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ImageView(SplitView):
    """Images; `image(position)` reads one."""

    image: Callable[[int], Picture]


@dataclass(frozen=True)
class TextView(SplitView):
    """Pairs of texts; `text(position)` gives (input, target)."""

    text: Callable[[int], tuple[str, str]]


DataSource = Callable[[Any, Split, Access], SplitView]
"""(the task's entry in the spec, split, access) -> the split's samples."""

data_sources: Registry[DataSource] = Registry("data source", "driftlens.data")
