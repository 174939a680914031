"""Checkpoints under the skeleton's key names, whatever their authors prefixed or left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.refusals import family_of_keys
from driftlens.checkpoints.sources import Composed, StateSource, TensorHeader, renamed, require_key


class Layout(Protocol):
    """How checkpoints of one architecture name its parameters.

    Every method raises `IncompatibleModelsError` where a checkpoint is of another architecture.
    """

    def key_map(
        self, headers: Mapping[str, TensorHeader], wanted: Collection[str], name: str
    ) -> dict[str, str]:
        """The skeleton's key of each tensor -> its key in the checkpoint called `name`.

        What belongs to no layer is left out; what nobody knows is kept, so that comparing keys reveals it.
        """
        ...

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """The checkpoint under the skeleton's key names; `fallback` may give what experts are saved without."""
        ...

    def wrapper(self, headers: Collection[str], name: str) -> str:
        """What stands before the library's own names in a checkpoint, such as `module.`."""
        ...

    def beside_tower(self, keys: Collection[str], name: str) -> dict[str, str]:
        """What a whole model holds beside what is taken apart, and no layer reads: key without the wrapper -> key."""
        ...


_WRAPPERS = ("", "module.", "model.", "_orig_mod.")
"""What training code puts before the names of a whole model."""
TEXT_SIDE = ("text_model.", "logit_scale", "logit_bias")
"""How models of images and texts begin what is of their texts, where the image tower is taken apart as it runs."""


_ROWS = re.compile(r"(?P<whole>.+)\[(?P<start>\d+):(?P<stop>\d+)\]")
"""How rows of a tensor are called that are a tensor of their own."""


def whole(key: str) -> str:
    """The tensor that a key names, or that it names rows of."""
    rows = _ROWS.fullmatch(key)
    return key if rows is None else rows["whole"]


class Parted:
    """A checkpoint in which rows of some tensors are tensors of their own: queries, keys and values that files fuse."""

    def __init__(self, source: StateSource, parts: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self.name, self.whole = source.name, source
        self._places: dict[str, tuple[str, int]] = {}
        self.headers: dict[str, TensorHeader] = {}
        for key, header in source.headers.items():
            for start, stop in parts.get(key, ()):
                part = f"{key}[{start}:{stop}]"
                self.headers[part] = TensorHeader((stop - start, *header.shape[1:]), header.dtype)
                self._places[part] = key, start
            if key not in parts:
                self.headers[key] = header

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of it."""
        require_key(self, key)
        stored, first = self._places.get(key, (key, 0))
        if stored == key:
            return self.whole.read(key, rows)
        start, stop = rows or (0, self.headers[key].shape[0])
        return self.whole.read(stored, (first + start, first + stop))


@dataclass(frozen=True)
class Spellings:
    """Checkpoints that hold a whole model under one of several spellings, as versions of a library wrote them.

    Attributes:
        names: per spelling, the skeleton's key -> its name in the file, or `NAME[START:STOP]` of rows of what has one.
        left_out: beginnings of names that are no part of the model: classifiers, poolers that nobody reads.
        ignored: patterns of names that the library itself passes over.
    """

    names: Sequence[Mapping[str, str]]
    left_out: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def parted(self, source: StateSource) -> StateSource:
        """The checkpoint, in parts where it fuses what the model in memory has apart."""
        named = {name for names in self.names for name in names.values() if name.endswith("]")}
        parts: dict[str, list[tuple[int, int]]] = {}
        for rows in (_ROWS.fullmatch(wrapper + name) for wrapper in _WRAPPERS for name in named):
            if rows is not None and rows["whole"] in source.headers:
                parts.setdefault(rows["whole"], []).append((int(rows["start"]), int(rows["stop"])))
        return Parted(source, {key: sorted(rows) for key, rows in parts.items()}) if parts else source

    def key_map(
        self, headers: Mapping[str, TensorHeader], wanted: Collection[str], name: str
    ) -> dict[str, str]:
        """See `Layout`; of the spellings, the one in which most of the model is found."""
        stored, wrapper = self._best(headers)
        used, beside = set(stored.values()), tuple(wrapper + part for part in self.left_out)
        unknown = {
            key: key
            for key, header in headers.items()
            if key not in used
            and not key.startswith(beside)
            and header.dtype.is_floating_point
            and not any(re.search(pattern, key) for pattern in self.ignored)
        }
        return stored | unknown

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """See `Layout`; what is missing is missing, but of another family nearly all is."""
        source = self.parted(source)
        stored = self.key_map(source.headers, wanted, source.name)
        count = sum(key in stored for key in wanted)
        if 2 * count < len(wanted) and (family := family_of_keys(source.headers)):
            raise IncompatibleModelsError(
                f"{source.name} holds {count} of the {len(wanted)} tensors that are wanted; "
                f"it looks like {family.what} (key {family.key!r})",
                hint=family.remedy,
                loader=family.loader,
            )
        return renamed(source, stored)

    def wrapper(self, headers: Collection[str], name: str) -> str:
        """See `Layout`."""
        return self._best(headers)[1]

    def beside_tower(self, keys: Collection[str], name: str) -> dict[str, str]:
        """See `Layout`."""
        wrapper = self.wrapper(keys, name)
        named = {key.removeprefix(wrapper): key for key in keys if key.startswith(wrapper)}
        beside = (*TEXT_SIDE, *self.left_out)
        return {key: stored for key, stored in named.items() if key.startswith(beside)}

    def _best(self, headers: Collection[str]) -> tuple[dict[str, str], str]:
        """The skeleton's keys that are found, and what stands before the names in the file."""
        tried = (
            ({key: wrapper + stored for key, stored in names.items() if wrapper + stored in headers}, wrapper)
            for wrapper, names in itertools.product(_WRAPPERS, self.names)  # of equals, the plain one
        )
        return max(tried, key=lambda candidate: len(candidate[0]))


@dataclass(frozen=True)
class KeyLayout:
    """How the library whose `loader` this is names the parameters of an image tower of CLIP.

    Every tower has one key that ends in `anchor`, and nothing else has. `tower` stands before its keys in whole models;
    the `projection` lies inside the tower or beside it, and fine-tuned towers may lack it.
    """

    loader: str
    anchor: str
    tower: str
    projection: str

    def prefix(self, keys: Collection[str], name: str) -> str:
        """What stands before the tower's keys: `visual.`, `module.visual.`, `vision_model.`, nothing at all."""
        family = family_of_keys(keys)
        if family is not None and family.loader != self.loader:
            raise IncompatibleModelsError(
                f"{name} holds {family.what} (key {family.key!r})",
                hint=family.remedy,
                key=family.key,
                loader=family.loader,
            )
        anchors = [key for key in keys if f".{key}".endswith(f".{self.anchor}")]
        if len(anchors) != 1:
            several = f"{len(anchors)} keys that end in" if anchors else "no key that ends in"
            raise IncompatibleModelsError(
                f"{name} has {several} {self.anchor!r}; expected one image tower",
                hint="Check `architecture.loader`, and that the file holds the weights of one model.",
            )
        return anchors[0].removesuffix(self.anchor)

    def key_map(
        self, headers: Mapping[str, TensorHeader], wanted: Collection[str], name: str
    ) -> dict[str, str]:
        """See `Layout`; text tower, logit scale and index buffers of older versions are left out."""
        prefix, canonical = self.prefix(headers, name), self.prefix(wanted, "the architecture")
        projection, target = self._projection(headers, prefix), self._projection(wanted, canonical)
        stored = {}
        for key, header in headers.items():
            place = canonical + key.removeprefix(prefix)
            is_weight = place in wanted or header.dtype.is_floating_point
            if key.startswith(prefix) and key != projection and is_weight:
                stored[place] = key
        if projection is not None and target is not None:
            stored[target] = projection
        known = [key for key in wanted if key in stored]
        unknown = [key for key in stored if key not in wanted]
        return {key: stored[key] for key in (*known, *unknown)}

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """See `Layout`; experts may lack the projection, which `fallback`, the base, then gives."""
        mapping = self.key_map(source.headers, wanted, source.name)
        projection = self._projection(wanted, self.prefix(wanted, "the architecture"))
        if projection is None or projection in mapping:
            return renamed(source, mapping)
        if fallback is None:
            raise IncompatibleModelsError(
                f"{source.name} lacks the projection {projection!r}",
                hint="Only experts may leave it out, when the base has it; give a base that was saved with it.",
                key=projection,
            )
        places = {key: (source, stored) for key, stored in mapping.items()}
        return Composed(source.name, {**places, projection: (self.align(fallback, wanted, None), projection)})

    def wrapper(self, headers: Collection[str], name: str) -> str:
        """See `Layout`."""
        return self.prefix(headers, name).removesuffix(self.tower)

    def beside_tower(self, keys: Collection[str], name: str) -> dict[str, str]:
        """See `Layout`."""
        prefix = self.prefix(keys, name)
        if not prefix.endswith(self.tower):
            return {}  # a tower alone
        wrapper = prefix.removesuffix(self.tower)
        inside = (prefix, wrapper + self.projection)
        return {
            key.removeprefix(wrapper): key
            for key in keys
            if key.startswith(wrapper) and not key.startswith(inside)
        }

    def _projection(self, keys: Collection[str], prefix: str) -> str | None:
        """The key of the projection among `keys`: inside the tower, or beside it."""
        places = (prefix + self.projection, prefix.removesuffix(self.tower) + self.projection)
        return next((key for key in places if key in keys), None)
