"""What a folder of weights states of itself, read without torch: the names of its files, the shapes of its tensors."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping

from driftlens.base.errors import CheckpointError
from driftlens.base.files import from_json, plain_file

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


def stated_shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Shapes by key, of safetensors alone; nothing of what is missing or broken, which whoever opens it refuses."""
    from safetensors import SafetensorError, safe_open

    first = next((name for name in WEIGHT_FILES if (folder / name).is_file()), "")
    shapes: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(CheckpointError, SafetensorError, OSError):
        names = {*weight_map(folder / first).values()} if first.endswith(".json") else {first}
        for name in sorted(names):
            if pathlib.PurePath(name).name == name and name.endswith(".safetensors"):
                with safe_open(folder / name, framework="np") as file:
                    keys: list[str] = file.keys()
                    shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    return shapes
