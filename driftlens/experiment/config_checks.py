"""What a model's own configuration says otherwise than the architecture that all models are computed with."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from driftlens.checkpoints.loading import read_json, with_floats
from driftlens.checkpoints.unsupported import running
from driftlens.models.architecture import Architecture
from driftlens.models.architectures.open_clip_vit import CONFIG_FILE
from driftlens.models.architectures.vit import activation_name


def contradictions(
    architecture: Architecture, folder: pathlib.Path, called: str
) -> Iterator[tuple[str, str]]:
    """Every contradiction between the configuration in a folder and the architecture, with what to do about it."""
    reader = _READERS.get(architecture.loader)
    for file, key, stated, used in reader(architecture, folder) if reader else ():
        if not _equal(stated, used):
            text = f"{file} of {called} has {key} {stated}, but all models are computed with {used}"
            yield text, _remedy(file, key)


def _remedy(file: str, key: str) -> str:
    if key in ("hidden_act", "quick_gelu", "activation_function"):
        return "Name the architecture with the activation that the weights were trained with (`architecture.source`)."
    if file.endswith("processor_config.json"):
        return "Merge models that see the same pixels, or correct the file that is wrong."
    return "Merge models of one architecture, or correct the file that is wrong."


Statement = tuple[str, str, object, object]
"""File, key and value of a model's configuration, and the value that is used for all models.

Files that are not there say nothing; keys that are left out say the library's default.
"""

_HF_SETTINGS = {
    "hidden_act": "activation",
    "layer_norm_eps": "eps",
    "num_attention_heads": "num_heads",
    "patch_size": "patch_size",
    "image_size": "image_size",
}
"""Key in config.json -> the architecture's name for what no weight shows."""
_HF_PIXELS = ("image_mean", "image_std", "size", "crop_size", "resample", "rescale_factor", "do_normalize")
_HF_COMPUTED = (
    *("hidden_act", "hidden_activation", "activation_function", "layer_norm_eps", "layer_norm_epsilon"),
    *("rms_norm_eps", "num_attention_heads", "n_head", "num_key_value_heads", "patch_size", "image_size"),
    *("rope_theta", "rope_parameters", "qkv_bias", "position_embedding_type", "activation", "n_heads"),
    *("position_buckets", "max_relative_positions", "pos_att_type", "share_att_key", "norm_rel_ebd"),
    *("pooler_hidden_act", "classifier_pooling", "classifier_activation", "head_dim", "sliding_window"),
    *("layer_types", "partial_rotary_factor", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier", "clip_qkv"),
    *("attention_multiplier", "residual_multiplier", "num_experts_per_tok", "norm_topk_prob", "alibi"),
    *("scale_embedding", "dense_act_fn", "is_gated_act", "relative_attention_max_distance"),
)
"""What decides on features beside weights, in any family's config.json."""
_OPEN_CLIP_PIXELS = ("mean", "std", "interpolation", "resize_mode")


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
            yield ("config.json", key, [stated] * 2 if isinstance(used, list) else stated, used)
    nested = _file(folder, "processor_config.json").get("image_processor")  # as transformers 5 saves it
    file = "processor_config.json" if isinstance(nested, dict) else "preprocessor_config.json"
    pixels = nested if isinstance(nested, dict) else _file(folder, file)
    if pixels and architecture.preprocess is not None:
        processor = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
        default = processor().to_dict()
        yield from _pixels(file, _HF_PIXELS, default | pixels, default | architecture.preprocess.settings)


def _hf_any(architecture: Architecture, folder: pathlib.Path) -> Iterator[Statement]:
    """By the library's own reading of both files, which fills in defaults and older versions' spellings."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _file(folder, "config.json")
    used = {} if architecture.folder is None else dict(architecture.folder.configs).get("config.json")
    kind = config.get("model_type")
    if not isinstance(used, dict) or kind not in CONFIG_MAPPING:
        return
    if kind != used.get("model_type"):
        if architecture.loader == "hf-decoder" and "text_config" not in config:
            yield ("config.json", "model_type", kind, used.get("model_type"))
        return
    with running(str(folder)):
        ours, theirs = (
            CONFIG_MAPPING[kind].from_dict(with_floats(stated)).to_dict() for stated in (used, config)
        )
    for section in ("", "vision_config", "text_config"):
        our, their = (whole.get(section, {}) if section else whole for whole in (ours, theirs))
        for key in _HF_COMPUTED:
            if key in our or key in their:
                yield ("config.json", key, their.get(key), our.get(key))
    if architecture.preprocess is not None:
        file = "preprocessor_config.json"
        yield from _pixels(file, _HF_PIXELS, _file(folder, file), architecture.preprocess.settings)


def _open_clip(architecture: Architecture, folder: pathlib.Path) -> Iterator[Statement]:
    config = _file(folder, CONFIG_FILE)
    model, settings = config.get("model_cfg"), architecture.chain.settings
    if isinstance(model, dict):
        activation = "quick_gelu" if model.get("quick_gelu", False) else "gelu"
        yield (CONFIG_FILE, "quick_gelu", activation, settings["activation"])
        for key in ("patch_size", "image_size"):
            if isinstance(size := model.get("vision_cfg", {}).get(key), int):
                yield (CONFIG_FILE, key, [size] * 2, settings[key])
    pixels = config.get("preprocess_cfg")
    if isinstance(pixels, dict) and architecture.preprocess is not None:
        yield from _pixels(CONFIG_FILE, _OPEN_CLIP_PIXELS, pixels, architecture.preprocess.settings)


def _pixels(
    file: str, keys: Sequence[str], stated: Mapping[str, Any], used: Mapping[str, Any]
) -> Iterator[Statement]:
    for key in keys:
        if key in stated and key in used:
            yield (file, key, _edges(stated[key]), _edges(used[key]))


_READERS: Mapping[str, Callable[[Architecture, pathlib.Path], Iterator[Statement]]] = {
    "hf-clip": _hf,
    **dict.fromkeys(
        ("hf-vit", "hf-auto", "hf-encoder", "hf-decoder", "hf-vlm", "hf-seq2seq", "hf-t5"), _hf_any
    ),
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
