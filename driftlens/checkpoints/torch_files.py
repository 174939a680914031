"""Files of PyTorch as sources of weights: read by a machine of our own, which builds tensors and runs nothing."""

from __future__ import annotations

import mmap
import pathlib
from collections.abc import Mapping

import torch
from torch import Tensor

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints.guarded import MOST_MEMORY, guarded
from driftlens.checkpoints.pickles import BYTES, Inert, Stored, Unpickled
from driftlens.checkpoints.refusals import by_hand, conversion, damaged, refuse_pointer, refuse_torchscript
from driftlens.checkpoints.sources import DTYPES, StateSource, TensorHeader, renamed, require_key

SECONDS, MEMORY_PER_BYTE = 10.0, 2
"""That a try may take of the processor, and beside what all may.

A hundred thousand tensors take five seconds, and of an old file all is mapped into memory.
"""


def open_torch_file(path: pathlib.Path) -> StateSource:
    """The tensors of a PyTorch checkpoint, mapped into memory and read when they are asked for.

    Training checkpoints that keep the weights under `state_dict`, `model` or `model_state_dict` are looked
    into, and the prefix `module.` of distributed training is taken off.
    """
    pickled = open_pickled(path)
    if pickled.modules:
        raise CheckpointError(
            f"{path} holds {pickled.modules[''].kind}, not only tensors",
            hint=conversion(path),
            source=str(path),
            found=pickled.modules[""].kind,
        )
    prefix = "module." if all(key.startswith("module.") for key in pickled.headers) else ""
    return renamed(pickled, {key.removeprefix(prefix): key for key in pickled.headers})


def open_pickled(path: pathlib.Path) -> Pickled:
    """The tensors of a pickled checkpoint, in whatever it holds them, once a process apart has read it."""
    refuse_pointer(path)
    refuse_torchscript(path)
    memory = MOST_MEMORY + MEMORY_PER_BYTE * path.stat().st_size
    try:
        guarded("pickle", str(path), seconds=SECONDS, memory=memory)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: its pickle does more than any of weights: {error}",
            hint="Don't use this file: it is made to exhaust whoever reads it.",
            source=str(path),
        ) from error
    try:
        pickled = Pickled(str(path), Unpickled(path))
        _require_weights(pickled, path.stat().st_size)
    except CheckpointError as error:
        hint = error.hint or by_hand(path)
        raise CheckpointError(
            f"{path}: {error.message}", hint=hint, source=str(path), **error.context
        ) from error
    except Exception as error:  # whatever a hostile or broken file provokes, none of it is a tensor
        raise damaged(path, error) from error
    return pickled


class Pickled:
    """The tensors of a pickled checkpoint as a source of weights, and the modules they were found in.

    Attributes:
        name: the path.
        headers: every key with shape and dtype.
        top: what was pickled: an `Inert` for an object, or a mapping.
        modules: the modules by their path, for a pickled module; the module itself is at "".
    """

    def __init__(self, name: str, content: Unpickled) -> None:
        self.name, self.top, self.modules = name, content.top, content.modules
        self._tensors = content.tensors
        self.headers: Mapping[str, TensorHeader] = {
            key: TensorHeader(tensor.shape, DTYPES[tensor.storage.kind])
            for key, tensor in self._tensors.items()
        }

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of it, mapped into memory."""
        require_key(self, key)
        tensor = _tensor(self._tensors[key])
        return tensor if rows is None else tensor[slice(*rows)]


def _tensor(stored: Stored) -> Tensor:
    storage = stored.storage
    dtype, size = DTYPES[storage.kind], BYTES[storage.kind]
    if 0 in stored.shape:
        return torch.empty(stored.shape, dtype=dtype)
    memory: mmap.mmap | bytearray
    memory, start = storage.place()
    # The format before 1.6 aligns nothing, and not every processor reads numbers that lie anywhere.
    if start % size:
        memory, start = bytearray(memory[start : start + storage.count * size]), 0
    numbers = torch.frombuffer(memory, dtype=dtype, count=storage.count, offset=start)
    return numbers.as_strided(stored.shape, stored.stride, stored.offset)


def _require_weights(pickled: Pickled, size: int) -> None:
    if not pickled.headers:
        content = (
            f"an object {pickled.top.kind}"
            if isinstance(pickled.top, Inert)
            else f"a {type(pickled.top).__name__}"
        )
        raise CheckpointError(
            f"it holds {content} without tensors where modules and state dicts keep them",
            hint="Save `model.state_dict()`, best as safetensors.",
        )
    total = sum(header.nbytes for header in pickled.headers.values())
    if total > 4 * size:  # tied weights are written separately, a few times over at most
        raise CheckpointError(
            f"it has {size:,} bytes, but its tensors would take {total:,}",
            hint="Don't use this file: it is made to fill a disk.",
        )
