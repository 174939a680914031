"""What a folder of weights states of itself, read without torch: the names of its files."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from driftlens.base.errors import CheckpointError, NumericsError
from driftlens.base.files import from_json, plain_file
from driftlens.base.words import some_of

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names under which weights are looked for in a folder, best first."""
ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")


def is_lora_folder(folder: pathlib.Path) -> bool:
    """Whether a folder holds adapters as peft saves them, rather than a whole model."""
    return (folder / ADAPTER).is_file()


def weight_map(index: pathlib.Path) -> Mapping[str, str]:
    """The file name of each tensor's shard, as an index lists them."""
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
        )
    return shards


def weights_in(folder: pathlib.Path) -> pathlib.Path:
    """The file of a folder that its weights are read from, or the index of their shards."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
        if (folder / name).is_symlink():  # into a cache of the Hub, of which the folder was copied
            raise CheckpointError(
                f"{folder / name} is a link to {(folder / name).readlink()}, which isn't there",
                hint="Copy or download the folder again, with what its links lead to (cp -rL).",
            )
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
    inner = [name for name in names if any((folder / name / file).is_file() for file in WEIGHT_FILES)]
    hint = f"Wanted is one of {', '.join(WEIGHT_FILES)}; for another file give its own path."
    if any(_SHARD.search(name) for name in names):
        hint = "Its shards are there: download the index that lists them, *.index.json, too."
    elif inner:
        hint = f"There are weights in {some_of(inner)}: give that folder."
    raise CheckpointError(f"{folder} holds no weights; there is {shown}", hint=hint)


def shards(index: pathlib.Path, listed: Mapping[str, str]) -> dict[str, pathlib.Path]:
    """The files that an index lists, by their name there; without one that nothing would miss."""
    files = {name: index.parent / name for name in sorted({*listed.values()})}
    there = {key.partition(".")[0] for key, name in listed.items() if files[name].is_file()}
    # A part of the model that no file holds, like those for training alone; a head is its own part.
    needed = {name for key, name in listed.items() if key.partition(".")[0] in there or "head" in key}
    files = {name: path for name, path in files.items() if not there or name in needed}
    for name, path in files.items():
        if path.name != name:  # an index is data from elsewhere: it may not point out of its folder
            raise CheckpointError(
                f"{index} names a shard outside its folder: {name}", hint="Don't use this folder."
            )
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, though {index.name} lists it", hint="Download or copy the missing shard."
            )
    return files


@contextlib.contextmanager
def opened_safetensors(path: pathlib.Path) -> Iterator[Any]:
    """A file of tensors while it is open; damage that shows meanwhile is named."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}",
            hint="Copy or download it again; it was cut short or changed on the way.",
        ) from error


BROKEN = "The checkpoint is broken, or overflowed when it was cast; save it again from the original."
"""What to do about numbers of a file that are none."""


def not_finite(name: str, key: str, bad: int, count: int, hint: str = BROKEN) -> NumericsError:
    """The refusal of a tensor with NaN or infinity in it."""
    return NumericsError(
        f"{name}: tensor {key!r} holds {bad} NaN or infinite values of {count}",
        hint=hint,
        key=key,
    )
