"""Raw inputs of a batch on their way from the host to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from driftlens.engine.pool import ModelPool, moved
from driftlens.models.chain import SideInputs, State
from driftlens.models.frames import known_on_host


def on_device(inputs: object, device: torch.device, dtype: torch.dtype) -> object:
    """Raw inputs moved to `device`; floating tensors are cast, lists become tuples, mappings of any kind dicts."""
    if isinstance(inputs, Tensor):
        return moved(inputs, device, dtype if inputs.is_floating_point() else None)
    if isinstance(inputs, Mapping):
        return {name: on_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(on_device(value, device, dtype) for value in inputs)
    return inputs


@contextmanager
def sent(inputs: object, pool: ModelPool) -> Iterator[Any]:
    """Raw inputs as the pool's models take them; while this is open, nobody waits to read what the host has of them."""
    there = on_device(inputs, pool.device, pool.dtype)
    with known_on_host(inputs, there):
        yield there


def begun(pool: ModelPool, inputs: object) -> tuple[State, SideInputs]:
    """The state at boundary 0 of a batch of raw inputs, and all that the layers need beside it."""
    with sent(inputs, pool) as there:
        return pool.chain.start(there)


def input_bytes(inputs: object) -> int:
    """Bytes of raw inputs, as `on_device` takes them."""
    if isinstance(inputs, Tensor):
        return inputs.nbytes
    if isinstance(inputs, Mapping):
        return sum(input_bytes(value) for value in inputs.values())
    return sum(input_bytes(value) for value in inputs) if isinstance(inputs, list | tuple) else 0
