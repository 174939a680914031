"""Weights written back: layers' tensors into checkpoint tensors, these into the base's own form, whole files or none.

One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from driftlens.errors import CheckpointError, IncompatibleModelsError, ShapeError, SpecError
from driftlens.files import atomic_folder, atomic_path, write_json_atomic, write_text_atomic
from driftlens.models.alignment import key_map, tower_prefix
from driftlens.models.architecture import Architecture, FolderFormat
from driftlens.models.chain import LayerChain, ParameterKey, Slot
from driftlens.models.sources import (
    DTYPES,
    OnDemand,
    StateSource,
    TensorHeader,
    check_finite,
    raw_bytes,
    renamed,
    require_key,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


class Patched:
    """A source with some tensors replaced: the base's own keys, order and dtypes; one tensor is read at a time.

    An update is asked for, and checked, whenever it is read. It also iterates over (key, tensor), as `save_state_dict`
    wants them.

    Args:
        base: where all other tensors come from.
        updates: key of `base` -> new value, in any floating-point dtype; cast to the base's.

    Raises:
        CheckpointError: `base` has no such key.
    """

    def __init__(self, base: StateSource, updates: Mapping[str, Tensor]) -> None:
        for key in updates:
            require_key(base, key)
        self.name = base.name
        self.headers = base.headers
        self._base = base
        self._updates = updates

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The update of `key` in the base's dtype, or the base's own tensor.

        Raises:
            CheckpointError: the update would be cut to integers.
            ShapeError: it has another shape than the base's tensor.
            NumericsError: it is NaN or infinite, or becomes so in the base's dtype.
        """
        if key not in self._updates:
            return self._base.read(key, rows)
        header, update = self.headers[key], self._updates[key].detach()
        if tuple(update.shape) != header.shape:
            raise ShapeError(
                f"{key!r} has shape {list(header.shape)} in {self.name}, its update {list(update.shape)}",
                hint="Updates come in the layout of the base's own checkpoint.",
                key=key,
            )
        if update.is_floating_point() and not header.dtype.is_floating_point:
            raise CheckpointError(
                f"{self.name}: {key!r} is {header.dtype}, an update of it would be cut to integers"
            )
        value = (update if rows is None else update[slice(*rows)]).to("cpu", header.dtype)
        check_finite(f"the update of {self.name}", key, value)
        return value

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for key in self.headers:
            yield key, self.read(key)


def save_state_dict(
    path: str | os.PathLike[str],
    tensors: Patched | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a safetensors file; on any failure nothing is left and a file that was there stays.

    A `Patched` source is streamed, so that one tensor is in memory at a time; other iterables are
    collected first. Tensors that share storage are written separately.

    Args:
        path: the file, by custom ending in `.safetensors`.
        tensors: key -> tensor, or pairs of them.
        metadata: strings for the header; `format: pt`, which readers expect, is added.

    Raises:
        CheckpointError: a tensor has a number type that the format does not know.
        RunError: the disk is full or the folder can't be written to.
    """
    # The safetensors library writes only what is in memory as a whole, hence the twenty lines below.
    if isinstance(tensors, Patched):
        headers, pairs = tensors.headers, iter(tensors)
    else:
        collected = dict(tensors)
        headers = {key: TensorHeader(tuple(value.shape), value.dtype) for key, value in collected.items()}
        pairs = iter(collected.items())
    spans = _spans(headers)
    head = _head(headers, spans, {"format": "pt", **(metadata or {})})
    total = len(head) + sum(header.nbytes for header in headers.values())
    with atomic_path(path, need=total) as written, written.open("wb") as file:
        file.write(head)
        for key, tensor in pairs:
            assert TensorHeader(tuple(tensor.shape), tensor.dtype) == headers[key], key
            file.seek(len(head) + spans[key][0])
            file.write(raw_bytes(tensor))


def _spans(headers: Mapping[str, TensorHeader]) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes go: widest numbers first, so that each tensor is aligned to its width."""
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for key in sorted(headers, key=lambda key: -headers[key].dtype.itemsize):
        spans[key] = end, end + headers[key].nbytes
        end += headers[key].nbytes
    return spans


def _head(
    headers: Mapping[str, TensorHeader], spans: Mapping[str, tuple[int, int]], metadata: Mapping[str, str]
) -> bytes:
    """Length and JSON header, padded with spaces so that the numbers behind it are aligned."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for key, header in headers.items():
        if header.dtype not in _NAMES:
            raise CheckpointError(f"{key!r} is {header.dtype}, which safetensors files can't hold")
        entries[key] = {"dtype": _NAMES[header.dtype], "shape": header.shape, "data_offsets": spans[key]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def fused(chain: LayerChain, parameters: Mapping[ParameterKey, Tensor], start: StateSource) -> OnDemand[str]:
    """Checkpoint tensors with the given layer parameters written into them, each made when it is asked for.

    Args:
        chain: says where each parameter lies.
        parameters: (layer index, the layer's own parameter name) -> value in the layer's layout.
        start: the model that is changed, under the skeleton's key names: of a fused tensor, rows that
            `parameters` doesn't give are those of `start`.

    Returns:
        The skeleton's key -> whole tensor, in the layout and dtype of `start`, for every key that is touched.
    """
    touched: dict[str, list[tuple[ParameterKey, Slot]]] = {}
    for index, name in parameters:
        slot = chain.layers[index - 1].parameters[name]
        touched.setdefault(slot.key, []).append(((index, name), slot))

    def whole(key: str) -> Tensor:
        tensor = start.read(key).clone()
        for parameter, slot in touched[key]:
            value = parameters[parameter]
            rows = slice(None) if slot.rows is None else slice(*slot.rows)
            tensor[rows] = (value.mT if slot.transposed else value).detach().to(tensor)
        return tensor

    return OnDemand(touched, whole)


def save_model(
    architecture: Architecture,
    base: StateSource,
    model: StateSource,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    card: str | None = None,
) -> None:
    """Write a model the way its base is stored: the base's keys and dtypes, and what else its file holds.

    Args:
        architecture: of both.
        base: the base under its own key names; text tower and logit scale come from it.
        model: the model to save, under the skeleton's key names (see `Patched` and `fused`).
        path: ending in `.safetensors`, a state dict; anything else, a folder that the original library loads.
        metadata: strings for the header of the weights.
        card: text of the folder's README.md.

    Raises:
        SpecError: a folder is asked for, but the architecture has no such form or the base is only a part.
        IncompatibleModelsError: the model and the base are of different architectures.
        DriftLensError: as `Patched.read`; nothing is left at `path`.
        RunError: `path` can't be written to, or is a folder that is not empty.
    """
    canonical = {stored: key for key, stored in _stored_keys(architecture, base, model).items()}
    target = pathlib.Path(path)
    if target.suffix == ".safetensors":
        save_state_dict(
            target, Patched(base, OnDemand(canonical, lambda key: model.read(canonical[key]))), metadata
        )
        return
    if architecture.folder is None:
        raise SpecError(
            f"a {architecture.source} can only be saved as a state dict",
            hint="Give a path ending in .safetensors.",
        )
    names = _library_names(architecture, base, architecture.folder)
    updates = {name: canonical[key] for name, key in names.items() if key in canonical}
    weights = Patched(renamed(base, names), OnDemand(updates, lambda key: model.read(updates[key])))
    with atomic_folder(target) as folder:
        for file, content in architecture.folder.configs.items():
            write_json_atomic(folder / file, content)
        if card is not None:
            write_text_atomic(folder / "README.md", card)
        save_state_dict(folder / architecture.folder.weights, weights, metadata)


def _stored_keys(architecture: Architecture, base: StateSource, model: StateSource) -> dict[str, str]:
    """The skeleton's key of each parameter of the chain -> the base's key."""
    keys = architecture.chain.parameter_keys()
    layout = architecture.layout
    stored = (
        {key: key for key in base.headers}
        if layout is None
        else key_map(base.headers, architecture.keys, layout, base.name)
    )
    for source, held in ((base, stored), (model, model.headers)):
        missing = next((key for key in keys if key not in held), None)
        if missing is not None:
            raise IncompatibleModelsError(
                f"{source.name} lacks {missing!r}, so the model can't be saved in the form of the base",
                hint="Both must be whole models of one architecture.",
                key=missing,
            )
    return {key: stored[key] for key in keys}


def _library_names(architecture: Architecture, base: StateSource, folder: FolderFormat) -> dict[str, str]:
    """The library's own key -> the base's, without the prefix of whatever wrapped the base."""
    assert architecture.layout is not None  # whatever can be saved as a folder has one
    layout = architecture.layout
    wrapper = tower_prefix(base.headers, layout, base.name).removesuffix(layout.tower)
    names = {key.removeprefix(wrapper): key for key in base.headers if key.startswith(wrapper)}
    missing = next((key for key in folder.required() if key not in names), None)
    if missing is not None:
        raise SpecError(
            f"{base.name} is only a part of the model: {missing!r} is missing",
            hint="A folder wants a whole CLIP as base; a path ending in .safetensors doesn't.",
        )
    return names
