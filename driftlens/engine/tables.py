"""Embeddings of a vocabulary: read where tokens look them up, instead of converted as a whole.

In float32 the embeddings of 128 000 tokens take more memory than the rest of a small language model, and a batch looks
up some thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Table(Tensor):
    """A matrix as it is stored, which to whoever uses it has the dtype of the computation.

    Rows that `embedding` looks up are converted, nothing else of it; any other operation converts all of it. Converting
    before or after the look-up gives the same numbers, as every wider dtype holds what a narrower one does.
    """

    _wide: torch.dtype

    @classmethod
    def of(cls, stored: Tensor, dtype: torch.dtype) -> Table:
        """The table of a stored matrix [rows, width]; no copy."""
        table = stored.detach().as_subclass(cls)
        table._wide = dtype
        return table

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What `func` returns for the matrix in the dtype of the computation."""
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.embedding and isinstance(args[1], cls) and named.get("max_norm") is None:
                return func(args[0], args[1].as_subclass(Tensor), *args[2:], **named).to(args[1]._wide)
            if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
                return args[0]._wide
            if func is Tensor.detach or func == Tensor.data.__get__:  # type: ignore[attr-defined]
                return cls.of(_plain(args[0]), args[0]._wide)  # as `state_dict` hands it out
            if (
                getattr(func, "__name__", "") in ("size", "dim", "numel", "is_floating_point")
                or func in _ASKS
            ):
                return func(*(_plain(value) for value in args), **named)  # of the matrix, not of its entries
            return func(*map(_converted, args), **{name: _converted(value) for name, value in named.items()})


_ASKS = [
    getattr(Tensor, name).__get__
    for name in ("shape", "device", "is_meta", "requires_grad", "ndim", "layout")
]


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Table) else value


def _converted(value: Any) -> Any:
    if isinstance(value, Table):
        return value.as_subclass(Tensor).to(value._wide)
    return type(value)(map(_converted, value)) if type(value) in (tuple, list) else value
