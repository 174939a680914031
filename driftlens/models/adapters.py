"""Write the change from a base to a model as LoRA adapters that peft loads. Entry point: `write_adapter`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.loading import find_config_folder, is_hub_id
from driftlens.checkpoints.tensor_sources import StateSource, TensorHeader, require_key
from driftlens.checkpoints.unsupported import ADAPTER
from driftlens.linalg.ridge import low_rank_factors
from driftlens.models.architecture import Architecture
from driftlens.models.readouts import TokenEncoder
from driftlens.models.saving import save_state_dict
from driftlens.utils.errors import SpecError
from driftlens.utils.files import require_unused_path, write_json_atomic

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TASK_TYPES = {"hf-decoder": "CAUSAL_LM", "hf-seq2seq": "SEQ_2_SEQ_LM"}
# Modules with a matrix that may be saved whole.
_MATRICES = (nn.Embedding, nn.modules.conv._ConvNd)
_REMEDY = "Save the whole model with --save-weights."


def check_adapter(
    architecture: Architecture, base: StateSource | None, model: StateSource, path: str | os.PathLike[str]
) -> None:
    """Raise if a model can't be saved as adapters of a base, before anything is computed for it.

    Args:
        architecture: the architecture of both.
        base: the base under the skeleton's key names; None without one.
        model: a model under the same names that changes the same tensors, such as the merged one.
        path: the folder of the adapters.
    """
    if base is None:
        raise SpecError("adapters are added to a base, but the run has none", hint=_REMEDY)
    if pathlib.Path(path).suffix:
        raise SpecError(f"{path}: adapters are saved as a folder", hint="Use a name without suffix.")
    require_unused_path(path)
    _AdapterTensors(architecture, base, model, 1)


def write_adapter(
    architecture: Architecture, base: StateSource, model: StateSource, folder: pathlib.Path, rank: int, origin: str
) -> dict[str, Any]:
    """Write the change from a base to a model into a folder; return rank, kept share, and counts of modules.

    Args:
        architecture: the architecture of both.
        base: the base under the skeleton's key names.
        model: the model under the same names.
        folder: an empty folder.
        rank: the largest rank of a module.
        origin: the base's path or Hub id.
    """
    from peft import LoraConfig

    tensors = _AdapterTensors(architecture, base, model, rank)
    save_state_dict(folder / _WEIGHTS, tensors)
    task_type = _TASK_TYPES.get(architecture.loader)
    kind = type(_library_model(architecture.skeleton)[0])
    place, _, revision = origin.partition("@") if is_hub_id(origin) else (find_config_folder(origin) or origin, "", "")
    # B A is the change itself, so alpha equals the rank.
    clipped = {path: own for path, own in tensors.ranks.items() if own != rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=clipped,
        alpha_pattern=clipped,
        target_modules=[*tensors.ranks],
        modules_to_save=tensors.whole or None,
        bias="lora_only" if tensors.has_biases else "none",
        fan_in_fan_out=tensors.is_transposed,
        ensure_weight_tying=tensors.has_tied_head,
        task_type=task_type,
        base_model_name_or_path=str(place),
        revision=revision or None,
        inference_mode=True,
        auto_mapping=None if task_type else {"base_model_class": kind.__name__, "parent_library": kind.__module__},
    ).to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in sorted(config.items())}
    write_json_atomic(folder / ADAPTER, plain)
    return {
        "rank": rank,
        "kept": 1 - tensors.lost / tensors.change,
        "low_rank": len(tensors.ranks),
        "whole": len(tensors.whole),
        "bytes": (folder / _WEIGHTS).stat().st_size,
    }


class _AdapterTensors:
    """The tensors of LoRA adapters that turn a base into a model, computed as they are read.

    The change of a linear module's weight is replaced by B A, its best approximation of rank r (Eckart-Young). Every
    other changed module is saved whole: norms, convolutions, and embeddings with all modules tied to them.
    """

    def __init__(self, architecture: Architecture, base: StateSource, model: StateSource, rank: int) -> None:
        self.name, self._base, self._model = model.name, base, model
        library, prefix = _library_model(architecture.skeleton)
        # Library key -> key in the sources. A tied tensor is stored under one of its names.
        self._stored = {
            key.removeprefix(prefix): name
            for key in architecture.keys
            for name in architecture.chain.tied.get(key, (key,))
            if name in model.headers
        }
        changed = {key for key, name in self._stored.items() if _is_changed(base, model, name)}
        for key, reason in _parameters_without_adapter(architecture):
            if key.removeprefix(prefix) in changed:
                raise SpecError(f"{key!r} changes, which adapters of peft can't hold: {reason}", hint=_REMEDY)
        modules = dict(library.named_modules(remove_duplicate=False))
        tied = {key.removeprefix(prefix) for key in architecture.chain.tied}
        # `fan_in_fan_out` is one setting for all modules: next to Conv1D, an `nn.Linear` is saved whole.
        self.is_transposed = any(map(_is_conv1d, modules.values()))
        low_rank = {
            path
            for path, module in modules.items()
            if (_is_conv1d(module) if self.is_transposed else isinstance(module, nn.Linear))
            and (key := f"{path}.weight") in changed
            and key not in tied
        }
        owners = {key.rpartition(".")[0] for key in changed} - low_rank
        # A module is saved with those inside it.
        owners = {path for path in owners if not path.startswith(tuple(f"{owner}." for owner in owners))}
        self.has_tied_head = any(f"{path}.weight" in tied and isinstance(modules[path], nn.Linear) for path in owners)
        # peft also replaces every other module whose path ends like one of these.
        self.whole = sorted(path for path in modules if path.endswith(tuple(owners)))
        saved = tuple(f"{path}." for path in self.whole)
        shapes = {path: model.headers[self._stored[f"{path}.weight"]].shape for path in sorted(low_rank)}
        self.ranks = {path: min(rank, *shape) for path, shape in shapes.items() if not f"{path}.".startswith(saved)}
        if not self.ranks:
            raise SpecError(f"no linear module of {model.name} differs from the base's", hint=_REMEDY)
        self._places = {f"{_PREFIX}{key}": name for key, name in self._stored.items() if key.startswith(saved)}
        biases = {f"{path}.bias" for path in self.ranks} & self._stored.keys()
        self.has_biases = not biases.isdisjoint(changed)
        for key in sorted(biases) if self.has_biases else ():
            self._places[f"{_PREFIX}{key.removesuffix('bias')}base_layer.bias"] = self._stored[key]
        self.headers = {place: model.headers[name] for place, name in self._places.items()}
        for path, own in self.ranks.items():
            rows, columns = reversed(shapes[path]) if self.is_transposed else shapes[path]
            self.headers[f"{_PREFIX}{path}.lora_A.weight"] = TensorHeader((own, columns), torch.float32)
            self.headers[f"{_PREFIX}{path}.lora_B.weight"] = TensorHeader((rows, own), torch.float32)
        # Squared Frobenius norms of the change of these modules, and of the part that the adapters lose.
        self.change = self.lost = 0.0
        self._factors = dict[str, Tensor]()

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor that is saved whole, or A or B of a module; both are computed for the first of them."""
        require_key(self, key)
        if key in self._places:
            return self._model.read(self._places[key], rows)
        if key not in self._factors:
            path = key.removeprefix(_PREFIX).rpartition(".lora_")[0]
            name = self._stored[f"{path}.weight"]
            base, model = (source.read(name).double() for source in (self._base, self._model))
            change = (model - base).mT if self.is_transposed else model - base
            up, down = (factor.float() for factor in low_rank_factors(change, self.ranks[path]))
            self.change += float(change.square().sum())
            self.lost += float((change - up.double() @ down.double()).square().sum())
            # Only those of one module, since all together may exceed memory.
            self._factors = {f"{_PREFIX}{path}.lora_A.weight": down, f"{_PREFIX}{path}.lora_B.weight": up}
        factor = self._factors[key]
        return factor if rows is None else factor[slice(*rows)]


def _library_model(skeleton: nn.Module) -> tuple[nn.Module, str]:
    """Return the module of the library that adapters are loaded into, and the prefix of its paths in the skeleton."""
    if isinstance(skeleton, TokenEncoder):
        return skeleton.get_submodule(skeleton.base_model_prefix), f"{skeleton.base_model_prefix}."
    return skeleton, ""


def _is_conv1d(module: nn.Module) -> bool:
    """Return True for the linear module of GPT-2, which stores [in, out]."""
    return type(module).__name__ == "Conv1D"


def _is_changed(base: StateSource, model: StateSource, key: str) -> bool:
    if key not in base.headers or key not in model.headers:
        return False
    value = model.read(key)
    # The rounding of a model that is stored in fewer bits is no change.
    return not torch.equal(base.read(key).to(value.dtype), value)


def _parameters_without_adapter(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Yield the parameters that adapters can't hold if they change, with the reason."""
    modules = dict(architecture.skeleton.named_modules())
    shapes = {key: value.shape for key, value in architecture.skeleton.state_dict(keep_vars=True).items()}
    inside = {slot.key for layer in architecture.chain.blocks for slot in layer.parameters.values()}
    linear = {key.rpartition(".")[0] for key in inside if isinstance(modules.get(key.rpartition(".")[0]), nn.Linear)}
    for key, shape in shapes.items():
        owner, _, _ = key.rpartition(".")
        if owner in linear or _is_conv1d(modules[owner]):
            continue
        if not owner or any(path.startswith(f"{owner}.") for path in linear):
            yield key, f"{owner or 'the model itself'} has linear modules, and would be saved whole"
        elif key in inside and len(shape) > 2 and not isinstance(modules[owner], _MATRICES):
            yield key, f"{type(modules[owner]).__name__} is not a linear module"
