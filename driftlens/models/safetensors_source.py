"""Reading `.safetensors` files, tensor by tensor."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from driftlens.errors import CheckpointError
from driftlens.models.sources import TensorHeader, require_key

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of number types in the file format."""

KEPT_OPEN = 16 << 20
"""Bytes up to which a file stays open: opening a small one takes longer than reading a tensor of it."""


class SafetensorsSource:
    """One `.safetensors` file. The header is read at once, a tensor when it is asked for.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is missing, truncated, corrupt or holds no tensors.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.name = str(path)
        self._path = path
        with _opened(path) as file:
            keys: list[str] = file.keys()
            self.headers = {key: _header(self.name, key, file.get_slice(key)) for key in keys}
        if not self.headers:
            raise CheckpointError(
                f"{path} holds no tensors", hint="Save the model again; this file is empty."
            )
        self._kept = _open(path) if path.stat().st_size <= KEPT_OPEN else None
        self._stamp = _stamp(path)

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of it; only its own bytes are read.

        Raises:
            CheckpointError: there is no such key, or the file can't be read any more.
        """
        require_key(self, key)
        # Reading on from a file that was cut short meanwhile would kill the process.
        if self._kept is not None and _stamp(self._path) == self._stamp:
            return _piece(self._kept, key, rows).clone()
        # Opened anew for each read: the file stays mapped only as long as the tensor lives, so that resident
        # memory is what is in use, and a tensor somebody wrote to does not come back changed.
        with _opened(self._path) as file:
            return _piece(file, key, rows)


def _stamp(path: pathlib.Path) -> tuple[int, int] | None:
    """What changes with a file; None where it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _piece(file: Any, key: str, rows: tuple[int, int] | None) -> Tensor:
    tensor: Tensor = file.get_tensor(key) if rows is None else file.get_slice(key)[slice(*rows)]
    return tensor


def _header(name: str, key: str, piece: Any) -> TensorHeader:
    dtype = DTYPES.get(piece.get_dtype())
    if dtype is None:
        raise CheckpointError(
            f"{name}: tensor {key!r} has the unsupported number type {piece.get_dtype()}",
            hint="Quantised weights can't be compared; save the model in float16 or wider.",
            source=name,
            key=key,
        )
    return TensorHeader(tuple(piece.get_shape()), dtype)


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    from safetensors import SafetensorError

    try:
        with _open(path) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}",
            hint="Copy or download it again; it was cut short or changed on the way.",
            source=str(path),
        ) from error


def _open(path: pathlib.Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
