"""Checkpoints as they lie on disk, opened without reading them and never unpickled."""

from __future__ import annotations

import os
import pathlib

from driftlens.errors import CheckpointError
from driftlens.models.hub import hub_folder, is_hub_id
from driftlens.models.lora import is_lora_folder, lora_source
from driftlens.models.sources import (
    StateSource,
    TensorHeader,
    check_finite,
    content_digest,
    module_source,
    renamed,
)
from driftlens.models.weight_files import conversion, open_file, open_folder

__all__ = [
    "StateSource",
    "TensorHeader",
    "check_finite",
    "content_digest",
    "lora_source",
    "module_source",
    "open_checkpoint",
    "renamed",
]

_READABLE = (".safetensors", ".pt", ".pth", ".bin")
_PICKLES = (".ckpt", ".pkl", ".pickle")
_REFUSED = {
    ".npz": ("an archive of NumPy arrays", "Save the state dict as safetensors."),
    ".gguf": ("a quantised GGUF file", "Use the original weights that it was made from."),
    ".onnx": ("an ONNX graph", "Use the original weights that it was exported from."),
    ".msgpack": ("a Flax checkpoint", "Load it with `from_flax=True` in transformers 4 and save it again."),
    ".h5": ("a Keras checkpoint", "Load it with `from_tf=True` in transformers 4 and save it again."),
}


def open_checkpoint(
    path: str | os.PathLike[str], *, offline: bool = False, base: StateSource | None = None
) -> StateSource:
    """The weights at `path`, ready to be read tensor by tensor; only headers have been read.

    Args:
        path: a `.safetensors`, `.pt`, `.pth` or `.bin` file; a folder as `save_pretrained`, open_clip or the
            Hub lay it out, in one file or in shards; where neither exists, a Hub id (`organisation/name`).
        offline: whether the Hub may not be asked; what is in its local cache is used all the same.
        base: the model that LoRA adapters are added to, for a folder that holds adapters only.

    Raises:
        CheckpointError: the file is missing, incomplete, of a kind that can't be read safely, or holds no
            tensors; the message names the file, the hint says what to do.
    """
    place = pathlib.Path(path).expanduser()
    if not place.exists() and isinstance(path, str) and is_hub_id(path) and place.suffix not in _READABLE:
        place = hub_folder(path, offline=offline)
    if place.is_dir():
        return _open_folder(place, base)
    _require_readable(place)
    return open_file(place)


def _open_folder(folder: pathlib.Path, base: StateSource | None) -> StateSource:
    if not is_lora_folder(folder):
        return open_folder(folder)
    if base is None:
        raise CheckpointError(
            f"{folder} holds LoRA adapters, not a whole model",
            hint="Give it as an expert, next to the base it was trained on; or merge it into that and save.",
            source=str(folder),
        )
    return lora_source(base, folder)


def _require_readable(path: pathlib.Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"there is no file {path}",
            hint="Check the path; relative paths in a spec start at the spec's folder.",
            source=str(path),
        )
    if path.suffix.lower() in _READABLE:
        return
    if path.suffix.lower() in _PICKLES:
        kind, remedy = "a pickle, which may hold code", conversion(path)
    else:
        kind, remedy = _REFUSED.get(path.suffix.lower(), ("of an unknown kind", "Save it as safetensors."))
    raise CheckpointError(
        f"{path} is {kind}; weights are read from {', '.join(_READABLE)}", hint=remedy, source=str(path)
    )
