"""Reading files of weights and folders of them, without ever unpickling what is not a tensor."""

from __future__ import annotations

import pathlib
import re
import shlex
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftlens.base.errors import CheckpointError
from driftlens.base.files import from_json, plain_file
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

NESTS = ("state_dict", "model", "model_state_dict")
"""Where training checkpoints keep the weights."""


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


def refuse_pointer(path: pathlib.Path) -> None:
    """Refuse what Git LFS leaves in the place of a file that was not fetched.

    Raises:
        CheckpointError: it is such a pointer.
    """
    with plain_file(path).open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights",
            hint="Run `git lfs pull` in its folder.",
            source=str(path),
        )


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


def _read_by_ourselves(path: pathlib.Path) -> StateSource:
    """The same tensors by the machine of `driftlens convert`, which builds nothing else.

    Raises:
        CheckpointError: as `open_torch_file`.
    """
    from driftlens.checkpoints.pickles import Pickled  # it needs this module

    found = Pickled(path)
    if found.modules:
        raise CheckpointError(
            f"{path} holds modules, not only tensors", hint=conversion(path), source=str(path)
        )
    prefix = "module." if all(key.startswith("module.") for key in found.headers) else ""
    return renamed(found, {key.removeprefix(prefix): key for key in found.headers})


def conversion(path: pathlib.Path) -> str:
    """How to convert a checkpoint with objects in it to safetensors, as advice with a command."""
    command = f"driftlens convert {shlex.quote(str(path))}"
    return f"Its tensors can be read without running anything; convert it to safetensors:\n{command}"


def by_hand(path: pathlib.Path) -> str:
    """How to convert a checkpoint that `driftlens convert` refuses, as advice with a command that trusts it."""
    return _advice(
        path,
        "x = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
        "x = x.state_dict() if hasattr(x, 'state_dict') else x.get('state_dict') or x.get('model') or x",
    )


def _advice(path: pathlib.Path, load: str) -> str:
    """How to save as safetensors what the code `load` calls `x`."""
    names = shlex.quote(path.name), shlex.quote(path.with_suffix(".safetensors").name)
    return (
        "If you trust it, convert it in the environment that made it:\n"
        f'python -c "import sys, torch, safetensors.torch as st; {load}; '
        f'st.save_file({{k: v.clone().contiguous() for k, v in x.items()}}, sys.argv[2])" {" ".join(names)}'
    )


def _load(path: pathlib.Path, *, mapped: bool) -> object:
    try:
        with warnings.catch_warnings():
            # Remarks on pickle protocols and sparse tensors; what matters of them is decided below.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a hostile or broken file provokes, none of it is a tensor
        raise _refusal(path, error) from error


def _refusal(path: pathlib.Path, error: Exception, *, convertible: bool = True) -> CheckpointError:
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found:
        return CheckpointError(
            f"{path} holds {found[1]}, not only tensors; reading that would run code from the file",
            hint=conversion(path),
            source=str(path),
            found=found[1],
        )
    again = "Copy or download it again, if it was cut short on the way."
    return CheckpointError(
        f"{path} is not a complete PyTorch checkpoint ({type(error).__name__})",
        hint=f"{again} {conversion(path)}" if convertible else again,
        source=str(path),
    )


def refuse_torchscript(path: pathlib.Path) -> bool:
    """Refuse a TorchScript archive, and one whose parts unfold; tells whether the file is a zip file at all.

    Raises:
        CheckpointError: it is one of these, or a damaged zip file.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # damaged archives have many: names that are no text, unknown versions
        raise _refusal(path, error, convertible=False) from error
    names = [entry.filename for entry in entries]
    if any(name.endswith("/constants.pkl") for name in names) and any("/code/" in name for name in names):
        raise CheckpointError(
            f"{path} is a TorchScript archive: a program, not a state dict",
            hint=_advice(path, "x = torch.jit.load(sys.argv[1], map_location='cpu').state_dict()"),
            source=str(path),
        )
    # PyTorch never packs; what is packed may unfold to any size.
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise CheckpointError(
            f"{path}: its part {packed.filename} is compressed", hint="Don't use this file.", source=str(path)
        )
    return True


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
