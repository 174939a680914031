"""Named tensors that are read one at a time, wherever they come from, and what is asked of them."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from driftlens.errors import CheckpointError, NumericsError


@dataclass(frozen=True)
class TensorHeader:
    """What a checkpoint says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes, unpacked and without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateSource(Protocol):
    """Named tensors that are read one at a time: a file, several shards, a live module, a renaming view."""

    @property
    def name(self) -> str:
        """What messages call it: the path, or the variable's role for live modules."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every key with shape and dtype, from headers alone."""
        ...

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, on the CPU, in the dtype it is stored in.

        `rows` reads [start, stop) of its first axis only. What is returned may share memory with the source:
        don't write to it.

        Raises:
            CheckpointError: there is no such key, or the file can't be read any more.
        """
        ...


class TensorsSource:
    """Tensors that are in memory already, or mapped into it, as a source; none is copied.

    Args:
        name: what messages call it.
        tensors: key -> tensor, in the order of the headers.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self.headers = {key: TensorHeader(tuple(value.shape), value.dtype) for key, value in tensors.items()}
        self._tensors = tensors

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of it; on the CPU it is not a copy.

        Raises:
            CheckpointError: there is no such key.
        """
        require_key(self, key)
        tensor = self._tensors[key].detach()
        return (tensor if rows is None else tensor[slice(*rows)]).cpu()


def module_source(module: nn.Module, name: str) -> StateSource:
    """The weights of a live module, by the names of its `state_dict()`; references, not copies.

    Args:
        module: any module; it is not modified, and later changes to its weights in place are seen.
        name: what messages call it, for example "base".
    """
    state = module.state_dict()
    # A module's extra state may be anything; only tensors are weights.
    return TensorsSource(name, {key: value for key, value in state.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class _Renamed:
    source: StateSource
    mapping: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        headers = self.source.headers
        return {key: headers[stored] for key, stored in self.mapping.items()}

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        require_key(self, key)
        return self.source.read(self.mapping[key], rows)


def renamed(source: StateSource, mapping: Mapping[str, str]) -> StateSource:
    """The same tensors under other names; keys that `mapping` leaves out are hidden.

    Args:
        source: where the tensors are.
        mapping: new key -> key in `source`, in the order wanted.

    Raises:
        CheckpointError: `mapping` names a key that `source` lacks.
    """
    for stored in mapping.values():
        require_key(source, stored)
    return _Renamed(source, dict(mapping))


def require_key(source: StateSource, key: str) -> None:
    """Refuse a key that `source` lacks, naming the nearest one it has.

    Raises:
        CheckpointError: there is no such key.
    """
    if key in source.headers:
        return
    near = difflib.get_close_matches(key, source.headers, n=1)
    hint = f"The nearest key is {near[0]!r}." if near else f"It holds {len(source.headers)} tensors."
    raise CheckpointError(f"{source.name} holds no tensor {key!r}", hint=hint, source=source.name, key=key)


def content_digest(source: StateSource, keys: Iterable[str] | None = None) -> str:
    """SHA-256, in hexadecimal, of what the weights are: key, dtype, shape and bytes, in sorted key order.

    Sharded or not, a file or a live module: the same weights under the same keys have the same digest. One
    tensor is in memory at a time.

    Args:
        source: the weights.
        keys: which of them; None means all.

    Raises:
        CheckpointError: a key is missing.
    """
    digest = hashlib.sha256()
    for key in sorted(source.headers if keys is None else keys):
        tensor = source.read(key)
        digest.update(json.dumps([key, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's numbers in row-major order, as they lie in memory; not a copy where that can be avoided."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def check_finite(name: str, key: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity; tensors of other than floating-point numbers pass.

    Args:
        name: the file or model, for the message.
        key: the tensor's key, for the message.
        tensor: its value.

    Raises:
        NumericsError: some entry is NaN or infinite; says how many.
    """
    if not tensor.is_floating_point():
        return
    # One-byte floats know neither sums nor `isfinite`; float32 holds all their values.
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    if torch.isfinite(wide.sum()):
        return  # a sum is finite only if every entry is, and takes a fifth of the time of looking at each
    finite = torch.isfinite(wide)
    bad = finite.numel() - int(finite.sum())
    if bad:
        raise NumericsError(
            f"{name}: tensor {key!r} holds {bad} NaN or infinite values of {finite.numel()}",
            hint="The checkpoint is broken, or overflowed when it was cast; save it again from the original.",
            source=name,
            key=key,
            count=bad,
        )
