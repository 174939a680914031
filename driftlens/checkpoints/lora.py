"""LoRA adapters, added to the base they were trained on as its weights are read."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import (
    CompositeSource,
    StateSource,
    TensorHeader,
    open_weights_file,
    promote_dtypes,
    require_key,
)
from driftlens.checkpoints.unsupported import ADAPTER
from driftlens.utils.errors import CheckpointError
from driftlens.utils.files import parse_json, regular_file

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPER = "base_model.model."
_REMEDY = (
    "Merge it with peft and give OUT: "
    "PeftModel.from_pretrained(model, FOLDER).merge_and_unload().save_pretrained(OUT)."
)
_RESTORE = f"Correct {ADAPTER}, or save the adapters with peft again."
UNGATHERED = (
    "DeepSpeed ZeRO-3 saved them without their values: save them again with "
    "stage3_gather_16bit_weights_on_model_save, or restore them from its checkpoint with zero_to_fp32.py."
)
# Options of peft's LoraConfig whose change of the model is more than `scaling * B @ A`.
_UNSUPPORTED = (
    *("target_parameters", "lora_bias", "layer_replication", "use_qalora", "use_bdlora"),
    *("alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config"),
    "trainable_token_indices",
)
_OF_ADAPTERS = re.compile(r"\.lora_|\.original_module\.")
_PART = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB]|magnitude_vector)(?:\.default)?(?:\.weight)?")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Infixes of peft in the names of tensors that are saved whole.
_COPIES = re.compile(r"(\.(modules_to_save|base_layer))+\.")
# Values of `init_lora_weights` that leave the base unchanged; PiSSA, OLoRA and LoftQ rewrite its weights.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def lora_base_model(folder: pathlib.Path) -> tuple[str, str]:
    """Return the base model and revision named in an adapter's configuration; empty if it names none."""
    config = _read_adapter_config(folder)
    return str(config.get("base_model_name_or_path") or ""), str(config.get("revision") or "")


# A rank or alpha; larger values would overflow.
_Number = Annotated[float, Field(gt=-1e9, lt=1e9)]


def _has_dotted_suffix(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


class _AdapterSettings(BaseModel):
    """Ranks, scalings and target modules in `adapter_config.json`; its other entries are kept as they are."""

    # Strict, because pydantic would turn the text "8" into a number, which peft would not.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    r: _Number
    lora_alpha: _Number
    rank_pattern: dict[str, _Number] | None = None
    alpha_pattern: dict[str, _Number] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None


@dataclass(frozen=True)
class _LoraUpdate:
    """The LoRA update of one weight [out, in]: scaling * up @ down; `magnitude` is the key of DoRA's row norms."""

    down: str
    up: str
    scaling: float
    is_transposed: bool
    magnitude: str = ""


class LoraSource:
    """LoRA adapters merged into a base on read: base + scaling * B @ A.

    `scaling` is lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`. With `use_dora`, rows of the sum are scaled
    to their trained lengths. An adapter's weight is found by the end of its name, so wrapper prefixes of the base do
    not matter. `modules_to_save`, biases and extended embeddings replace the base's tensors. Sources: LoRA
    (arXiv:2106.09685), Section 4.1; DoRA (arXiv:2402.09353), Eq. 5.
    """

    def __init__(self, base: StateSource, place: str | os.PathLike[str]) -> None:
        folder = pathlib.Path(place)
        self.name, self.base_name, self._folder = str(folder), base.name, folder
        self._config = _read_adapter_config(folder)
        self._settings = _validate_adapter_config(folder, self._config)
        self._is_transposed = bool(self._config.get("fan_in_fan_out"))
        weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
        if weights is None:
            raise _adapter_error(folder, f"{_WEIGHTS[0]} is missing", "Download the folder again.")
        self._adapters = open_weights_file(weights)
        if empty := [key for key, header in self._adapters.headers.items() if header.shape == (0,)]:
            reason = f"{len(empty)} of {len(self._adapters.headers)} tensors have shape [0], such as {empty[0]!r}"
            raise _adapter_error(folder, reason, UNGATHERED)
        self._saved = self._fully_saved_tensors(base)
        places = {key: (base, key) for key in base.headers}
        places |= {name: (self._adapters, key) for name, key in self._saved.items()}
        self._base: StateSource = CompositeSource(base.name, places)
        self._modules = self._adapter_keys_by_module()
        self._updates = self._match_updates_to_weights()
        self._require_saved_biases()
        # Sums are not rounded to the base's dtype: a model with unmerged adapters does not round them either.
        self.headers: Mapping[str, TensorHeader] = {
            key: replace(header, dtype=promote_dtypes(header.dtype, torch.float32)) if key in self._updates else header
            for key, header in self._base.headers.items()
        }

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop), with its adapter added."""
        require_key(self, key)
        weight = self._base.read(key, rows).to(self.headers[key].dtype)
        update = self._updates.get(key)
        return weight if update is None else self._add_adapter(key, update, weight, rows)

    def has_untied_head(self, table: str, head: str) -> bool:
        """Return True if the adapters make a tied output head differ from its embedding table."""
        changed = self._updates.keys() | self._saved.keys()
        if {table, head} <= self._saved.keys():
            return not self._has_equal_tensors(self._saved[table], self._saved[head])
        return head in changed or (table in changed and not self._config.get("ensure_weight_tying"))

    @property
    def adapted_keys(self) -> Collection[str]:
        """The weights that an adapter changes."""
        return self._updates.keys()

    @property
    def rslora_scalings(self) -> dict[int, float]:
        """The largest scaling for each rank, of adapters with `use_rslora`; empty for others."""
        scalings: dict[int, float] = {}
        for update in self._updates.values() if self._config.get("use_rslora") else ():
            rank = self._adapters.headers[update.down].shape[0]
            scalings[rank] = max(update.scaling, scalings.get(rank, update.scaling))
        return dict(sorted(scalings.items()))

    def _add_adapter(self, key: str, update: _LoraUpdate, weight: Tensor, rows: tuple[int, int] | None) -> Tensor:
        """Add an adapter's update to rows of a weight; for DoRA, scale the rows to their trained norms."""
        if rows is not None and update.magnitude and update.is_transposed:
            # Lengths belong to whole columns, so all rows are needed.
            return self.read(key)[slice(*rows)]
        down, up = (self._adapters.read(part).to(weight.dtype) for part in (update.down, update.up))
        within = slice(*rows) if rows is not None else slice(None)
        down, up = (down[:, within], up) if update.is_transposed else (down, up[within])
        delta = update.scaling * (up @ down)
        weight = weight + (delta.T if update.is_transposed else delta)
        if not update.magnitude:
            return weight
        lengths, axis = self._adapters.read(update.magnitude).to(weight.dtype), int(not update.is_transposed)
        return weight * (lengths[within] / torch.linalg.vector_norm(weight, dim=axis)).unsqueeze(axis)

    def _fully_saved_tensors(self, base: StateSource) -> dict[str, str]:
        """Map tensors that the adapter file stores in full, by the base's names or their own, to its keys."""
        modules = self._config.get("modules_to_save") or []
        places, unmatched = dict[str, str](), dict[str, str]()
        # A copy in modules_to_save comes last and takes precedence.
        for key in sorted(self._adapters.headers, key=lambda key: ".modules_to_save." in key):
            if _OF_ADAPTERS.search(key):
                continue
            name = _COPIES.sub(".", key.removeprefix(_WRAPPER))
            there = [
                base_key
                for base_key in base.headers
                if _has_dotted_suffix(base_key, name) or _has_dotted_suffix(name, base_key)
            ]
            there = [name] if name in there else there
            if len(there) == 1:
                places[there[0]] = key
            else:
                unmatched[name] = key
        for name, key in unmatched.items():
            # peft saves a tied tensor under each of its names.
            if any(self._has_equal_tensors(key, other) for other in places.values()):
                continue
            if not any(module in name.split(".") for module in modules):
                reason = f"{key!r} is neither an adapter nor a weight of {base.name}"
                raise _adapter_error(self._folder, reason, f"{self._base_hint} {_REMEDY}")
            places[name] = key
        return places

    def _has_equal_tensors(self, key: str, other: str) -> bool:
        source = self._adapters
        return source.headers[key] == source.headers[other] and torch.equal(source.read(key), source.read(other))

    def _require_saved_biases(self) -> None:
        kind = self._config.get("bias") or "none"
        biases = [f"{key.removesuffix('weight')}bias" for key in self._updates]
        lost = [key for key in biases if key in self._base.headers and key not in self._saved]
        if kind != "none" and lost:
            raise _adapter_error(self._folder, f"bias is {kind!r}, but {lost[0]!r} was not saved", _RESTORE)

    def _match_updates_to_weights(self) -> dict[str, _LoraUpdate]:
        """Map the base's weights to their LoRA updates; check ranks and shapes."""
        ranks = _values_by_module(self._settings.r, self._settings.rank_pattern or {}, self._modules)
        alphas = _values_by_module(self._settings.lora_alpha, self._settings.alpha_pattern or {}, self._modules)
        updates: dict[str, _LoraUpdate] = {}
        for name, (down, up, magnitude) in self._modules.items():
            # peft transposes the update of an embedding table, as it does for GPT-2's Conv1D (fan_in_fan_out).
            is_transposed = self._is_transposed or "lora_embedding" in down
            down_shape, up_shape = self._adapters.headers[down].shape, self._adapters.headers[up].shape
            if len(down_shape) != 2 or len(up_shape) != 2:
                reason = f"{name!r} is not linear: its lora_A has shape {list(down_shape)}"
                raise _adapter_error(self._folder, reason)
            rank, shape = down_shape[0], (up_shape[0], down_shape[1])
            if not 0 < rank == up_shape[1] or rank != ranks[name]:
                reason = f"{name!r} has rank {rank} in the weights and {ranks[name]:g} in {ADAPTER}"
                raise _adapter_error(self._folder, reason, "Correct r or rank_pattern there.")
            key = self._find_weight_key(f"{name}.weight", shape[::-1] if is_transposed else shape)
            if key in updates:
                raise _adapter_error(self._folder, f"two adapters fit {key!r} of {self._base.name}")
            if magnitude and self._adapters.headers[magnitude].shape != shape[:1]:
                lengths = list(self._adapters.headers[magnitude].shape)
                reason = f"{name!r} has lengths {lengths} for {shape[0]} rows"
                raise _adapter_error(self._folder, reason, _RESTORE)
            # Rank-stabilized LoRA (arXiv:2312.03732).
            root = math.sqrt(rank) if self._config.get("use_rslora") else rank
            updates[key] = _LoraUpdate(down, up, alphas[name] / root, is_transposed, magnitude)
        return updates

    def _targeted_modules(self, paths: Iterable[str], saved: Collection[str]) -> list[str]:
        """Return the paths that the configuration targets; `saved` are those of modules with adapters."""
        from peft.tuners.tuners_utils import check_target_module_exists

        targets = self._settings.target_modules
        if not targets or targets == "all-linear":
            # Only peft can expand these; at least, it treats all layers alike.
            kinds = {_NUMBER.sub("*", name) for name in saved}
            return [path for path in paths if _NUMBER.sub("*", path) in kinds]
        return [path for path in paths if check_target_module_exists(self._settings, path)]

    def _require_targeted_modules(self, modules: Collection[str]) -> None:
        """Refuse adapters of modules that the configuration does not target, because peft ignores them."""
        targeted = {*self._targeted_modules(modules, modules)}
        lost = [name for name in modules if name not in targeted]
        if lost:
            reason = f"peft ignores its adapter of {lost[0]!r} because of {ADAPTER}"
            hint = "Correct target_modules, exclude_modules, modules_to_save or layers_to_transform."
            raise _adapter_error(self._folder, reason, hint)

    def require_complete(self, model: nn.Module) -> None:
        """Refuse adapters that lack a targeted linear module of a model, or that transpose its weights wrongly."""
        # Conv1D, the linear module of GPT-2, stores [in, out].
        is_conv1d = {
            path: not isinstance(module, nn.Linear)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        }
        for key, update in self._updates.items():
            if is_conv1d.get(key.removesuffix(".weight"), update.is_transposed) != update.is_transposed:
                raise self._transposed_error(key)
        lost, count = self.lost_modules(is_conv1d)
        if lost:
            reason = f"{len(lost)} of {count} targeted modules have no tensors, such as {lost[0]!r}"
            hint = "Download or save the adapters again. Modules left out on purpose belong in exclude_modules."
            raise _adapter_error(self._folder, reason, hint)

    def lost_modules(self, linear_modules: Collection[str]) -> tuple[list[str], int]:
        """Return the targeted modules that have no tensors, and the number of all targeted ones.

        Args:
            linear_modules: paths of the model's linear modules.
        """
        pairs = (
            (name, path)
            for name, path in itertools.product(self._modules, linear_modules)
            if _has_dotted_suffix(name, path) or _has_dotted_suffix(path, name)
        )
        name, path = next(pairs, ("", ""))
        # The model's paths as the adapters spell them, in the towers and stacks of blocks that have adapters.
        added, removed = name[: max(0, len(name) - len(path))], path[: max(0, len(path) - len(name))]
        stacks = {_NUMBER.split(module)[0] for module in self._modules}
        paths = [added + path.removeprefix(removed) for path in linear_modules if path.startswith(removed)]
        paths = [path for path in paths if _NUMBER.split(path)[0] in {path, *stacks}]
        targeted = self._targeted_modules(paths, self._modules) if name else []
        return [path for path in targeted if path not in self._modules], len(targeted)

    def _transposed_error(self, key: str) -> CheckpointError:
        stated = str(self._is_transposed).lower()
        reason = f"fan_in_fan_out is {stated}, which transposes {key!r} wrongly"
        return _adapter_error(self._folder, reason, f"Set fan_in_fan_out to {str(not self._is_transposed).lower()}.")

    def _adapter_keys_by_module(self) -> dict[str, tuple[str, str, str]]:
        """Map module paths to the keys of A, B and DoRA's magnitude vector, which may be empty."""
        parts: dict[str, dict[str, str]] = {}
        for key in (key for key in self._adapters.headers if ".lora_" in key):
            match = _PART.fullmatch(key)
            if match is None:
                raise _adapter_error(self._folder, f"{key!r} is not A or B of a linear adapter")
            parts.setdefault(match["module"].removeprefix(_WRAPPER), {})[match["part"]] = key
        expected = {"A", "B", *(["magnitude_vector"] if self._config.get("use_dora") else [])}
        for module, held in parts.items():
            if held.keys() != expected:
                listed, there = (" and ".join(f"lora_{part}" for part in sorted(kinds)) for kinds in (expected, held))
                raise _adapter_error(self._folder, f"{module!r} has {there}, expected {listed}", _RESTORE)
        self._require_targeted_modules(parts)
        return {module: (keys["A"], keys["B"], keys.get("magnitude_vector", "")) for module, keys in parts.items()}

    def _find_weight_key(self, expected_key: str, shape: tuple[int, int]) -> str:
        """Find the base's only weight of this shape whose key ends like `expected_key`, or the reverse."""
        headers = self._base.headers
        candidates = [
            key
            for key in headers
            if _has_dotted_suffix(key, expected_key) or ("." in key and _has_dotted_suffix(expected_key, key))
        ]
        fitting = [key for key in candidates if headers[key].shape == shape]
        if expected_key in fitting:
            return expected_key
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            reason = f"the adapter of {expected_key!r} fits several weights: {', '.join(fitting)}"
            raise _adapter_error(self._folder, reason)
        if any(headers[key].shape == shape[::-1] for key in candidates):
            raise self._transposed_error(expected_key)
        near = f"; {candidates[0]!r} has {list(headers[candidates[0]].shape)}" if candidates else ""
        reason = f"the adapter of {expected_key!r} {list(shape)} fits no weight of {self._base.name}{near}"
        raise _adapter_error(self._folder, reason, self._base_hint)

    @property
    def _base_hint(self) -> str:
        named = self._config.get("base_model_name_or_path")
        return "Give the base of these adapters" + (f": {named}." if named else ".")


def _values_by_module(default: float, by_pattern: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """Return the rank or alpha of every module, by the first pattern that matches the end of its path."""
    from peft.utils.other import get_pattern_key

    # peft's own matching, so that ranks and alphas are those that peft would run.
    patterns = tuple(by_pattern)
    return {module: by_pattern.get(get_pattern_key(patterns, module), default) for module in modules}


def _read_adapter_config(folder: pathlib.Path) -> dict[str, Any]:
    """Read `adapter_config.json` and refuse unsupported options."""
    try:
        config = parse_json(regular_file(folder / ADAPTER).read_bytes())
    except (OSError, ValueError) as error:
        raise _adapter_error(folder, f"{ADAPTER} can't be read", "Download the folder again.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _adapter_error(folder, f"{ADAPTER}: unsupported peft_type, expected LORA")
    for option in _UNSUPPORTED:
        if config.get(option):
            raise _adapter_error(folder, f"{option} is {config[option]!r}")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise _adapter_error(folder, f"init_lora_weights is {config['init_lora_weights']!r}, which changes the base")
    return config


def _validate_adapter_config(folder: pathlib.Path, config: Mapping[str, Any]) -> _AdapterSettings:
    """Validate the adapter's settings and compile their patterns."""
    try:
        settings = _AdapterSettings.model_validate(config)
        named = (settings.rank_pattern, settings.alpha_pattern, settings.modules_to_save)
        patterns = [pattern for names in named for pattern in names or ()]
        patterns += [entry for entry in (settings.target_modules, settings.exclude_modules) if isinstance(entry, str)]
        # Compiled once here, since patterns come from an untrusted file: deep nesting exceeds the recursion limit
        # and huge repetitions overflow.
        for pattern in patterns:
            re.compile(pattern)
    except ValidationError as error:
        detail = error.errors()[0]
        reason = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}, got {str(detail['input'])[:80]!r}"
        raise _adapter_error(folder, reason, _RESTORE) from error
    except (re.error, RecursionError, OverflowError) as error:
        raise _adapter_error(folder, f"{ADAPTER} has an invalid pattern: {error}", _RESTORE) from error
    return settings


def _adapter_error(folder: pathlib.Path, reason: str, hint: str = _REMEDY) -> CheckpointError:
    return CheckpointError(f"LoRA adapters {folder}: {reason}", hint=hint)
