"""Files of weights and folders of them; of PyTorch's, a machine of our own builds tensors and runs nothing else."""

from __future__ import annotations

import mmap
import pathlib
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from driftlens.base.errors import CheckpointError
from driftlens.base.words import some_of
from driftlens.checkpoints.guarded import MOST_MEMORY, guarded
from driftlens.checkpoints.pickles import BYTES, Inert, Stored, Unpickled
from driftlens.checkpoints.refusals import by_hand, conversion, damaged, refuse_pointer, refuse_torchscript
from driftlens.checkpoints.sources import (
    DTYPES,
    Composed,
    SafetensorsSource,
    StateSource,
    TensorHeader,
    renamed,
    require_key,
)
from driftlens.checkpoints.stated import WEIGHT_FILES, is_lora_folder, shards, weight_map, weights_in


def open_folder(folder: pathlib.Path) -> StateSource:
    """The weights in a folder written by `save_pretrained`, open_clip or a Hub download."""
    path = weights_in(folder)
    return _open_shards(path) if path.suffix == ".json" else open_file(path)


def shards_of(source: StateSource) -> Mapping[str, str]:
    """The file name of each tensor's shard, of a source that `open_folder` made of shards; nothing for others."""
    folder = pathlib.Path(source.name)
    index = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    return weight_map(index) if index is not None and index.suffix == ".json" else {}


def open_file(path: pathlib.Path) -> StateSource:
    """The weights in one file, `.safetensors` or PyTorch's."""
    refuse_pointer(path)
    return SafetensorsSource(path) if path.suffix.lower() == ".safetensors" else open_torch_file(path)


def _open_shards(index: pathlib.Path) -> StateSource:
    """Shards listed by an index file, as one source; the headers of all are read at once.

    Tensors that the index alone knows are left out: whoever needs one misses it, and nobody else should.
    """
    listed = weight_map(index)
    sources = {shard: open_file(path) for shard, path in shards(index, listed).items()}
    there = {
        key: (sources[shard], key)
        for key, shard in listed.items()
        if shard in sources and key in sources[shard].headers
    }
    if 2 * len(there) < len(listed):
        missing = next(key for key in listed if key not in there)
        raise CheckpointError(
            f"{index} says that {missing!r} is in {listed[missing]}, but it is not",
            hint="Shards and index are of different models; download or save the folder again.",
        )
    return Composed(str(index.parent), there)


def folder_notices(source: StateSource) -> list[str]:
    """What is odd about the files of a folder of weights: tensors of the index alone, files that nobody reads."""
    place = pathlib.Path(source.name)
    folder = place.parent if place.name in WEIGHT_FILES else place
    if is_lora_folder(folder):
        whole = [name for name in WEIGHT_FILES if (folder / name).is_file()]
        return (
            [f"{folder} holds adapters and {whole[0]}; the adapters are read, on the base"] if whole else []
        )
    notices = []
    if folder.is_dir() and (others := _unread(folder)):
        read, listed = weights_in(folder).name, some_of(others)
        notices.append(f"{folder} holds {read} and {listed}; {read} is read, as transformers does, no other")
    ghosts = [key for key in shards_of(source) if key not in source.headers]
    if ghosts:
        named = some_of([*map(repr, ghosts)], 1)
        notices.append(f"{folder}: its index names {named}, which no file holds and nothing reads")
    return notices


_BESIDE = re.compile(r"optimizer|scheduler|scaler|rng_state|training_args|trainer|random_states")
"""How files begin that a training leaves beside weights."""


def _unread(folder: pathlib.Path) -> list[str]:
    """The files of weights, and indexes of some, in a folder that nothing is read from."""
    try:
        first = weights_in(folder)
        read = {first.name, *(weight_map(first).values() if first.suffix == ".json" else ())}
    except CheckpointError:
        return []
    endings = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(endings))
    unread = [name for name in names if name not in read and not _BESIDE.match(name)]
    index = f"{first.name}.index.json"
    # Of shards that an index lists, the index is named for all of them.
    known = {*weight_map(folder / index).values()} if index in unread else set()
    return [name for name in unread if name not in known]


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
            f"{path} holds {pickled.modules[''].kind}, not only tensors", hint=conversion(path)
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
        ) from error
    try:
        pickled = Pickled(str(path), Unpickled(path))
        _require_weights(pickled, path.stat().st_size)
    except CheckpointError as error:
        hint = error.hint or by_hand(path)
        raise CheckpointError(f"{path}: {error.message}", hint=hint, **error.context) from error
    except Exception as error:  # whatever a hostile or broken file provokes, none of it is a tensor
        raise damaged(path, error) from error
    return pickled


class Pickled:
    """The tensors of a pickled checkpoint as a source of weights; `top` and `modules` as of `Unpickled`."""

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
            f"it holds no weights, but {content} without tensors in it",
            hint="Save `model.state_dict()`, best as safetensors.",
        )
    total = sum(header.nbytes for header in pickled.headers.values())
    if total > 4 * size:  # tied weights are written separately, a few times over at most
        raise CheckpointError(
            f"it has {size:,} bytes, but its tensors would take {total:,}",
            hint="Don't use this file: it is made to fill a disk.",
        )
