"""What a model's own folder says of it, held against the architecture that will be computed."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from driftlens.models.architecture import Architecture
from driftlens.models.config_source import read_json
from driftlens.models.open_clip_loader import CONFIG_FILE
from driftlens.models.vit_parts import activation_name

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
