"""Reading files of weights and folders of them, without ever unpickling what is not a tensor."""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftlens.base.errors import CheckpointError
from driftlens.base.files import from_json, plain_file
from driftlens.checkpoints.guarded import MOST_MEMORY, guarded
from driftlens.checkpoints.pickles import Pickled
from driftlens.checkpoints.refusals import NESTS, conversion, refuse_pointer, refuse_torchscript, unreadable
from driftlens.checkpoints.sources import Composed, SafetensorsSource, StateSource, TensorsSource, renamed

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names under which weights are looked for in a folder, best first."""


SECONDS, MEMORY_PER_BYTE = 10.0, 2
"""That a try may take of the processor, and beside what all may.

A hundred thousand tensors take five seconds, and of an old file all is mapped into memory.
"""


def open_folder(folder: pathlib.Path) -> StateSource:
    """The weights in a folder written by `save_pretrained`, open_clip or a Hub download.

    Raises:
        CheckpointError: no known file is there, a shard is missing or lacks a key, or a file can't be read.
    """
    for name in WEIGHT_FILES:
        path = folder / name
        if path.is_file():
            return _open_shards(path) if path.suffix == ".json" else open_file(path)
    found = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
    wanted = f"Wanted is one of {', '.join(WEIGHT_FILES)}; for another file give its own path."
    raise CheckpointError(
        f"{folder} holds no weights; there is {shown}",
        hint=conversion(folder) if "zeroshot.pt" in found else wanted,
        source=str(folder),
    )


def shards_of(source: StateSource) -> Mapping[str, str]:
    """The file name of each tensor's shard, of a source that `open_folder` made of shards; nothing for others.

    Raises:
        CheckpointError: the index has become malformed.
    """
    folder = pathlib.Path(source.name)
    index = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    return _weight_map(index) if index is not None and index.suffix == ".json" else {}


def open_file(path: pathlib.Path) -> StateSource:
    """The weights in one file, `.safetensors` or PyTorch's.

    Raises:
        CheckpointError: it is a Git LFS pointer, truncated, corrupt, unsafe or empty.
    """
    refuse_pointer(path)
    return SafetensorsSource(path) if path.suffix.lower() == ".safetensors" else open_torch_file(path)


def _open_shards(index: pathlib.Path) -> StateSource:
    """Shards listed by an index file, as one source; the headers of all are read at once.

    Raises:
        CheckpointError: the index is malformed, a shard is missing, or lacks a key that the index promises.
    """
    shards = _weight_map(index)
    sources = {shard: _open_shard(index, shard) for shard in sorted(set(shards.values()))}
    for key, shard in shards.items():
        if key not in sources[shard].headers:
            raise CheckpointError(
                f"{index} says that {key!r} is in {shard}, but it is not",
                hint="Shards and index are of different models; download or save the folder again.",
                source=str(index),
                key=key,
            )
    return Composed(str(index.parent), {key: (sources[shard], key) for key, shard in shards.items()})


def _open_shard(index: pathlib.Path, shard: str) -> StateSource:
    path = index.parent / shard
    if path.name != shard:  # an index is data from elsewhere: it may not point out of its folder
        raise CheckpointError(
            f"{index} names a shard outside its folder: {shard}", hint="Don't use this folder."
        )
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, though {index.name} lists it",
            hint="Download or copy the missing shard.",
            source=str(path),
        )
    return open_file(path)


def _weight_map(index: pathlib.Path) -> Mapping[str, str]:
    try:
        shards = from_json(plain_file(index).read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        shards = None
    if (
        not isinstance(shards, dict)
        or not shards
        or not all(isinstance(shard, str) for shard in shards.values())
    ):
        raise CheckpointError(
            f"{index} is not an index of shards",
            hint="It should be JSON with a `weight_map` from tensor names to files; download it again.",
            source=str(index),
        )
    return shards


def open_torch_file(path: pathlib.Path) -> StateSource:
    """The tensors of a PyTorch checkpoint, mapped into memory and read when they are asked for.

    Training checkpoints that keep the weights under `state_dict`, `model` or `model_state_dict` are looked
    into, and the prefix `module.` of distributed training is taken off. Files in PyTorch's format before 1.6
    can't be mapped; they are read whole.

    Raises:
        CheckpointError: the file holds code or objects other than tensors, is TorchScript, truncated or
            empty.
    """
    zipped = refuse_torchscript(path)
    if torch_version() < SAFE_TORCH:
        return _read_by_ourselves(path)
    weights = _weights(path, _load(path, mapped=zipped))
    return TensorsSource(str(path), _without_prefix(weights, "module."))


SAFE_TORCH = (2, 10)
"""From here on `weights_only` withstands hostile files (CVE-2026-24747); older ones are not let at any."""


def torch_version() -> tuple[int, ...]:
    """Of torch, the first two numbers."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def open_pickled(path: pathlib.Path) -> Pickled:
    """What is in a pickled checkpoint, once a process apart has read it, as a pickle may ask for any number of steps.

    Raises:
        CheckpointError: as `Pickled`, or it takes more time or memory than any of weights.
    """
    refuse_pointer(path)
    memory = MOST_MEMORY + MEMORY_PER_BYTE * path.stat().st_size
    try:
        guarded("pickle", str(path), seconds=SECONDS, memory=memory)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: its pickle does more than any of weights: {error}",
            hint="Don't use this file: it is made to exhaust whoever reads it.",
            source=str(path),
        ) from error
    return Pickled(path)


def _read_by_ourselves(path: pathlib.Path) -> StateSource:
    """The same tensors by the machine of `driftlens convert`, which builds nothing else.

    Raises:
        CheckpointError: as `open_torch_file`.
    """
    pickled = open_pickled(path)
    if pickled.modules:
        raise CheckpointError(
            f"{path} holds modules, not only tensors", hint=conversion(path), source=str(path)
        )
    prefix = "module." if all(key.startswith("module.") for key in pickled.headers) else ""
    return renamed(pickled, {key.removeprefix(prefix): key for key in pickled.headers})


def _load(path: pathlib.Path, *, mapped: bool) -> object:
    try:
        with warnings.catch_warnings():
            # Remarks on pickle protocols and sparse tensors; what matters of them is decided below.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a hostile or broken file provokes, none of it is a tensor
        raise unreadable(path, error) from error


def _weights(path: pathlib.Path, loaded: object) -> Mapping[str, Tensor]:
    """The state dict in what was loaded, whether it is that itself or a training checkpoint around it."""
    state: Any = loaded
    if isinstance(loaded, dict):
        state = next((loaded[key] for key in NESTS if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, a state dict is wanted",
            hint="Save `model.state_dict()`, best as safetensors.",
            source=str(path),
        )
    if not state:
        raise CheckpointError(
            f"{path} holds an empty state dict", hint="Save the model again.", source=str(path)
        )
    for key, value in state.items():
        _require_plain_tensor(path, key, value)
    return state


def _require_plain_tensor(path: pathlib.Path, key: object, value: object) -> None:
    if isinstance(key, str) and isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_quantized:
            return
        found = "a quantised tensor" if value.is_quantized else "a sparse tensor"
    else:
        found = f"of type {type(value).__name__}"
    raise CheckpointError(
        f"{path}: {key!r} is {found}, an ordinary tensor is wanted",
        hint=f"Save the weights alone, as a flat state dict or under one of {', '.join(NESTS)}.",
        source=str(path),
        key=key,
    )


def _without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    if not all(key.startswith(prefix) for key in tensors):
        return tensors
    return {key.removeprefix(prefix): value for key, value in tensors.items()}
