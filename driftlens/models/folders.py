"""Reading folders of weights as libraries lay them out: one file, or shards with an index."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

from torch import Tensor

from driftlens.errors import CheckpointError
from driftlens.models.sources import SafetensorsSource, StateSource, require_key
from driftlens.models.torch_source import open_torch_file

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names under which weights are looked for in a folder, best first."""


def open_folder(folder: pathlib.Path) -> StateSource:
    """The weights in a folder written by `save_pretrained`, open_clip or a Hub download.

    Raises:
        CheckpointError: no known file is there, a shard is missing or lacks a key, or a file can't be read.
    """
    for name in WEIGHT_FILES:
        path = folder / name
        if path.is_file():
            return ShardedSource(path) if path.suffix == ".json" else open_file(path)
    found = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
    raise CheckpointError(
        f"{folder} holds no weights; there is {shown}",
        hint=f"Wanted is one of {', '.join(WEIGHT_FILES)}; for another file give its own path.",
        source=str(folder),
    )


def open_file(path: pathlib.Path) -> StateSource:
    """The weights in one file, `.safetensors` or PyTorch's.

    Raises:
        CheckpointError: it is a Git LFS pointer, truncated, corrupt, unsafe or empty.
    """
    _refuse_pointer(path)
    return SafetensorsSource(path) if path.suffix.lower() == ".safetensors" else open_torch_file(path)


class ShardedSource:
    """Shards listed by an index file, as one source. Headers of all shards are read at once.

    Args:
        index: `*.index.json`, whose `weight_map` says in which file of its folder each tensor lies.

    Raises:
        CheckpointError: the index is malformed, a shard is missing, or a shard lacks a key the index
            promises.
    """

    def __init__(self, index: pathlib.Path) -> None:
        self.name = str(index.parent)
        shards = _weight_map(index)
        sources = {shard: _open_shard(index, shard) for shard in sorted(set(shards.values()))}
        self._sources = {key: sources[shard] for key, shard in shards.items()}
        for key, source in self._sources.items():
            if key not in source.headers:
                raise CheckpointError(
                    f"{index} says that {key!r} is in {shards[key]}, but it is not",
                    hint="Shards and index are of different models; download or save the folder again.",
                    source=str(index),
                    key=key,
                )
        self.headers = {key: source.headers[key] for key, source in self._sources.items()}

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of it, from the shard that has it.

        Raises:
            CheckpointError: there is no such key, or the shard can't be read any more.
        """
        require_key(self, key)
        return self._sources[key].read(key, rows)


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
        shards = json.loads(index.read_bytes())["weight_map"]
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


def _refuse_pointer(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights",
            hint="Run `git lfs pull` in its folder.",
            source=str(path),
        )
