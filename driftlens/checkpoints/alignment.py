"""Key alignment: maps the tensor names of a checkpoint to the parameter names of a model. Entry point: `Layout`."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from driftlens.checkpoints.tensor_sources import (
    CompositeSource,
    StateSource,
    TensorHeader,
    promote_dtypes,
    rename_keys,
    require_key,
)
from driftlens.checkpoints.unsupported import detect_family
from driftlens.utils.errors import IncompatibleModelsError

# Prefixes that training code adds to keys: DistributedDataParallel, own wrappers, torch.compile.
_WRAPPERS = ("", "module.", "model.", "_orig_mod.")
# Key prefixes of the text tower, which is not run where only the image tower is measured.
TEXT_SIDE = ("text_model.", "logit_scale", "logit_bias")


# Name of rows of a stored tensor that are a separate tensor in the model.
_ROWS = re.compile(r"(?P<whole>.+)\[(?P<start>\d+):(?P<stop>\d+)\]")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def strip_row_range(key: str) -> str:
    """Return a key without its row range: `qkv.weight[0:64]` becomes `qkv.weight`."""
    rows = _ROWS.fullmatch(key)
    return key if rows is None else rows["whole"]


def concat_pattern(names: Sequence[str]) -> str:
    """Return one pattern for tensors concatenated in memory, such as `experts.*.{w1,w3}.weight`; empty if none fits.

    A star is a number that counts from 0.
    """
    parts = []
    for column in zip(*(name.split(".") for name in names), strict=False):
        kinds = [*dict.fromkeys(column)]
        several = "*" if kinds == [*map(str, range(len(kinds)))] else f"{{{','.join(kinds)}}}"
        parts.append(kinds[0] if len(kinds) == 1 else several)
    joint = ".".join(parts)
    count = len(names) // len(_expand_braces(joint))
    return joint if ("*" in joint or "{" in joint) and expand_concat_pattern(joint, count) == [*names] else ""


def _expand_braces(joint: str) -> list[str]:
    before, brace, rest = joint.partition("{")
    inside, _, after = rest.partition("}")
    return [before + part + after for part in inside.split(",")] if brace else [joint]


def expand_concat_pattern(joint: str, count: int) -> list[str]:
    """List the tensor names of a pattern in the order of concatenation, with `*` from 0 to `count` - 1."""
    names = _expand_braces(joint)
    return [name.replace("*", str(n)) for n in range(count) for name in names] if "*" in joint else names


# Output heads. A checkpoint with one is another kind of model, so they are never ignored.
_ANSWERS = ("score", "classifier", "classification_head", "qa_outputs")


class RegroupedSource:
    """A checkpoint with fused tensors split by rows and separate expert tensors concatenated, as the model has them.

    Args:
        source: the checkpoint under its own names.
        rows: by tensor, the rows [start, stop) that are tensors of their own: queries, keys and values.
        joints: by joint name, the names of tensors that lie end to end in one: the experts of a mixture.
    """

    def __init__(
        self, source: StateSource, rows: Mapping[str, Sequence[tuple[int, int]]], joints: Mapping[str, Sequence[str]]
    ) -> None:
        self.name, self.whole = source.name, source
        self._places: dict[str, tuple[str, int]] = {}
        self.headers: dict[str, TensorHeader] = {}
        joint_of, joined = ({names[0]: key for key, names in joints.items()}, {*itertools.chain(*joints.values())})
        for key, header in source.headers.items():
            for start, stop in rows.get(key, ()):
                part = f"{key}[{start}:{stop}]"
                self.headers[part] = TensorHeader((stop - start, *header.shape[1:]), header.dtype)
                self._places[part] = key, start
            if key in joint_of:
                self.headers[joint_of[key]] = self._concatenated_header(joint_of[key], joints[joint_of[key]])
            elif key not in rows and key not in joined:
                self.headers[key] = header

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop); only the stored tensors that overlap these rows are read."""
        require_key(self, key)
        header = self.headers[key]
        start, stop = rows or (0, header.shape[0] if header.shape else 0)
        if header.parts:
            return self._read_concatenated(header, start, stop)
        stored, offset = self._places.get(key, (key, 0))
        return self.whole.read(stored, (offset + start, offset + stop) if stored != key else rows)

    def _concatenated_header(self, key: str, names: Sequence[str]) -> TensorHeader:
        headers = [self.whole.headers[name] for name in names]
        num_kinds = len(_expand_braces(key))
        length = sum(math.prod(header.shape[:1]) for header in headers[:num_kinds])
        shape = (length, *headers[0].shape[1:])
        for name, header, like in zip(names, headers, itertools.cycle(headers[:num_kinds])):
            if header.shape != like.shape or header.shape[1:] != shape[1:]:
                raise IncompatibleModelsError(
                    f"{self.name}: {name!r} has shape {list(header.shape)}, but "
                    f"{names[0]!r} has {list(headers[0].shape)}",
                    hint="MoE experts of a layer need equal shapes; download or save the model again.",
                    key=name,
                )
        # Adapters on some experts make them wider than the others.
        dtype = promote_dtypes(*(header.dtype for header in headers))
        count = (len(names) // num_kinds,) if "*" in key else ()
        parts = tuple((name, header.shape) for name, header in zip(names, headers, strict=True))
        return TensorHeader((*count, *shape), dtype, parts)

    def _read_concatenated(self, header: TensorHeader, start: int, stop: int) -> Tensor:
        # One allocation: concatenating would hold all parts twice.
        joined = torch.empty((stop - start, *header.shape[1:]), dtype=header.dtype)
        flat, place = joined.view(-1), -start * math.prod(header.shape[1:])
        for name, shape in header.parts:
            size, row = math.prod(shape), max(1, math.prod(shape[1:]))
            start_row, stop_row = max(0, -place) // row, min(size, len(flat) - place) // row
            if start_row < stop_row:
                rows = self.whole.read(name, (start_row, stop_row)).reshape(-1)
                flat[place + start_row * row : place + stop_row * row] = rows
            place += size
        return joined


class FileLayoutSource:
    """The tensors of a `RegroupedSource` as in its checkpoint files, whose names have the prefix `wrapper`."""

    def __init__(self, source: StateSource, wrapper: str = "") -> None:
        self.name, self._source = source.name, source
        # A joint may have to be computed: once, for all its parts, which follow each other.
        self._last: tuple[str, Tensor] | None = None
        self._rows: dict[str, list[str]] = {}
        self._joints: dict[str, tuple[str, int]] = {}
        self.headers: dict[str, TensorHeader] = {}
        for key, header in source.headers.items():
            place = 0
            for stored, shape in header.parts:
                name = stored.removeprefix(wrapper)
                self.headers[name] = TensorHeader(shape, header.dtype)
                self._joints[name] = key, place
                place += math.prod(shape)
            if not place:
                self._rows.setdefault(strip_row_range(key), []).append(key)
        for name, keys in self._rows.items():
            header = source.headers[keys[0]]
            length = [sum(source.headers[key].shape[0] for key in keys)] if keys != [name] else []
            self.headers[name] = TensorHeader((*length, *header.shape[len(length) :]), header.dtype)

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop)."""
        require_key(self, key)
        if key in self._joints:
            joint, place = self._joints[key]
            if self._last is None or self._last[0] != joint:
                # Release the last tensor before the next is allocated.
                self._last = None
                self._last = joint, self._source.read(joint).reshape(-1)
            shape = self.headers[key].shape
            tensor = self._last[1][place : place + math.prod(shape)].reshape(shape)
        elif self._rows[key] == [key]:
            return self._source.read(key, rows)
        else:
            tensor = torch.cat([*map(self._source.read, self._rows[key])])
        return tensor if rows is None else tensor[slice(*rows)]


@dataclass(frozen=True)
class KeyLayout:
    """Key layout of models whose tensor names differ between versions of a library.

    Attributes:
        names: per spelling, the model's key -> its name in the file, `NAME[START:STOP]` for rows, or a joint name.
        left_out: prefixes of names that are not part of the model, such as unused classifiers and poolers.
        ignored: patterns of names that the library ignores.
        is_lenient: True if the library also ignores tensors of modules that the model lacks, as transformers does.
    """

    names: Sequence[Mapping[str, str]]
    left_out: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    is_lenient: bool = False

    def regroup(self, source: StateSource) -> StateSource:
        """Return the checkpoint with its tensors split and concatenated as in the model."""
        named = {
            name for names in self.names for name in names.values() if name.endswith("]") or "{" in name or "*" in name
        }
        rows: dict[str, list[tuple[int, int]]] = {}
        joints: dict[str, list[str]] = {}
        numbers = _indices_by_pattern(source.headers) if named else {}
        for key in (wrapper + name for wrapper in _WRAPPERS for name in named):
            if part := _ROWS.fullmatch(key):
                if part["whole"] in source.headers:
                    rows.setdefault(part["whole"], []).append((int(part["start"]), int(part["stop"])))
                continue
            count = max((len(numbers.get(name, ())) for name in _expand_braces(key)), default=0)
            names = expand_concat_pattern(key, count)
            if not names or not any(name in source.headers for name in names):
                continue
            missing = [name for name in names if name not in source.headers]
            if missing:
                raise IncompatibleModelsError(
                    f"{source.name} lacks {missing[0]!r}, but has {len(names) - len(missing)} tensors of its group",
                    hint="MoE experts must be numbered from 0 without gaps; download or save the model again.",
                    missing=missing,
                )
            joints[key] = names
        cut = {key: sorted(part) for key, part in rows.items()}
        return RegroupedSource(source, cut, joints) if cut or joints else source

    def key_map(self, headers: Mapping[str, TensorHeader], model_keys: Collection[str], name: str) -> dict[str, str]:
        """Map the model's keys to a checkpoint's keys, by the naming scheme that matches most of them.

        Args:
            headers: the checkpoint's tensors.
            model_keys: the model's keys.
            name: the checkpoint's name in messages.
        """
        stored, wrapper = self._best_key_map(headers)
        used, beside = set(stored.values()), tuple(wrapper + part for part in self.left_out)
        # Kept, so that a comparison of keys reports them.
        unknown = {
            key: key
            for key, header in headers.items()
            if key not in used
            and not key.startswith(beside)
            and header.dtype.is_floating_point
            and not self._is_ignored_by_library(key.removeprefix(wrapper))
        }
        return stored | unknown

    def ignored_keys(self, headers: Collection[str], name: str) -> dict[str, str]:
        """Map keys that the library does not load, except buffers, to the file's keys; wrapper prefixes are removed."""
        stored, wrapper = self._best_key_map(headers)
        used, beside = set(stored.values()), (*TEXT_SIDE, *self.left_out)
        named = {key.removeprefix(wrapper): key for key in headers if key not in used}
        return {
            key: stored_key
            for key, stored_key in named.items()
            if self._is_ignored_by_library(key)
            and key.rpartition(".")[0] not in self._module_paths
            and not key.startswith(beside)
        }

    def _is_ignored_by_library(self, key: str) -> bool:
        """Return True if the library ignores this tensor, by pattern or because the model lacks its module."""
        if any(re.search(pattern, key) for pattern in self.ignored):
            return True
        parts = key.split(".")
        depth = next(n for n in range(len(parts), -1, -1) if ".".join(parts[:n]) in self._module_paths)
        is_numbered = any(part.isdigit() for part in parts[: depth + 1])
        if parts[0] in _ANSWERS:
            return False
        # A bias that the model's module lacks, or a further block, changes features: neither is ignored.
        is_inside = depth == len(parts) - 1 and self._module_paths[".".join(parts[:-1])]
        return self.is_lenient and not is_numbered and not is_inside

    @functools.cached_property
    def _module_paths(self) -> dict[str, bool]:
        """Map the module paths of all naming schemes to True if the module has tensors of its own."""
        modules = {"": False}
        for name in itertools.chain(*(names.values() for names in self.names)):
            parts = strip_row_range(name).split(".")[:-1]
            modules |= {".".join(parts[:n]): False for n in range(len(parts)) if ".".join(parts[:n]) not in modules}
            modules[".".join(parts)] = True
        return modules

    def align(self, source: StateSource, model_keys: Collection[str], fallback: StateSource | None) -> StateSource:
        """Return the checkpoint's tensors under the model's keys; `fallback` is not used."""
        source = self.regroup(source)
        stored = self.key_map(source.headers, model_keys, source.name)
        count = sum(key in stored for key in model_keys)
        # With half of the tensors it is this architecture, and what it lacks is reported by name.
        if 2 * count < len(model_keys) and (family := detect_family(source.headers)):
            raise IncompatibleModelsError(
                f"{source.name} holds {count} of {len(model_keys)} expected tensors; "
                f"it looks like {family.what} (key {family.key!r})",
                hint=family.remedy,
                loader=family.loader,
            )
        return rename_keys(source, stored)

    def wrapper_prefix(self, headers: Collection[str], name: str) -> str:
        """Return the prefix that training code added to a checkpoint's keys, such as `module.`."""
        return self._best_key_map(headers)[1]

    def non_layer_keys(self, keys: Collection[str], name: str) -> dict[str, str]:
        """Map keys outside the measured layers, without wrapper prefix, to the file's keys."""
        wrapper = self.wrapper_prefix(keys, name)
        # A tied weight may be stored under the names of its copies, which are left out.
        used = {wrapper + stored for names in self.names for stored in names.values()}
        named = {key.removeprefix(wrapper): key for key in keys if key.startswith(wrapper) and key not in used}
        beside = (*TEXT_SIDE, *self.left_out)
        kept = {key: stored for key, stored in named.items() if key.startswith(beside)}
        return kept | self.ignored_keys(keys, name)

    def _best_key_map(self, headers: Collection[str]) -> tuple[dict[str, str], str]:
        """Return the map from model to file keys with the most matches, and the prefix of the file keys."""
        tried = (
            ({key: wrapper + stored for key, stored in names.items() if wrapper + stored in headers}, wrapper)
            # The plain spelling comes first, so that it wins ties.
            for wrapper, names in itertools.product(_WRAPPERS, self.names)
        )
        return max(tried, key=lambda candidate: len(candidate[0]))


def _indices_by_pattern(keys: Collection[str]) -> dict[str, list[int]]:
    """Map each key pattern, with `*` in place of one number, to the numbers that occur there."""
    numbers: dict[str, list[int]] = {}
    for key in keys:
        for match in _NUMBER.finditer(key):
            numbers.setdefault(f"{key[: match.start()]}*{key[match.end() :]}", []).append(int(match[0]))
    return numbers


@dataclass(frozen=True)
class TowerKeyLayout:
    """Key layout of CLIP image towers in checkpoints of one library (`loader`).

    Every tower has one key that ends in `anchor`, and no other model has. `tower` is the prefix of its keys in whole
    models. The `projection` is inside the tower or next to it, and fine-tuned towers may lack it.
    """

    loader: str
    anchor: str
    tower: str
    projection: str

    def tower_prefix(self, keys: Collection[str], name: str) -> str:
        """Return the prefix of the tower's keys: `visual.`, `module.visual.`, `vision_model.` or an empty string."""
        family = detect_family(keys)
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
                f"{name} has {several} {self.anchor!r}, expected one",
                hint="Check `architecture.loader`, and that the file holds one model.",
            )
        return anchors[0].removesuffix(self.anchor)

    def key_map(self, headers: Mapping[str, TensorHeader], model_keys: Collection[str], name: str) -> dict[str, str]:
        """Map the image tower's keys to a checkpoint's; text tower, logit scale and old index buffers are left out.

        Args:
            headers: the checkpoint's tensors.
            model_keys: the model's keys.
            name: the checkpoint's name in messages.
        """
        prefix, canonical = self.tower_prefix(headers, name), self.tower_prefix(model_keys, "the architecture")
        projection = self._find_projection_key(headers, prefix)
        target = self._find_projection_key(model_keys, canonical)
        stored = {}
        for key, header in headers.items():
            place = canonical + key.removeprefix(prefix)
            is_weight = place in model_keys or header.dtype.is_floating_point
            if key.startswith(prefix) and key != projection and is_weight:
                stored[place] = key
        if projection is not None and target is not None:
            stored[target] = projection
        expected = [key for key in model_keys if key in stored]
        unknown = [key for key in stored if key not in model_keys]
        return {key: stored[key] for key in (*expected, *unknown)}

    def align(self, source: StateSource, model_keys: Collection[str], fallback: StateSource | None) -> StateSource:
        """Return the tower's tensors under the model's keys; `fallback`, the base, supplies a missing projection."""
        mapping = self.key_map(source.headers, model_keys, source.name)
        projection = self._find_projection_key(model_keys, self.tower_prefix(model_keys, "the architecture"))
        if projection is None or projection in mapping:
            return rename_keys(source, mapping)
        if fallback is None:
            raise IncompatibleModelsError(
                f"{source.name} lacks the projection {projection!r}",
                hint="Only experts may omit it; give a base that was saved with it.",
                key=projection,
            )
        places = {key: (source, stored) for key, stored in mapping.items()}
        places[projection] = self.align(fallback, model_keys, None), projection
        return CompositeSource(source.name, places)

    def wrapper_prefix(self, headers: Collection[str], name: str) -> str:
        """Return the prefix that training code added to a checkpoint's keys, such as `module.`."""
        return self.tower_prefix(headers, name).removesuffix(self.tower)

    def non_layer_keys(self, keys: Collection[str], name: str) -> dict[str, str]:
        """Map keys outside the image tower, without wrapper prefix, to the file's keys."""
        prefix = self.tower_prefix(keys, name)
        if not prefix.endswith(self.tower):
            # The file holds a tower alone.
            return {}
        wrapper = prefix.removesuffix(self.tower)
        inside = (prefix, wrapper + self.projection)
        return {
            key.removeprefix(wrapper): key for key in keys if key.startswith(wrapper) and not key.startswith(inside)
        }

    def _find_projection_key(self, keys: Collection[str], prefix: str) -> str | None:
        places = (prefix + self.projection, prefix.removesuffix(self.tower) + self.projection)
        return next((key for key in places if key in keys), None)


# The parameter names of one architecture in checkpoints.
Layout: TypeAlias = TowerKeyLayout | KeyLayout
