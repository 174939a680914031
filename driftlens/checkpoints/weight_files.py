"""Weight files and folders of them. Entry points: `open_file` and `open_folder`."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from driftlens.checkpoints.unsupported import STATE_DICT_KEYS, conversion, refuse_pointer
from driftlens.utils.errors import CheckpointError, some_of
from driftlens.utils.files import from_json, plain_file

# Torch is imported only to open a file, so that missing files are refused sooner.
if TYPE_CHECKING:
    from driftlens.checkpoints.tensor_sources import StateSource

# Weight files of a folder in order of preference: safetensors can be read without building objects.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER = "adapter_config.json"


def is_lora_folder(folder: pathlib.Path) -> bool:
    """Return True if a folder contains peft adapters instead of a whole model."""
    return (folder / ADAPTER).is_file()


def weight_map(index: pathlib.Path) -> Mapping[str, str]:
    """Read the file name of each tensor's shard from an index."""
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
            hint="Expected JSON with a `weight_map` from tensor names to files; download it again.",
        )
    return shards


def weights_in(folder: pathlib.Path) -> pathlib.Path:
    """Return the file of a folder that its weights are read from, or the index of their shards."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
        # Copies of a Hub cache contain links to its blobs.
        if (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder / name} is a broken link to {(folder / name).readlink()}",
                hint="Copy or download the folder again, following links (cp -rL).",
            )
    there = some_of(sorted(entry.name for entry in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder} holds no weights; found {there}",
        hint=f"Expected one of {', '.join(WEIGHT_FILES)}; give other files by path.",
    )


def shards(index: pathlib.Path, listed: Mapping[str, str]) -> dict[str, pathlib.Path]:
    """Return the files that an index lists, by name, without those that the model does not need."""
    files = {name: index.parent / name for name in sorted({*listed.values()})}
    there = {key.partition(".")[0] for key, name in listed.items() if files[name].is_file()}
    # Published folders may leave out shards of parts that only training uses. A missing head is never one of
    # these: the model could not answer without it.
    needed = {name for key, name in listed.items() if key.partition(".")[0] in there or "head" in key}
    files = {name: path for name, path in files.items() if not there or name in needed}
    for name, path in files.items():
        # An untrusted index must not point out of its folder.
        if path.name != name:
            raise CheckpointError(
                f"{index} names a shard outside its folder: {name}", hint="Don't use this folder."
            )
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, but {index.name} lists it", hint="Download or copy the missing shard."
            )
    return files


def open_folder(folder: pathlib.Path) -> StateSource:
    """Open the weights in a folder of `save_pretrained`, open_clip or the Hub."""
    path = weights_in(folder)
    return _open_shards(path) if path.suffix == ".json" else open_file(path)


def shards_of(source: StateSource) -> Mapping[str, str]:
    """Return the file name of each tensor's shard for a source that `open_folder` made; empty for others."""
    folder = pathlib.Path(source.name)
    index = next((path for name in WEIGHT_FILES if (path := folder / name).is_file()), None)
    return weight_map(index) if index is not None and index.suffix == ".json" else {}


def open_file(path: pathlib.Path) -> StateSource:
    """Open the weights in one `.safetensors` or PyTorch file."""
    from driftlens.checkpoints.tensor_sources import SafetensorsSource

    refuse_pointer(path)
    return SafetensorsSource(path) if path.suffix.lower() == ".safetensors" else _open_torch_file(path)


def _open_shards(index: pathlib.Path) -> StateSource:
    """Open the shards of an index as one source and read all headers."""
    from driftlens.checkpoints.tensor_sources import Composed

    listed = weight_map(index)
    sources = {shard: open_file(path) for shard, path in shards(index, listed).items()}
    there = {
        key: (sources[shard], key)
        for key, shard in listed.items()
        if shard in sources and key in sources[shard].headers
    }
    # A few tensors that only the index lists are left out, and code that needs one reports it; with most of
    # them missing, the files belong to another model.
    if 2 * len(there) < len(listed):
        missing = next(key for key in listed if key not in there)
        raise CheckpointError(
            f"{index} lists {missing!r} in {listed[missing]}, which lacks it",
            hint="Index and shards do not match; download or save the folder again.",
        )
    return Composed(str(index.parent), there)


def folder_notices(source: StateSource) -> list[str]:
    """Return notices about a folder of weights: adapters next to a whole model, tensors that only the index lists."""
    place = pathlib.Path(source.name)
    folder = place.parent if place.name in WEIGHT_FILES else place
    if is_lora_folder(folder):
        whole = [name for name in WEIGHT_FILES if (folder / name).is_file()]
        return [f"{folder} holds adapters and {whole[0]}; the adapters are used"] if whole else []
    ghosts = [key for key in shards_of(source) if key not in source.headers]
    named = some_of([*map(repr, ghosts)], 1)
    return [f"{folder}: its index lists {named}, missing from all files and unused"] if ghosts else []


# The first version whose `weights_only` reader has no known vulnerability.
SAFE_TORCH = (2, 10)
# Types that `torch.load` may build in addition to its own: training scripts save their command line.
SAFE_TYPES: list[Any] = [argparse.Namespace]


def _open_torch_file(path: pathlib.Path) -> StateSource:
    """Open a PyTorch checkpoint that holds tensors, memory-mapped where its format allows that.

    Training checkpoints may keep the weights under `state_dict`, `model` or `model_state_dict`.

    Raises:
        CheckpointError: The file is damaged, holds no tensors, or holds objects that only code could build.
    """
    import torch
    from torch import Tensor

    from driftlens.checkpoints.tensor_sources import TensorsSource

    content = _load(path)
    if isinstance(content, Mapping):
        content = next(
            (content[key] for key in STATE_DICT_KEYS if isinstance(content.get(key), Mapping)), content
        )
        tensors = {
            key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)
        }
    else:
        tensors = {}
    if not tensors:
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} without tensors, expected weights",
            hint=f"Save `model.state_dict()` as safetensors, or under {', '.join(STATE_DICT_KEYS)}.",
        )
    # Half of a model must not pass for all of it.
    nested = next(
        (key for key, value in content.items() if key not in tensors and _holds_weights(value)), None
    )
    if nested is not None:
        raise CheckpointError(
            f"{path}: the entry {str(nested)[:40]!r} also holds weights, which would be ignored",
            hint=f"Save all weights as safetensors, or under {', '.join(STATE_DICT_KEYS)}.",
        )
    for key, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{path}: tensor {key!r} is sparse or quantised", hint="Save it dense.")
    # DistributedDataParallel holds the model as its submodule `module`.
    prefix = "module." if all(key.startswith("module.") for key in tensors) else ""
    return TensorsSource(str(path), {key.removeprefix(prefix): value for key, value in tensors.items()})


def _holds_weights(value: Any) -> bool:
    """Return True if a value is a mapping with tensors at names, however deep."""
    from torch import Tensor

    entries = value.values() if isinstance(value, Mapping) else ()
    return any(isinstance(entry, Tensor) or _holds_weights(entry) for entry in entries)


def _load(path: pathlib.Path) -> Any:
    """Return what `torch.load` builds from a file without running code of the file."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_TORCH:
        raise CheckpointError(
            f"{path} can run code when torch {torch.__version__} reads it (CVE-2026-24747)",
            hint=f"Install torch {SAFE_TORCH[0]}.{SAFE_TORCH[1]} or newer, or convert the file to safetensors.",
        )
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(SAFE_TYPES):
            warnings.simplefilter("ignore")
            # Only the zip format, which PyTorch writes since 1.6, can be mapped.
            is_zip = zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
        # PyTorch goes from the cause to the advice to allow the type, which would run the file's code.
        reason = reason.splitlines()[0].partition(". ")[0].partition(" was not an allowed global")[0]
        if isinstance(error, pickle.UnpicklingError) or "TorchScript" in reason:
            raise CheckpointError(
                f"{path} holds objects other than tensors ({reason})", hint=conversion(path)
            ) from error
        raise CheckpointError(
            f"{path} is not a complete PyTorch checkpoint ({reason})",
            hint="It may be truncated; copy or download it again.",
        ) from error
