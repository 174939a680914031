"""Preflight of the models: each opened by itself, so that one that is broken does not hide another."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from driftlens.access import Access
from driftlens.engine.pool import require_same_parameters
from driftlens.errors import DriftLensError, IncompatibleModelsError
from driftlens.models.architecture import Architecture
from driftlens.models.config_source import read_json
from driftlens.models.loading import StateSource, open_checkpoint
from driftlens.models.lora import is_lora_folder
from driftlens.models.open_clip_loader import CONFIG_FILE
from driftlens.models.vit import activation_name
from driftlens.pipeline.preflight.outcome import Preflight
from driftlens.pipeline.study.opening import OpenModels, dtype_notices, origins_of
from driftlens.pipeline.study.suspicion import label
from driftlens.spec import RunSpec


def check_models(spec: RunSpec, architecture: Architecture, checks: Preflight, access: Access) -> OpenModels:
    """The models of a spec that can be opened and fit the architecture; the others become findings.

    Args:
        spec: names them.
        architecture: of all of them.
        checks: where findings go.
        access: what may be used.
    """
    base = None
    origins = origins_of(spec)
    if spec.base is not None:
        place = spec.base.weights
        base = checks.attempt("base", lambda: open_checkpoint(place, offline=access.offline))
    opener = _Opener(architecture, base, spec.base is not None, checks, access)
    sources = {
        name: source for name, place in origins.items() if (source := opener.open(name, place)) is not None
    }
    models = OpenModels(architecture, base, sources, {name: origins[name] for name in sources})
    for text in dtype_notices(models):
        checks.notice("dtypes", text)
    return models


class _Opener:
    """Opens one model after the other, the base first."""

    def __init__(
        self,
        architecture: Architecture,
        base: StateSource | None,
        wants_base: bool,
        checks: Preflight,
        access: Access,
    ) -> None:
        self._architecture = architecture
        self._base = base
        self._canonical: StateSource | None = None
        self._wants_base = wants_base
        self._checks = checks
        self._access = access

    def open(self, name: str, place: str) -> StateSource | None:
        """One model under the skeleton's key names, or None after filing why it can't be had."""
        if name == "base" and self._base is None:
            return None  # said already
        try:
            source = self._aligned(name, place)
            require_same_parameters(self._architecture.skeleton, self._architecture.chain, source)
        except DriftLensError as error:
            self._file(name, place, error)
            return None
        if name == "base":
            self._canonical = source
        self._checks.ok(label(name), f"{_described(self._architecture, source)}, from {place}")
        self._compare(name, place, source)
        return source

    def _aligned(self, name: str, place: str) -> StateSource:
        if name == "base":
            assert self._base is not None
            return self._architecture.align(self._base)
        opened = open_checkpoint(place, base=self._base, offline=self._access.offline)
        return self._architecture.align(opened, fallback=self._canonical)

    def _file(self, name: str, place: str, error: DriftLensError) -> None:
        if self._wants_base and self._canonical is None and name != "base" and self._is_part(place, error):
            text = f"the {label(name)} needs the base, which can't be used, and was not checked"
            self._checks.notice(label(name), text)
        else:
            self._checks.problem(label(name), error)

    def _is_part(self, place: str, error: DriftLensError) -> bool:
        """Whether the model lacks only what a base would have given: LoRA's weights, or the projection."""
        layout = self._architecture.layout
        lacks = str(error.context.get("key", "")) if isinstance(error, IncompatibleModelsError) else ""
        return is_lora_folder(pathlib.Path(place).expanduser()) or (
            layout is not None and lacks.endswith(layout.projection)
        )

    def _compare(self, name: str, place: str, source: StateSource) -> None:
        """File every contradiction between the model's own configuration and the architecture."""
        if pathlib.Path(place).expanduser().is_file():
            return  # a file alone has no configuration; others in its folder may be another model's
        stored = pathlib.Path(source.name)
        folder = stored if stored.is_dir() else stored.parent
        found = self._checks.attempt(label(name), lambda: statements(self._architecture, folder)) or []
        for statement in found:
            if not statement.agrees:
                error = IncompatibleModelsError(_contradiction(name, statement), hint=_remedy(statement))
                self._checks.problem(label(name), error)


def _contradiction(name: str, statement: Statement) -> str:
    return (
        f"{statement.file} of the {label(name)} has {statement.key} {statement.stated}, "
        f"but all models are computed with {statement.used}"
    )


def _remedy(statement: Statement) -> str:
    if statement.key in ("hidden_act", "quick_gelu"):
        return "Name the architecture with the activation that the weights were trained with (`architecture.source`)."
    if statement.file == "preprocessor_config.json":
        return "Merge models that see the same pixels, or correct the file that is wrong."
    return "Merge models of one architecture, or correct the file that is wrong."


def _described(architecture: Architecture, source: StateSource) -> str:
    headers = [source.headers[key] for key in architecture.chain.parameter_keys()]
    count = sum(header.nbytes // header.dtype.itemsize for header in headers)
    dtypes = sorted({str(header.dtype).removeprefix("torch.") for header in headers})
    return f"{count:,} parameters in {len(headers)} tensors, {' and '.join(dtypes)}"


_HF_SETTINGS = {
    "hidden_act": "activation",
    "layer_norm_eps": "eps",
    "num_attention_heads": "num_heads",
    "patch_size": "patch_size",
    "image_size": "image_size",
}
"""Key in config.json -> the architecture's name for what no weight shows."""
_HF_PIXELS = ("image_mean", "image_std", "size", "crop_size", "resample", "rescale_factor", "do_normalize")
_OPEN_CLIP_PIXELS = ("mean", "std", "interpolation", "resize_mode")


@dataclass(frozen=True)
class Statement:
    """One value in a model's configuration, and the one that is used for all models."""

    file: str
    key: str
    stated: object
    used: object

    @property
    def agrees(self) -> bool:
        """Whether both are the same number, list or word."""
        return _equal(self.stated, self.used)


def statements(architecture: Architecture, folder: pathlib.Path) -> list[Statement]:
    """What the configuration files in a model's folder say about computation and preprocessing.

    Files that are not there say nothing; keys that are left out say the library's default.

    Args:
        architecture: what will be computed.
        folder: of the model, as transformers or open_clip lay it out.

    Raises:
        CheckpointError: a file is there and can't be read.
    """
    read = _READERS.get(architecture.loader)
    return [] if read is None else list(read(architecture, folder))


def _hf(architecture: Architecture, folder: pathlib.Path) -> Iterator[Statement]:
    import transformers
    from transformers.activations import ACT2FN

    config = _file(folder, "config.json")
    if config.get("model_type") in ("clip", "clip_vision_model"):
        inner = config.get("vision_config")
        vision = (inner if isinstance(inner, dict) else {}) if config["model_type"] == "clip" else config
        default = transformers.CLIPVisionConfig()
        for key, name in _HF_SETTINGS.items():
            stated, used = vision.get(key, getattr(default, key)), architecture.chain.settings[name]
            if name == "activation" and stated in ACT2FN:
                # Several names stand for one function; what it computes decides.
                stated = activation_name(ACT2FN[stated]) or stated
            yield Statement("config.json", key, [stated] * 2 if isinstance(used, list) else stated, used)
    pixels = _file(folder, "preprocessor_config.json")
    if pixels and architecture.preprocess is not None:
        processor = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
        default = processor().to_dict()
        for key in _HF_PIXELS:
            stated, used = (
                given.get(key, default[key]) for given in (pixels, architecture.preprocess.settings)
            )
            yield Statement("preprocessor_config.json", key, _edges(stated), _edges(used))


def _open_clip(architecture: Architecture, folder: pathlib.Path) -> Iterator[Statement]:
    config = _file(folder, CONFIG_FILE)
    model, settings = config.get("model_cfg"), architecture.chain.settings
    if isinstance(model, dict):
        activation = "quick_gelu" if model.get("quick_gelu", False) else "gelu"
        yield Statement(CONFIG_FILE, "quick_gelu", activation, settings["activation"])
        for key in ("patch_size", "image_size"):
            if isinstance(size := model.get("vision_cfg", {}).get(key), int):
                yield Statement(CONFIG_FILE, key, [size] * 2, settings[key])
    pixels = config.get("preprocess_cfg")
    if isinstance(pixels, dict) and architecture.preprocess is not None:
        for key in _OPEN_CLIP_PIXELS:
            if key in pixels:
                yield Statement(CONFIG_FILE, key, pixels[key], architecture.preprocess.settings[key])


_READERS: Mapping[str, Callable[[Architecture, pathlib.Path], Iterator[Statement]]] = {
    "hf-clip": _hf,
    "open-clip": _open_clip,
}


def _file(folder: pathlib.Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _edges(size: object) -> object:
    """Sizes in the long form of newer files: a number alone means the shorter edge, or a square."""
    if isinstance(size, dict):
        numbers = [size[key] for key in ("shortest_edge", "height", "width") if key in size]
        return numbers[0] if len(set(numbers)) == 1 else numbers
    return size


def _equal(first: object, second: object) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second
