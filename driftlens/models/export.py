"""Models written back: the layers' tensors into checkpoint tensors, and these into the base's own format."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from driftlens.errors import IncompatibleModelsError, SpecError
from driftlens.files import atomic_folder, write_json_atomic, write_text_atomic
from driftlens.models.alignment import key_map, tower_prefix
from driftlens.models.architecture import Architecture, FolderFormat
from driftlens.models.chain import LayerChain
from driftlens.models.loading import StateSource, renamed
from driftlens.models.saving import patched, save_state_dict


def fused(
    chain: LayerChain, parameters: Mapping[tuple[int, str], Tensor], start: StateSource
) -> dict[str, Tensor]:
    """Checkpoint tensors with the given layer parameters written into them.

    Args:
        chain: says where each parameter lies.
        parameters: (layer index, the layer's own parameter name) -> value in the layer's layout.
        start: the model that is changed, under the skeleton's key names: of a fused tensor, rows that
            `parameters` doesn't give are those of `start`.

    Returns:
        The skeleton's key -> whole tensor, in the layout and dtype of `start`, for every key that is touched.
    """
    tensors: dict[str, Tensor] = {}
    for (index, name), value in parameters.items():
        slot = chain.layers[index - 1].parameters[name]
        if slot.key not in tensors:
            tensors[slot.key] = start.read(slot.key).clone()
        rows = slice(None) if slot.rows is None else slice(*slot.rows)
        tensors[slot.key][rows] = (value.mT if slot.transposed else value).detach().to(tensors[slot.key])
    return tensors


def save_model(
    architecture: Architecture,
    base: StateSource,
    model: StateSource,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    card: str | None = None,
) -> None:
    """Write a model the way its base is stored: the base's keys and dtypes, and what else its file holds.

    Args:
        architecture: of both.
        base: the base under its own key names; text tower and logit scale come from it.
        model: the model to save, under the skeleton's key names (see `patched` and `fused`).
        path: ending in `.safetensors`, a state dict; anything else, a folder that the original library loads.
        metadata: strings for the header of the weights.
        card: text of the folder's README.md.

    Raises:
        SpecError: a folder is asked for, but the architecture has no such form or the base is only a part.
        IncompatibleModelsError: the model and the base are of different architectures.
        RunError: `path` can't be written to, or is a folder that is not empty.
    """
    canonical = {stored: key for key, stored in _stored_keys(architecture, base, model).items()}
    target = pathlib.Path(path)
    if target.suffix == ".safetensors":
        save_state_dict(target, patched(base, _Tensors(model, canonical)), metadata)
        return
    if architecture.folder is None:
        raise SpecError(
            f"a {architecture.source} can only be saved as a state dict",
            hint="Give a path ending in .safetensors.",
        )
    names = _library_names(architecture, base, architecture.folder)
    updates = {name: canonical[key] for name, key in names.items() if key in canonical}
    weights = patched(renamed(base, names), _Tensors(model, updates))
    with atomic_folder(target) as folder:
        for file, content in architecture.folder.configs.items():
            write_json_atomic(folder / file, content)
        if card is not None:
            write_text_atomic(folder / "README.md", card)
        save_state_dict(folder / architecture.folder.weights, weights, metadata)


class _Tensors(Mapping[str, Tensor]):
    """Tensors of a source under other keys, read whenever they are asked for and not kept."""

    def __init__(self, source: StateSource, keys: Mapping[str, str]) -> None:
        self._source = source
        self._keys = keys

    def __getitem__(self, key: str) -> Tensor:
        return self._source.read(self._keys[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # the inherited one would read the tensor


def _stored_keys(architecture: Architecture, base: StateSource, model: StateSource) -> dict[str, str]:
    """The skeleton's key of each parameter of the chain -> the base's key."""
    keys = architecture.chain.parameter_keys()
    layout = architecture.layout
    stored = (
        {key: key for key in base.headers}
        if layout is None
        else key_map(base.headers, architecture.keys, layout, base.name)
    )
    for source, held in ((base, stored), (model, model.headers)):
        missing = next((key for key in keys if key not in held), None)
        if missing is not None:
            raise IncompatibleModelsError(
                f"{source.name} lacks {missing!r}, so the model can't be saved in the form of the base",
                hint="Both must be whole models of one architecture.",
                key=missing,
            )
    return {key: stored[key] for key in keys}


def _library_names(architecture: Architecture, base: StateSource, folder: FolderFormat) -> dict[str, str]:
    """The library's own key -> the base's, without the prefix of whatever wrapped the base."""
    assert architecture.layout is not None  # whatever can be saved as a folder has one
    layout = architecture.layout
    wrapper = tower_prefix(base.headers, layout, base.name).removesuffix(layout.tower)
    names = {key.removeprefix(wrapper): key for key in base.headers if key.startswith(wrapper)}
    missing = next((key for key in folder.required() if key not in names), None)
    if missing is not None:
        raise SpecError(
            f"{base.name} is only a part of the model: {missing!r} is missing",
            hint="A folder wants a whole CLIP as base; a path ending in .safetensors doesn't.",
        )
    return names
