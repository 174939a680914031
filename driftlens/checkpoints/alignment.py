"""Checkpoints under the skeleton's key names, whatever their authors prefixed or left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.refusals import LIVE, family_of_keys
from driftlens.checkpoints.sources import Composed, StateSource, TensorHeader, renamed


class Layout(Protocol):
    """How checkpoints of one architecture name its parameters."""

    def key_map(
        self, headers: Mapping[str, TensorHeader], wanted: Collection[str], name: str
    ) -> dict[str, str]:
        """The skeleton's key of each tensor -> its key in the checkpoint called `name`.

        What belongs to no layer is left out; what nobody knows is kept, so that comparing keys reveals it.

        Raises:
            IncompatibleModelsError: the checkpoint is of another architecture.
        """
        ...

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """The checkpoint under the skeleton's key names; `fallback` may give what experts are saved without.

        Raises:
            IncompatibleModelsError: the checkpoint is of another architecture, or lacks some of it.
        """
        ...

    def wrapper(self, headers: Collection[str], name: str) -> str:
        """What stands before the library's own names in a checkpoint, such as `module.`.

        Raises:
            IncompatibleModelsError: the checkpoint is of another architecture.
        """
        ...


_WRAPPERS = ("", "module.", "model.", "_orig_mod.")
"""What training code puts before the names of a whole model."""


@dataclass(frozen=True)
class Spellings:
    """Checkpoints that hold a whole model under one of several spellings, as versions of a library wrote them.

    Attributes:
        names: per spelling, the skeleton's key -> its name in the file.
        left_out: beginnings of names that are no part of the model: classifiers, poolers that nobody reads.
        ignored: patterns of names that the library itself passes over.
    """

    names: Sequence[Mapping[str, str]]
    left_out: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def key_map(
        self, headers: Mapping[str, TensorHeader], wanted: Collection[str], name: str
    ) -> dict[str, str]:
        """See `Layout`; of the spellings, the one in which most of the model is found."""
        found, wrapper = self._best(headers)
        used, beside = set(found.values()), tuple(wrapper + part for part in self.left_out)
        unknown = {
            key: key
            for key, header in headers.items()
            if key not in used
            and not key.startswith(beside)
            and header.dtype.is_floating_point
            and not any(re.search(pattern, key) for pattern in self.ignored)
        }
        return found | unknown

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """See `Layout`; what is missing is missing, but of another family nearly all is."""
        found = self.key_map(source.headers, wanted, source.name)
        count = sum(key in found for key in wanted)
        if 2 * count < len(wanted) and (family := family_of_keys(source.headers)):
            what, key, hint = family
            text = f"holds {count} of the {len(wanted)} tensors that are wanted; it looks like {what} (key {key!r})"
            raise IncompatibleModelsError(f"{source.name} {text}", hint=hint)
        return renamed(source, found)

    def wrapper(self, headers: Collection[str], name: str) -> str:
        """See `Layout`."""
        return self._best(headers)[1]

    def _best(self, headers: Collection[str]) -> tuple[dict[str, str], str]:
        """The skeleton's keys that are found, and what stands before the names in the file."""
        tried = (
            ({key: wrapper + stored for key, stored in names.items() if wrapper + stored in headers}, wrapper)
            for wrapper, names in itertools.product(_WRAPPERS, self.names)  # of equals, the plain one
        )
        return max(tried, key=lambda candidate: len(candidate[0]))


@dataclass(frozen=True)
class KeyLayout:
    """How one library names the parameters of an image tower.

    Attributes:
        anchor: a key that every tower of the family has, and nothing else; where it is, the tower is.
        tower: what stands before the tower's keys in a whole model.
        projection: key of the projection, inside the tower or beside it; fine-tuned towers may lack it.
        foreign: fragments of keys that give away another architecture, and what that is.
    """

    anchor: str
    tower: str
    projection: str
    foreign: Mapping[str, str]

    def key_map(
        self, headers: Mapping[str, TensorHeader], wanted: Collection[str], name: str
    ) -> dict[str, str]:
        """See `Layout`."""
        return key_map(headers, wanted, self, name)

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """See `Layout`; experts may lack the projection."""
        return aligned(source, wanted, self, fallback)

    def wrapper(self, headers: Collection[str], name: str) -> str:
        """See `Layout`."""
        return tower_prefix(headers, self, name).removesuffix(self.tower)


def tower_prefix(keys: Collection[str], layout: KeyLayout, name: str) -> str:
    """What stands before the tower's keys: `visual.`, `module.visual.`, `vision_model.`, nothing at all.

    Raises:
        IncompatibleModelsError: there is no such tower, there are several, or it is of another architecture.
    """
    for fragment, what in layout.foreign.items():
        found = next((key for key in keys if fragment in key), None)
        if found is not None:
            raise IncompatibleModelsError(
                f"{name} holds {what} (key {found!r})",
                hint=family[2] if (family := family_of_keys([found])) else LIVE,
                key=found,
            )
    anchors = [key for key in keys if f".{key}".endswith(f".{layout.anchor}")]
    if len(anchors) != 1:
        several = f"{len(anchors)} keys that end in" if anchors else "no key that ends in"
        family = None if anchors else family_of_keys(keys)
        looks = f"; it looks like {family[0]} (key {family[1]!r})" if family else "; expected one image tower"
        hint = (
            family[2]
            if family
            else "Check `architecture.loader`, and that the file holds the weights of one model."
        )
        raise IncompatibleModelsError(f"{name} has {several} {layout.anchor!r}{looks}", hint=hint)
    return anchors[0].removesuffix(layout.anchor)


def key_map(
    headers: Mapping[str, TensorHeader], wanted: Collection[str], layout: KeyLayout, name: str
) -> dict[str, str]:
    """The skeleton's key of each tensor of the tower -> its key in the checkpoint.

    Tensors outside the tower (text, logit scale) are left out, and so are index buffers of older versions.
    Unknown tensors inside the tower are kept under the name they would have, so that comparing keys reveals
    them.

    Raises:
        IncompatibleModelsError: see `tower_prefix`.
    """
    prefix, own = tower_prefix(headers, layout, name), tower_prefix(wanted, layout, "the architecture")
    projection, target = _projection(headers, prefix, layout), _projection(wanted, own, layout)
    found = {}
    for key, header in headers.items():
        canonical = own + key.removeprefix(prefix)
        is_weight = canonical in wanted or header.dtype.is_floating_point
        if key.startswith(prefix) and key != projection and is_weight:
            found[canonical] = key
    if projection is not None and target is not None:
        found[target] = projection
    known = [key for key in wanted if key in found]
    unknown = [key for key in found if key not in wanted]
    return {key: found[key] for key in (*known, *unknown)}


def aligned(
    source: StateSource, wanted: Collection[str], layout: KeyLayout, fallback: StateSource | None = None
) -> StateSource:
    """The tower of a checkpoint under the skeleton's key names; `fallback` is the base, for towers without projection.

    Raises:
        IncompatibleModelsError: there is no such tower, or it lacks the projection and so does `fallback`.
    """
    mapping = key_map(source.headers, wanted, layout, source.name)
    projection = _projection(wanted, tower_prefix(wanted, layout, "the architecture"), layout)
    if projection is None or projection in mapping:
        return renamed(source, mapping)
    if fallback is None:
        raise IncompatibleModelsError(
            f"{source.name} lacks the projection {projection!r}",
            hint="Only experts may leave it out, when the base has it; give a base that was saved with it.",
            key=projection,
        )
    places = {key: (source, stored) for key, stored in mapping.items()}
    return Composed(source.name, {**places, projection: (aligned(fallback, wanted, layout), projection)})


TEXT_SIDE = ("text_model.", "logit_scale", "logit_bias")
"""How models of images and texts begin what is of their texts, where the image tower is taken apart as it runs."""


def beside_tower(keys: Collection[str], layout: Layout, name: str) -> dict[str, str]:
    """What a whole model holds beside its image tower, text tower and scale: key without a wrapper's prefix -> key.

    Raises:
        IncompatibleModelsError: see `tower_prefix`.
    """
    if not isinstance(layout, KeyLayout):
        wrapper = layout.wrapper(keys, name)
        found = {key.removeprefix(wrapper): key for key in keys if key.startswith(wrapper)}
        return {own: key for own, key in found.items() if own.startswith(TEXT_SIDE)}
    prefix = tower_prefix(keys, layout, name)
    if not prefix.endswith(layout.tower):
        return {}  # a tower alone
    wrapper = prefix.removesuffix(layout.tower)
    inside = (prefix, wrapper + layout.projection)
    return {
        key.removeprefix(wrapper): key
        for key in keys
        if key.startswith(wrapper) and not key.startswith(inside)
    }


def _projection(keys: Collection[str], prefix: str, layout: KeyLayout) -> str | None:
    """The key of the projection among `keys`: inside the tower, or beside it."""
    places = (prefix + layout.projection, prefix.removesuffix(layout.tower) + layout.projection)
    return next((key for key in places if key in keys), None)
