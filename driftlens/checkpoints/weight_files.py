"""Reading files of weights and folders of them, without ever unpickling what is not a tensor."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from driftlens.base.errors import CheckpointError
from driftlens.base.files import from_json, plain_file
from driftlens.checkpoints.refusals import conversion, refuse_pointer
from driftlens.checkpoints.sources import Composed, SafetensorsSource, StateSource
from driftlens.checkpoints.torch_files import open_torch_file

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
    """The weights in a folder written by `save_pretrained`, open_clip or a Hub download."""
    for name in WEIGHT_FILES:
        path = folder / name
        if path.is_file():
            return _open_shards(path) if path.suffix == ".json" else open_file(path)
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
    wanted = f"Wanted is one of {', '.join(WEIGHT_FILES)}; for another file give its own path."
    raise CheckpointError(
        f"{folder} holds no weights; there is {shown}",
        hint=conversion(folder) if "zeroshot.pt" in names else wanted,
        source=str(folder),
    )


def shards_of(source: StateSource) -> Mapping[str, str]:
    """The file name of each tensor's shard, of a source that `open_folder` made of shards; nothing for others."""
    folder = pathlib.Path(source.name)
    index = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    return _weight_map(index) if index is not None and index.suffix == ".json" else {}


def open_file(path: pathlib.Path) -> StateSource:
    """The weights in one file, `.safetensors` or PyTorch's."""
    refuse_pointer(path)
    return SafetensorsSource(path) if path.suffix.lower() == ".safetensors" else open_torch_file(path)


def _open_shards(index: pathlib.Path) -> StateSource:
    """Shards listed by an index file, as one source; the headers of all are read at once."""
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
