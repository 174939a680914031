"""Detection of unsupported checkpoints from files, configurations or keys, with what to do instead."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from driftlens.utils.errors import CheckpointError, DriftLensError, IncompatibleModelsError
from driftlens.utils.files import regular_file

ADAPTER = "adapter_config.json"

LIVE = (
    "Build it in your own code: `loader: python:module:function` (with --trust-code), or pass live modules that "
    "run a list of blocks to `dl.analyze`."
)
_ROUTES = {"hf-auto": "Use the loader hf-auto, and set `architecture.blocks` to the path of its blocks.", "": LIVE}
# Model types of transformers by loader. hf-decoder reads causal models, hf-vlm those with a vision tower,
# hf-auto the others.
MODEL_TYPES = {
    "hf-clip": ("clip", "clip_vision_model"),
    "hf-vit": ("deit", "dinov2", "dinov2_with_registers", "siglip", "siglip_vision_model", "vit"),
    "hf-t5": ("t5",),
    "hf-encoder": (
        *("bert", "roberta", "xlm-roberta", "distilbert", "deberta", "deberta-v2"),
        *("nomic_bert", "gte", "jina_embeddings_v3"),
    ),
}
_WITH_LM_HEAD = ("CausalLM", "LMHead")
_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
# Fragment of a key, the family that it reveals, and its loader. The first match counts, so a fragment of one
# family precedes those that other families contain, too.
_FAMILIES = (
    ("visual.trunk.", "a timm trunk (SigLIP, EVA02, ConvNeXt)", ""),
    ("attn_pool.", "an attention-pooled tower (CoCa)", ""),
    ("attnpool.", "a CLIP ResNet", ""),
    ("head.probe", "a SigLIP tower", "hf-vit"),
    ("self_attn.qkv.", "a tower with fused attention (BLIP, EVA)", ""),
    ("embeddings.class_embedding", "a CLIP saved by transformers", "hf-clip"),
    ("transformer.resblocks.", "a CLIP saved by open_clip", "open-clip"),
    ("lora_A.", "LoRA adapters", "adapters"),
    ("block_sparse_moe.", "a mixture of experts", "hf-decoder"),
    (".experts.", "a mixture of experts", "hf-decoder"),
    ("layer.0.SelfAttention.relative_attention_bias.", "a T5", "hf-t5"),
    ("embeddings.cls_token", "a ViT, DeiT or DINOv2 (transformers)", "hf-vit"),
    ("blocks.0.attn.qkv.", "a timm ViT", "timm"),
    ("encoder.layers.0.self_attn.", "an encoder of transformers", "hf-auto"),
    ("layers.0.self_attn.q_proj.", "a language model of transformers", "hf-decoder"),
    ("layer.0.attention.", "an encoder of transformers (BERT and similar)", "hf-encoder"),
    ("h.0.attn.c_attn.", "a GPT-2", "hf-decoder"),
    ("stages.0.", "a staged convolutional network", "timm"),
)


# Keys under which training checkpoints store the weights.
STATE_DICT_KEYS = ("state_dict", "model", "model_state_dict")


def loader_hint(loader: str) -> str:
    """Return a hint for models of another `loader`, or, with an empty name, of no supported loader."""
    if loader == "adapters":
        return "Give the folder that peft saved, together with its base."
    return _ROUTES.get(loader, f"Its loader is {loader}: set `architecture.loader`.")


class _ModelFamily(NamedTuple):
    """A model family recognized by a checkpoint's keys: a description, one such key, and its loader, if any."""

    what: str
    key: str
    loader: str

    @property
    def remedy(self) -> str:
        """The hint for an error if this family or its loader is not the expected one."""
        way = loader_hint(self.loader)
        alike = "All models need the same architecture. "
        return f"{alike}{way[:-1]} if all models match." if way.startswith("Its loader") else way


def detect_family(keys: Collection[str]) -> _ModelFamily | None:
    """Recognize a checkpoint's model family by its keys; None if it is unknown."""
    for fragment, what, loader in _FAMILIES:
        key = next((key for key in keys if fragment in key), None)
        if key is not None:
            return _ModelFamily(what, key, loader)
    return None


def wrong_family_error(config: Mapping[str, Any], source: str, expected: str) -> IncompatibleModelsError:
    """Build the error for a `config.json` of another model family than `expected`, with family and loader."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, named = config.get("model_type"), ", ".join(config.get("architectures") or [])
    loader = detect_loader(config)
    what = f"a {kind} model ({named or 'no architecture named'})"
    if kind is None and loader:
        what = {"timm": f"a timm model ({config.get('architecture')})"}.get(loader, "an open_clip model")
    mixture = f", a mixture of {count} experts" if (count := num_moe_experts(config)) else ""
    unknown = "The installed transformers lacks this model type. "
    hint = loader_hint(loader) if loader or kind in CONFIG_MAPPING else unknown + LIVE
    return IncompatibleModelsError(f"{source} is {what}{mixture}; expected {expected}", hint=hint)


def detect_loader(config: Mapping[str, Any]) -> str:
    """Return the name of the loader for a `config.json`; empty if no loader supports it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    # Only transformers writes `model_type`.
    if kind is None:
        if "model_cfg" in config or "vision_cfg" in config:
            return "open-clip"
        return "timm" if isinstance(config.get("architecture"), str) else ""
    if kind not in CONFIG_MAPPING or not (is_causal_lm(config) or not num_moe_experts(config)):
        return ""
    other = "" if config.get("is_encoder_decoder") or can_generate(config) else "hf-auto"
    other = "hf-decoder" if is_causal_lm(config) else "hf-vlm" if is_vision_language(config) else other
    other = "hf-seq2seq" if is_seq2seq(config) else other
    # No loader supports this head.
    if can_generate(config) and not other:
        return ""
    return next((name for name, kinds in MODEL_TYPES.items() if kind in kinds), other)


def has_image_processor(config: Mapping[str, Any]) -> bool:
    """Return True if transformers has an image processor for a `config.json`."""
    if "model_type" not in config:
        return False
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    return config["model_type"] in IMAGE_PROCESSOR_MAPPING_NAMES


def can_generate(config: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` names an architecture with a head that generates text."""
    named = (config.get("architectures") or [""])[0]
    return any(part in named for part in (*_WITH_LM_HEAD, "ConditionalGeneration"))


def is_causal_lm(config: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` describes a causal language model of transformers with its head."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        return False
    stated = CONFIG_MAPPING[kind]
    # Models of images and sounds have sub-configurations. Encoders that may also run as decoders (BERT) were
    # trained as encoders.
    beside = set(getattr(stated, "sub_configs", ())) - {"attn_config"}
    is_other = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or getattr(stated, "is_encoder_decoder", False)
    named = (config.get("architectures") or [""])[0]
    has_head = not named or any(part in named for part in _WITH_LM_HEAD)
    return not beside and not is_other and has_head


def is_vision_language(config: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` describes a transformers decoder that reads features of a vision tower."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, named = config.get("model_type"), (config.get("architectures") or [""])[0]
    model = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if kind not in CONFIG_MAPPING or named not in ("", model):
        return False
    parts = set(getattr(CONFIG_MAPPING[kind], "sub_configs", ()))
    # No decoder alone: an encoder between tower and texts, or an encoder-decoder (Florence 2).
    text = config.get("text_config")
    named_text = text.get("model_type") if isinstance(text, Mapping) else None
    has_encoder = named_text in CONFIG_MAPPING and getattr(CONFIG_MAPPING[named_text], "is_encoder_decoder", False)
    is_pair = "qformer_config" in parts or has_encoder
    return model is not None and {"text_config", "vision_config"} <= parts and not is_pair


def is_seq2seq(config: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` describes a text encoder-decoder of transformers."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, named = config.get("model_type"), (config.get("architectures") or [""])[0]
    model = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if kind not in CONFIG_MAPPING or named not in ("", model) or num_moe_experts(config):
        return False
    parts = set(getattr(CONFIG_MAPPING[kind], "sub_configs", ()))
    is_pair = config.get("is_encoder_decoder", getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False))
    return model is not None and bool(is_pair) and parts <= {"encoder", "decoder"}


def num_moe_experts(config: Mapping[str, Any]) -> int:
    """Return the number of MoE experts per block in a `config.json`; 0 for dense models."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    counts = [part[key] for part in sections for key in _NUM_EXPERTS if isinstance(part.get(key), int)]
    return max((count for count in counts if count > 1), default=0)


def require_loadable(config: Mapping[str, Any], source: str) -> None:
    """Refuse a `config.json` of quantized weights, or of a model that needs remote code."""
    require_unquantised(config, source)
    if foreign := remote_code(config):
        raise IncompatibleModelsError(f"{source} needs remote code, which is not run (auto_map: {foreign})", hint=LIVE)


# Methods whose weights can only be dequantized as they are loaded, with the class of transformers that does so.
_LOADED_WIDE = {
    "mxfp4": "Mxfp4Config",
    "fp8": "FineGrainedFP8Config",
    "mxfp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
}


def require_unquantised(config: Mapping[str, Any], source: str) -> None:
    """Refuse a `config.json` of quantized weights, whose tensors are packed integers."""
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        loaded = "from_pretrained(SOURCE).dequantize()"
        if isinstance(method, str) and method in _LOADED_WIDE:
            loaded = f"from_pretrained(SOURCE, quantization_config={_LOADED_WIDE[method]}(dequantize=True))"
        raise IncompatibleModelsError(
            f"{source} holds quantised weights ({method or 'quantization_config in config.json'})",
            hint=f"Give the original weights, or dequantize them: {loaded}.save_pretrained(OUT).",
        )


# Keys of the scales and codes that quantized checkpoints store.
_CODES = re.compile(
    r"\.(weight_scale(_inv)?|weight_packed|qweight|SCB|absmax|quant_map)$|\.quant_state\.|_proj_(blocks|scales)$"
)


def require_unquantised_keys(keys: Collection[str], source: str) -> None:
    """Refuse a checkpoint whose keys are those of quantized weights, for files without `quantization_config`."""
    if codes := [key for key in keys if _CODES.search(key)]:
        raise IncompatibleModelsError(
            f"{source} holds quantised weights: {len(codes)} tensors of scales or codes, such as {codes[0]!r}",
            hint="Give the original weights, or restore quantization_config in config.json and dequantize them.",
            key=codes[0],
        )


def remote_code(config: Mapping[str, Any], *, needed: bool = True) -> str:
    """Return the remote code that a configuration needs (`auto_map`) as `file.Class`; empty if it needs none.

    With `needed`, code does not count if transformers itself has the model type and architectures.
    """
    beside = config.get("auto_map")
    if not isinstance(beside, Mapping) or not beside:
        return ""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    named = config.get("architectures") or []
    has_classes = config.get("model_type") in CONFIG_MAPPING_NAMES and {*named} <= {*dir(transformers)}
    return "" if needed and named and has_classes else ", ".join(sorted({str(value) for value in beside.values()}))


@contextlib.contextmanager
def wrap_library_errors(source: str) -> Iterator[None]:
    """Convert a library's error in the block to an `IncompatibleModelsError` with a hint."""
    try:
        yield
    except DriftLensError:
        raise
    except Exception as error:  # a foreign forward pass can raise anything
        kind, lines = type(error).__name__, [line.strip() for line in str(error).splitlines()] or [""]
        # Some first lines end in a colon, with the cause in the second.
        cause = " ".join(lines[: 1 + lines[0].endswith(":")])
        # transformers raises this for a value of the wrong type in a configuration.
        hint = "Restore the original configuration." if kind.startswith("StrictDataclass") else LIVE
        raise IncompatibleModelsError(f"{source} can't be used ({kind}: {cause})", hint=hint) from error


def refuse_lfs_pointer(path: pathlib.Path) -> None:
    """Refuse a Git LFS pointer file, whose weights were not downloaded."""
    with regular_file(path).open("rb") as file:
        # Read only the beginning: the file may be as large as a model.
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights", hint="Run `git lfs pull` in its folder."
        )


def conversion_hint(path: pathlib.Path) -> str:
    """Return the code that converts a GGUF file or a pickled model; with a warning if it runs the file's code."""
    if path.suffix.lower() == ".gguf":
        options = f"gguf_file={path.name!r}, quantization_config=GgufConfig(dequantize=True)"
        return (
            "GGUF files are usually quantized: give the original weights, or dequantize them with transformers:\n"
            f"AutoModelForCausalLM.from_pretrained({str(path.parent)!r}, {options}).save_pretrained(OUT)"
        )
    target = str(path.with_suffix(".safetensors"))
    return (
        "If you trust its author, convert it where its classes are importable. This runs its code:\n"
        f"model = torch.load({str(path)!r}, weights_only=False)\n"
        "state = model.state_dict()\n"
        f"safetensors.torch.save_file({{k: v.contiguous().clone() for k, v in state.items()}}, {target!r})"
    )
