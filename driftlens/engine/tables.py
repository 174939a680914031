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
            # Reading a property, such as the shape, needs no entry.
            asks = getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "is_floating_point")
            plain = [_plain(value, widen=not asks) for value in args]
            return func(*plain, **{name: _plain(value, widen=not asks) for name, value in named.items()})


def _plain(value: Any, *, widen: bool) -> Any:
    if isinstance(value, Table):
        stored = value.as_subclass(Tensor)
        return stored.to(value._wide) if widen else stored
    return type(value)(_plain(part, widen=widen) for part in value) if type(value) in (tuple, list) else value
