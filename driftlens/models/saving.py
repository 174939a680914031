"""Writing weights: whole files or none, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from driftlens.errors import CheckpointError, ShapeError
from driftlens.files import atomic_path
from driftlens.models.sources import DTYPES, StateSource, TensorHeader, check_finite, raw_bytes, require_key

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


class Patched:
    """A source with some tensors replaced, which also iterates over (key, tensor). See `patched`."""

    def __init__(self, base: StateSource, updates: Mapping[str, Tensor]) -> None:
        self.name = base.name
        self.headers = base.headers
        self._base = base
        self._updates = updates

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The update of `key` in the base's dtype, or the base's own tensor."""
        if key not in self._updates:
            return self._base.read(key, rows)
        update = self._updates[key].detach()
        return (update if rows is None else update[slice(*rows)]).to("cpu", self.headers[key].dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for key in self.headers:
            yield key, self.read(key)


def patched(base: StateSource, updates: Mapping[str, Tensor]) -> Patched:
    """`base` with some tensors replaced: the base's own keys, order and dtypes, read one at a time.

    Args:
        base: where all other tensors come from.
        updates: key of `base` -> new value, in any floating-point dtype; cast to the base's.

    Returns:
        A `StateSource` that also iterates over (key, tensor), as `save_state_dict` wants them.

    Raises:
        CheckpointError: `base` has no such key, or holds integers there.
        ShapeError: an update has another shape than the base's tensor.
        NumericsError: an update is NaN or infinite, or becomes so in the base's dtype.
    """
    for key, update in updates.items():
        require_key(base, key)
        header = base.headers[key]
        if tuple(update.shape) != header.shape:
            raise ShapeError(
                f"{key!r} has shape {list(header.shape)} in {base.name}, its update {list(update.shape)}",
                hint="Updates come in the layout of the base's own checkpoint.",
                key=key,
            )
        if update.is_floating_point() and not header.dtype.is_floating_point:
            raise CheckpointError(
                f"{base.name}: {key!r} is {header.dtype}, an update of it would be cut to integers"
            )
        check_finite(f"the update of {base.name}", key, update.to(header.dtype))
    return Patched(base, updates)


def save_state_dict(
    path: str | os.PathLike[str],
    tensors: Patched | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a safetensors file; on any failure nothing is left and a file that was there stays.

    What `patched` returns is streamed, so that one tensor is in memory at a time; other iterables are
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
