"""From memory and disk to the device: copies that nobody waits for, and layers that are read before they are asked for.

A GPU computes while the host goes on. It is asked to wait only where numbers come back: once per layer and model, never
for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on `device`, and in `dtype` where one is given; to a GPU from pinned memory, without waiting.

    It is converted there, so that what travels is as narrow as what is stored.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def on_device(inputs: object, device: torch.device, dtype: torch.dtype) -> object:
    """Raw inputs moved to `device`; floating tensors are cast, tuples and dicts are kept as such."""
    if isinstance(inputs, Tensor):
        return moved(inputs, device, dtype if inputs.is_floating_point() else None)
    if isinstance(inputs, dict):
        return {name: on_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(on_device(value, device, dtype) for value in inputs)
    return inputs


def input_bytes(inputs: object) -> int:
    """Bytes of raw inputs, as `on_device` takes them."""
    if isinstance(inputs, Tensor):
        return inputs.nbytes
    if isinstance(inputs, dict):
        return sum(input_bytes(value) for value in inputs.values())
    return sum(input_bytes(value) for value in inputs) if isinstance(inputs, list | tuple) else 0


class ReadAhead:
    """Reads what will be asked for soon, on a thread and a stream of its own, while the GPU computes.

    Args:
        device: a GPU.
    """

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
        found, current = coming.result(), torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in found.values():
            tensor.record_stream(
                current
            )  # else its memory could be handed out while that work still reads it
        return found

    def forget(self) -> None:
        """Let go of all that nobody asked for."""
        self._coming.clear()

    def _fetch(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        with torch.cuda.stream(self._stream):
            return read()
