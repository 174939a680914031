"""Layers that are read before they are asked for, while a GPU computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class ReadAhead:
    """Reads what will be asked for soon, on a thread and a stream of its own, while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._coming: dict[Hashable, Future[dict[str, Tensor]]] = {}

    def expect(self, key: Hashable, read: Callable[[], dict[str, Tensor]]) -> None:
        """Begin to read, unless that has begun; what `read` raises is raised by `take`."""
        if key not in self._coming:
            self._coming[key] = self._thread.submit(self._fetch, read)

    def take(self, key: Hashable) -> dict[str, Tensor] | None:
        """What was read for the key, ready for work that is given to the GPU from now on; None where nothing was."""
        coming = self._coming.pop(key, None)
        if coming is None:
            return None
        read, current = coming.result(), torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in read.values():
            tensor.record_stream(
                current
            )  # else its memory could be handed out while that work still reads it
        return read

    def forget(self) -> None:
        """Let go of all that nobody asked for."""
        self._coming.clear()

    def _fetch(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        with torch.cuda.stream(self._stream):
            return read()
