"""Write models in the format of the base, tensor by tensor, and atomically."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from driftlens.checkpoints.alignment import FileLayoutSource
from driftlens.checkpoints.loading import (
    MODULES,
    NEVER_WRITTEN,
    WEIGHT_FILES,
    companion_files,
    find_config_folder,
    flat_modules_json,
    read_json,
    shard_by_tensor,
)
from driftlens.checkpoints.tensor_sources import (
    DTYPES,
    InMemorySource,
    LazyTensors,
    StateSource,
    TensorHeader,
    check_finite,
    rename_keys,
    require_key,
    tensor_bytes,
)
from driftlens.models.architecture import Architecture, FolderFormat
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, ShapeError, SpecError
from driftlens.utils.files import (
    atomic_folder,
    atomic_path,
    parse_json,
    require_unused_path,
    write_json_atomic,
    write_text_atomic,
)

# The header is padded to the width of the widest dtype, so that readers can map tensors without a copy.
_ALIGNMENT = 8
_CODE = frozenset(("auto_map", "custom_pipelines"))

log = logging.getLogger("driftlens")


class PatchedSource:
    """A tensor source with some tensors replaced, in the base's keys, order and dtypes."""

    def __init__(self, base: StateSource, updates: Mapping[str, Tensor]) -> None:
        for key in updates:
            require_key(base, key)
        self.name = base.name
        self.headers = base.headers
        self._base = base
        self._updates = updates

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the update of `key` in the base's dtype, or the base's own tensor."""
        if key not in self._updates:
            return self._base.read(key, rows)
        header, update = self.headers[key], self._updates[key].detach()
        if tuple(update.shape) != header.shape:
            raise ShapeError(
                f"{key!r} has shape {list(update.shape)}; expected {list(header.shape)} as in {self.name}",
                hint="Use the layout of the base's checkpoint.",
                key=key,
            )
        if update.is_floating_point() and not header.dtype.is_floating_point:
            raise CheckpointError(
                f"{self.name}: {key!r} is {header.dtype}, so a floating-point update would be truncated"
            )
        value = (update if rows is None else update[slice(*rows)]).to("cpu", header.dtype)
        # After the cast: a finite float32 may be infinite in float16.
        kept = str(header.dtype).removeprefix("torch.")
        hint = f"It may be too large for {kept}. Try other settings or another --out-dtype."
        check_finite(f"the update of {self.name}", key, value, hint)
        return value


def save_state_dict(
    path: str | os.PathLike[str],
    tensors: StateSource | Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a safetensors file, atomically. A source is streamed tensor by tensor.

    Args:
        path: the file.
        tensors: a source, or tensors by name; those that share storage are written separately.
        metadata: strings for the header; `format: pt` is added, which transformers requires.
    """
    # Written here, because the safetensors library can only write tensors that are all in memory.
    source = InMemorySource("tensors", dict(tensors)) if isinstance(tensors, Mapping) else tensors
    headers = source.headers
    head, starts = _safetensors_header(headers, {"format": "pt", **(metadata or {})})
    total = len(head) + sum(header.nbytes for header in headers.values())
    with atomic_path(path, need=total) as target, target.open("wb") as file:
        file.write(head)
        for key in headers:
            tensor = source.read(key)
            assert TensorHeader(tuple(tensor.shape), tensor.dtype) == headers[key], key
            file.seek(len(head) + starts[key])
            file.write(tensor_bytes(tensor))
            # The next tensor is computed before the variable is replaced. Without this, two are in memory at once.
            del tensor


def _safetensors_header(
    headers: Mapping[str, TensorHeader], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the length and JSON header of a safetensors file, and the offset of each tensor after it."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    starts, end = dict[str, int](), 0
    # Widest dtypes first, so that each tensor is aligned to its width.
    for key in sorted(headers, key=lambda key: -headers[key].dtype.itemsize):
        starts[key], end = end, end + headers[key].nbytes
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for key, header in headers.items():
        offsets = starts[key], starts[key] + header.nbytes
        entries[key] = {"dtype": names[header.dtype], "shape": header.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def save_model(
    architecture: Architecture,
    base: StateSource,
    model: StateSource,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    card: Callable[[str], str] | None = None,
    heads: Mapping[str, StateSource] = MappingProxyType({}),
) -> None:
    """Write a model in the format of its base: the base's keys, dtypes, shards and additional tensors.

    Tokenizer, processor, generation and license files are copied from the folder of the architecture, or else of the
    base; code is not.

    Args:
        architecture: the architecture of both.
        base: the base under its own key names; text tower and logit scale come from it.
        model: the model to save, under the skeleton's key names (see `PatchedSource` and `updated_tensors`).
        path: a path ending in `.safetensors` for a state dict, else a folder that the original library loads.
        metadata: strings for the header of the weights.
        card: Python that uses the folder (see `FolderFormat`) -> text of its README.md.
        heads: path in the folder -> a task's own head.
    """
    check_save_path(architecture, path)
    canonical = _skeleton_key_by_base_key(architecture, base, model)

    def updated_tensors(names: Mapping[str, str], wrapper: str) -> PatchedSource | FileLayoutSource:
        updates = {name: canonical[key] for name, key in names.items() if key in canonical}
        patched = PatchedSource(rename_keys(base, names), LazyTensors(updates, lambda name: model.read(updates[name])))
        # Without a layout, the base's keys are the skeleton's, so there is no wrapper to remove.
        return patched if architecture.layout is None else FileLayoutSource(patched, wrapper)

    target, form = pathlib.Path(path), architecture.folder
    if target.suffix == ".safetensors":
        save_state_dict(target, updated_tensors({key: key for key in base.headers}, ""), metadata)
        return
    assert form is not None and architecture.layout is not None  # `check_save_path` refused it
    names = _base_key_by_library_key(architecture, base, form)
    wrapper = architecture.layout.wrapper_prefix(base.headers, base.name)
    tensors = updated_tensors(names, wrapper)
    files = _keys_by_weight_file(base, tensors.headers, wrapper, form)
    companions = _files_to_copy(architecture, base, form)
    with atomic_folder(target) as folder:
        for name, place in companions.items():
            (folder / name).parent.mkdir(exist_ok=True)
            _copy_without_code(place, folder / name)
        for name, content in form.configs.items():
            # Configurations of transformers may contain Infinity, which is not valid JSON.
            write_json_atomic(folder / name, _config_without_code(content, name), allow_nan=True)
        for name, head in heads.items():
            (folder / name).parent.mkdir(exist_ok=True)
            save_state_dict(folder / name, PatchedSource(head, {}))
        for name, part in files.items():
            save_state_dict(folder / name, rename_keys(tensors, {key: key for key in part}), metadata)
        if len(files) > 1:
            places = {key: name for name, part in files.items() for key in part}
            size = sum(header.nbytes for header in tensors.headers.values())
            index = {"metadata": {"total_size": size}, "weight_map": places}
            write_json_atomic(folder / f"{form.weights}.index.json", index)
        if card is not None:
            usage = form.usage(names, [*form.configs, *companions, *heads])
            write_text_atomic(folder / "README.md", card(usage))


def library_prefix(architecture: Architecture, base: StateSource, key: str) -> str:
    """Return the prefix that module paths of the skeleton have in the library's whole model."""
    assert architecture.folder is not None and architecture.layout is not None
    stored = architecture.layout.key_map(base.headers, architecture.keys, base.name)[key]
    names = _base_key_by_library_key(architecture, base, architecture.folder)
    library = next(name for name, base_key in names.items() if base_key == stored)
    if not library.endswith(key):
        raise IncompatibleModelsError(
            f"{key!r} is {library!r} in the library, so correction modules can't be attached by name",
            hint="Save to a path ending in .safetensors.",
        )
    return library.removesuffix(key)


def check_save_path(architecture: Architecture, path: str | os.PathLike[str]) -> None:
    """Raise if a model can't be written to a path, before anything is computed for it."""
    place = pathlib.Path(path)
    if place.suffix in NEVER_WRITTEN:
        raise SpecError(
            f"{place}: models are saved as a folder or as safetensors, not as {place.suffix}",
            hint=f"Use {place.with_suffix('.safetensors')}, or a name without suffix for a folder.",
        )
    if architecture.folder is None and place.suffix != ".safetensors":
        raise SpecError(
            f"{architecture.source} can only be saved as a state dict",
            hint="Use a path ending in .safetensors.",
        )
    require_unused_path(place)


def _keys_by_weight_file(
    base: StateSource, keys: Collection[str], wrapper: str, form: FolderFormat
) -> dict[str, list[str]]:
    """Return the weight files to write with the keys of each: the base's shards, or one file for all keys."""
    # open_clip reads no index of shards.
    shards = shard_by_tensor(base) if f"{form.weights}.index.json" in WEIGHT_FILES else {}
    if not all(wrapper + key in shards for key in keys):
        return {form.weights: [*keys]}
    files: dict[str, list[str]] = {}
    for key in keys:
        shard = pathlib.PurePath(shards[wrapper + key]).stem.replace("pytorch_model", "model")
        files.setdefault(f"{shard}.safetensors", []).append(key)
    return files if len(files) > 1 else {form.weights: [*keys]}


def _files_to_copy(architecture: Architecture, base: StateSource, form: FolderFormat) -> dict[str, pathlib.Path]:
    """Return the files to copy from the architecture's folder, or else from the base's."""
    source, of_base = find_config_folder(architecture.source), find_config_folder(base.name)
    companions = {name: place for name, place in companion_files(source).items() if name not in form.configs}
    if companions or of_base == source:
        return companions
    # The configurations contain the preprocessing of images. A processor from another folder would override it.
    companions = {name: place for name, place in companion_files(of_base).items() if name not in form.configs}
    return {name: place for name, place in companions.items() if not name.endswith("processor_config.json")}


def _copy_without_code(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a file; leave out entries of configurations that name code."""
    if source.name == MODULES:
        write_json_atomic(target, flat_modules_json(parse_json(source.read_bytes())))
        return
    content = read_json(source) if source.name.endswith("config.json") else None
    plain = None if content is None else _config_without_code(content, source.name)
    if plain == content:
        shutil.copyfile(source, target)
    else:
        write_json_atomic(target, plain, allow_nan=True)


def _config_without_code(content: Any, file: str) -> Any:
    """Return a configuration without the entries that make a library run code from its folder."""
    if not isinstance(content, Mapping):
        return content
    for entry in _CODE & content.keys():
        log.warning("%s names custom code under %r; it is not saved", file, entry)
    return {key: _config_without_code(value, file) for key, value in content.items() if key not in _CODE}


def _skeleton_key_by_base_key(architecture: Architecture, base: StateSource, model: StateSource) -> dict[str, str]:
    """Return base key -> skeleton key; a tied weight may have two base keys."""
    chain, layout = architecture.chain, architecture.layout
    keys = chain.parameter_keys()
    stored = (
        {key: key for key in base.headers}
        if layout is None
        else layout.key_map(base.headers, architecture.keys, base.name)
    )
    for source, present in ((base, stored), (model, model.headers)):
        missing = next((key for key in keys if key not in present), None)
        if missing is not None:
            raise IncompatibleModelsError(
                f"{source.name} lacks {missing!r}, so the model can't be saved in the base's format",
                hint="Use whole models of one architecture.",
                key=missing,
            )
    # The head that computes scores belongs to no layer and is merged too.
    outer = [key for key in architecture.keys if key in stored and key in model.headers]
    canonical = {stored[key]: key for key in (*outer, *keys)}
    wrapper = layout.wrapper_prefix(base.headers, base.name) if layout is not None and chain.tied else ""
    for name, places in chain.tied.items():
        if wrapper + name in base.headers:
            canonical.setdefault(wrapper + name, next(place for place in places if place in model.headers))
    return canonical


def _base_key_by_library_key(architecture: Architecture, base: StateSource, folder: FolderFormat) -> dict[str, str]:
    """Return library key -> base key, without the prefix of a wrapper."""
    assert architecture.layout is not None  # as everything that can be saved as a folder
    wrapper = architecture.layout.wrapper_prefix(base.headers, base.name)
    names = {key.removeprefix(wrapper): key for key in base.headers if key.startswith(wrapper)}
    missing = next((key for key in folder.required() if key not in names), None)
    if missing is not None:
        raise SpecError(
            f"{base.name} is not a whole model: {missing!r} is missing",
            hint="Use a whole CLIP as base, or a path ending in .safetensors.",
        )
    return names
