"""Checkpoints as they lie on disk, opened without reading them and never unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorHeader:
    """What a checkpoint says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StateSource(Protocol):
    """Named tensors that are read one at a time: a file, several shards, a live module, or a view that renames.

    Attributes:
        name: what messages call it: the path, or the variable's role for live modules.
    """

    name: str

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every key with shape and dtype, from headers alone."""
        ...

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, on the CPU, in the dtype it is stored in; `rows` reads [start, stop) of its first axis only."""
        ...
