"""Loaders for encoders of images and texts in transformers and timm, without remote code; parts of other loaders.

Models for classification lose their classifier to the tasks' heads; its input is the final feature.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import nn

from driftlens.checkpoints.alignment import KeyLayout, concat_pattern
from driftlens.checkpoints.loading import (
    MODULES,
    TOKENIZERS,
    decode_json_floats,
    embedding_folder,
    find_config_folder,
    require_config,
)
from driftlens.checkpoints.unsupported import (
    LIVE,
    MODEL_TYPES,
    can_generate,
    is_causal_lm,
    is_vision_language,
    num_moe_experts,
    require_loadable,
    wrong_family_error,
)
from driftlens.models.architecture import (
    HEADS,
    Architecture,
    ArchitectureRequest,
    FolderFormat,
    build_on_meta,
    loaders,
    reject_blocks_option,
)
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import IMAGE, TEXT
from driftlens.models.preprocessing import (
    PATCHES,
    Preprocess,
    fix_patch_order,
    hf_image_preprocess,
    hf_text_preprocess,
    image_preprocess,
)
from driftlens.models.readouts import HeadTemplate, TokenEncoder, split_head
from driftlens.utils.errors import IncompatibleModelsError

# Prefixes of modules that read features. Only some models of a family have them, so files may lack their keys.
_HEAD_PREFIXES = (
    *("pooler.", "classifier.", "pre_classifier.", "classification_head.", "score.", "cls.", "lm_head."),
    *("text_model.", "logit_scale", "logit_bias"),
)

# Buffers that old versions saved and current ones compute.
BUFFERS = (r"rotary_emb\.inv_freq$", r"\.attn\.bias$", r"\.masked_bias$")
# Numbers of layers for multi-token prediction. Files have these layers, but the library does not build them.
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")

_USAGE = """\
{imports}from transformers import {reader}, {model}

folder = "."  # this one, or the model's id on the Hub
model, reader = {model}.from_pretrained(folder{settings}), {reader}.from_pretrained(folder)
{change}inputs = reader({sample}, return_tensors="pt")
features = model(**inputs).{output}
"""

_ANSWER = """\
from transformers import {model}, {reader}

folder = "."  # this one, or the model's id on the Hub
model, reader = {model}.from_pretrained(folder), {reader}.from_pretrained(folder)
inputs = reader(text="a question", return_tensors="pt")
answer = reader.decode(model.generate(**inputs, max_new_tokens=16)[0])
"""

_SENTENCES = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")  # this folder, or the model's id on the Hub
features = model.encode(["a sentence"])
"""

_HEADS = """
# The scores of a task, by its own head (there is {heads}):
from safetensors.torch import load_file
from transformers import AutoModelFor{kind}Classification as Classifier

head = load_file(f"{{folder}}/{first}")
model = Classifier.from_pretrained(folder, num_labels=len(head["{last}"]), ignore_mismatched_sizes=True)
model.load_state_dict(head, strict=False)
scores = model(**inputs).logits
"""


@loaders.register("hf-vit")
def _load_hf_vit(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a ViT, DeiT, DINOv2 or SigLIP image tower, with or without classifier."""
    return _load_transformers_encoder(request, "hf-vit")


@loaders.register("hf-auto")
def _load_hf_auto(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of any encoder or decoder of transformers, by its config.json."""
    if embedding_folder(find_config_folder(request.source)) is None:
        stated = read_plain_config(request, "hf-auto")
        if is_causal_lm(stated) or is_vision_language(stated):
            return loaders["hf-decoder" if is_causal_lm(stated) else "hf-vlm"](request)
    return _load_transformers_encoder(request, "hf-auto")


@loaders.register("hf-encoder")
def _load_hf_encoder(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of an encoder of texts such as BERT, with or without a classifier.

    Everything after the features of tokens, BERT's pooler included, is the classification head, which is not merged.
    """
    return _load_transformers_encoder(request, "hf-encoder")


def _load_transformers_encoder(request: ArchitectureRequest, loader: str) -> Architecture:
    """Return the architecture of an encoder of images or texts, for the loader of that name."""
    source, offline = request.source, request.access.offline
    stated = read_plain_config(request, loader)
    config, model_class = _config_and_model_class(stated, source)
    hides = bool(getattr(config, "mask_ratio", 0)) and "noise" in signature(model_class.forward).parameters
    # A masked autoencoder would drop most patches at random, in eval mode too.
    if hides:
        config.mask_ratio = 0.0
    whole = build_on_meta(partial(build_model, model_class, config), source)
    names, core, blocks = saved_key_names(whole), whole.base_model_prefix, request.blocks
    skeleton, classifier, own_head, notice = _split_classification_head(whole, names, source)
    if skeleton is not whole:
        model_class = type(skeleton.get_submodule(core))
        if blocks is not None and not blocks.startswith(f"{core}."):
            blocks = f"{core}.{blocks}"
    reads_images = skeleton.main_input_name == "pixel_values"
    if reads_images:
        preprocess = hf_image_preprocess(source, config, offline)
        preprocess = fix_patch_order(preprocess, config.patch_size) if hides else preprocess
    else:
        preprocess = hf_text_preprocess(source, config, offline, "encoder")
    if classifier:
        skeleton = _without_linear_classifier(skeleton, classifier, preprocess)
    preprocess = replace(preprocess, notice=" ".join(filter(None, (preprocess.notice, notice))))
    left_out, ignored = _additional_key_prefixes(classifier, own_head, skeleton), ignored_key_patterns(whole)
    layout = KeyLayout(key_spellings(names, skeleton), left_out, ignored, is_lenient=True)
    example = preprocess.example()
    mask = PATCHES if isinstance(example, Mapping) and PATCHES in example else None
    chain = sequential_chain(skeleton, example, blocks=blocks, mask=mask)
    # Whether token 0 is a class token is not stated in configurations, only in the names of weights.
    parameter_names = {name.rpartition(".")[2] for name, _ in skeleton.named_parameters()}
    image = replace(IMAGE, pool="mean" if parameter_names.isdisjoint(("cls_token", "class_embedding")) else "cls")
    return Architecture(
        loader=loader,
        source=source,
        skeleton=skeleton,
        chain=replace(
            chain,
            architecture=f"hf_{config.model_type}",
            modality=image if reads_images else replace(TEXT, pool="last" if _is_causal_model(config) else "mean"),
            settings={**chain.settings, "model": model_class.__name__},
        ),
        layout=layout,
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors",
            {"config.json": stated},
            usage=partial(_feature_usage_code, model_class.__name__, classifier, own_head, reads_images, hides),
        ),
        classifier=classifier,
        own_head=own_head,
    )


def _split_classification_head(
    whole: Any, names: Mapping[str, str], source: str
) -> tuple[Any, str, HeadTemplate | None, str]:
    """Split off a multi-layer head; return the model, its linear classifier's path, the head and a notice."""
    config, core = whole.config, whole.base_model_prefix
    classifier = _classifier_path(whole, config.num_labels)
    inside = (f"{core}.", f"{classifier}.")
    outside = [key for key in whole.state_dict() if hasattr(whole, core) and not key.startswith(inside)]
    # In BERT, everything that reads the features of tokens is part of the classifier, a core's pooler included.
    if classifier and (outside or config.model_type in MODEL_TYPES["hf-encoder"]):
        if (parts := split_head(whole, names)) is not None:
            return parts[0], "", parts[1], ""
        path = (outside or [classifier])[0].rpartition(".")[0]
        notice = (
            f"{source}: its classifier reads features through {path}. Final features are those before it, and experts' "
            "classifiers are not used."
        )
        return TokenEncoder(getattr(whole, core), core), "", None, notice
    # sentence-transformers pools the features of tokens, not what a classifier reads.
    if classifier and embedding_folder(find_config_folder(source)) is not None:
        return TokenEncoder(getattr(whole, core), core), "", None, ""
    return whole, classifier, None, ""


def _without_linear_classifier(skeleton: Any, classifier: str, preprocess: Preprocess) -> nn.Module:
    # The library finds the last token by the configuration's pad token. If the tokenizer pads with another one, only
    # the mask shows it.
    if preprocess.texts is not None and _is_causal_model(skeleton.config):
        core, tokenizer = skeleton.base_model_prefix, preprocess.texts.tokenizer
        if skeleton.config.get_text_config().pad_token_id != tokenizer.pad_token_id:
            return TokenEncoder(getattr(skeleton, core), core, "last")
    skeleton.set_submodule(classifier, nn.Identity())
    return cast(nn.Module, skeleton)


def _is_causal_model(config: Any) -> bool:
    """Return True for configurations of causal language models, whose last token has read all others."""
    return is_causal_lm({"model_type": config.model_type})


def _feature_usage_code(
    model: str,
    classifier: str,
    own_head: HeadTemplate | None,
    reads_images: bool,
    hides: bool,
    keys: Collection[str],
    files: Collection[str],
) -> str:
    """Return Python that computes the input of the tasks' heads; empty without a file for preprocessing."""
    required = ("preprocessor_config.json", "processor_config.json") if reads_images else TOKENIZERS
    if set(required).isdisjoint(files):
        return ""
    heads = [file for file in files if file.startswith(f"{HEADS}/")]
    if MODULES in files and not heads:
        return _SENTENCES
    last = f"{classifier}.weight" if own_head is None else list(own_head.names)[-1]
    kind = "Image" if reads_images else "Sequence"
    output = "logits" if classifier else "last_hidden_state"
    if own_head is not None and not heads and not reads_images:
        output += ".mean(dim=1)  # of one text: padding must not count"
    elif own_head is not None and own_head.pool == "cls":
        output += "[:, 0]  # what the experts' heads read"
    scores = _HEADS.format(heads=", ".join(heads), first=heads[0], last=last, kind=kind) if heads else ""
    features = _USAGE.format(
        model=model,
        settings=", mask_ratio=0.0" * hides,
        imports="import torch\n" * bool(classifier) + "from PIL import Image\n" * reads_images,
        reader="AutoImageProcessor" if reads_images else "AutoTokenizer",
        sample='Image.open("image.png")' if reads_images else '"a sentence"',
        change=f'model.set_submodule("{classifier}", torch.nn.Identity())  # every task has its own\n'
        * bool(classifier),
        output=output,
    )
    return features + scores


def text_folder_format(stated: Mapping[str, Any], model: str, reader: str = "AutoTokenizer") -> FolderFormat:
    """Return the folder format of a language model, given the library's model and tokenizer classes."""
    # Without a tokenizer, the code would raise in a folder that is otherwise complete.
    usage = _ANSWER.format(model=model, reader=reader)
    return FolderFormat(
        "model.safetensors",
        {"config.json": stated},
        usage=lambda keys, files: "" if set(TOKENIZERS).isdisjoint(files) else usage,
    )


def build_language_model(
    request: ArchitectureRequest,
    loader: str,
    fits: Callable[[Mapping[str, Any]], bool],
    expected: str,
    mapping: str,
) -> tuple[dict[str, Any], Any]:
    """Return the config.json of a language model with its head, and the model on meta.

    Args:
        request: the loader's request.
        loader: the name of the loader.
        fits: config.json -> True if the loader supports the model.
        expected: the supported kind of models, for the error.
        mapping: the name of the library's mapping from configurations to classes.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    stated = read_plain_config(request, loader)
    if not fits(stated):
        raise wrong_family_error(stated, request.source, expected)
    # T5 scales features by the same setting, so it is untied after it is built (`_tie_weights` in language.py).
    if request.untied and "SEQ_TO_SEQ" not in mapping:
        stated = stated | {"tie_word_embeddings": False}
    config = CONFIG_MAPPING[stated["model_type"]].from_dict(decode_json_floats(stated))
    model_class = getattr(modeling_auto, mapping)[type(config)]
    return stated, build_on_meta(partial(build_model, model_class, config), request.source)


def read_plain_config(request: ArchitectureRequest, loader: str) -> dict[str, Any]:
    """Return the `config.json` of a request's source; raise if the loader does not support the model."""
    kinds = MODEL_TYPES.get(loader, ())
    if kinds:
        reject_blocks_option(request, loader)
    source, hint = request.source, "Use a save_pretrained folder or a Hub id."
    subject, offline = "a model of transformers", request.access.offline
    config = require_config(source, "config.json", subject, offline=offline, hint=hint)
    require_loadable(config, source)
    if kinds and (config.get("model_type") not in kinds or num_moe_experts(config)):
        expected = f"one of {', '.join(kinds)}, without a mixture of experts"
        raise wrong_family_error(config, source, expected)
    return config


def _config_and_model_class(stated: Mapping[str, Any], source: str) -> tuple[Any, Any]:
    """Return the configuration and the class of a model, the one for classification if there is one."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = stated.get("model_type")
    answering = can_generate(stated) and embedding_folder(find_config_folder(source)) is None
    others = (*MODEL_TYPES["hf-clip"], *MODEL_TYPES["hf-t5"])
    # The library fuses experts that files store separately, so keys would not match. A language-model head would not be
    # merged by this loader.
    if kind in others or num_moe_experts(stated) or kind not in CONFIG_MAPPING or answering:
        raise wrong_family_error(stated, source, "an encoder of images or texts")
    config = CONFIG_MAPPING[kind].from_dict(decode_json_floats(stated))
    named = stated.get("architectures") or [""]
    if "WithTeacher" in named[0]:
        raise IncompatibleModelsError(
            f"{source} is a {named[0]} with two classifiers; expected one",
            hint="Save it as DeiTForImageClassification.",
        )
    of_images, of_text = (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )
    # A decoder's classifier reads one token alone; the core returns the features of all.
    is_core = _is_causal_model(config) and "Classification" not in named[0]
    for choice in (auto.MODEL_MAPPING,) if is_core else (of_images, of_text, auto.MODEL_MAPPING):
        if type(config) in choice:
            model_class = choice[type(config)]
            return config, model_class[0] if isinstance(model_class, tuple) else model_class
    raise IncompatibleModelsError(f"{source}: transformers has no base model of type {kind!r}", hint=LIVE)


def build_model(model_class: Any, config: Any) -> nn.Module:
    """Build a model with SDPA attention where its class supports it."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    # Eager attention computes its softmax in float32, so a pass in float64 would have errors of 1e-7.
    config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"
    for name in config.sub_configs:
        part: Any = getattr(config, name, None)
        # A part without SDPA (an audio tower) would raise when the whole is built.
        if not getattr(MODEL_MAPPING.get(type(part), None), "_supports_sdpa", True):
            part._attn_implementation = "eager"
    module: nn.Module = model_class(config)
    return module


def saved_key_names(skeleton: Any) -> dict[str, str]:
    """Map the skeleton's keys to the names that `save_pretrained` writes; they may differ since transformers 5.

    A fused key is named by its rows in the saved tensor, a split one by a joint name; see `KeyLayout`.
    """
    state = skeleton.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 saves the skeleton's keys
        return {key: key for key in state}
    written = {id(value): key for key, value in revert_weight_conversion(skeleton, dict(state)).items()}
    names = {key: written.get(id(value), key) for key, value in state.items()}
    # The library does not report how it fuses or splits weights. So tensors with numbered entries, few of each row, are
    # converted instead of weights; the numbers show where each entry went.
    probes, spans, end = dict[str, torch.Tensor](), dict[str, tuple[int, int]](), 0
    for key, value in state.items():
        if id(value) not in written:
            few = [min(size, _PROBED) for size in value.shape[1:-1]] + [1] * (value.dim() > 1)
            shape = (*value.shape[:1], *few)
            start, end = end, end + math.prod(shape)
            spans[key], probes[key] = (start, end), torch.arange(start, end).reshape(shape)
    try:
        changed = revert_weight_conversion(skeleton, dict(probes)) if probes else {}
    except Exception:  # a conversion that does more than concatenate or split tensors
        return names
    pieces: dict[str, list[tuple[int, str, int]]] = {}
    keys, starts = [*spans], [start for start, _ in spans.values()]
    for name, entries in changed.items():
        numbers = entries.flatten()
        begin, size = int(numbers[0]), len(numbers)
        key = keys[bisect.bisect(starts, begin) - 1]
        # Consecutive numbers of one key: a part of a tensor that is split in files.
        if torch.equal(numbers, torch.arange(begin, begin + size)) and begin + size <= spans[key][1]:
            pieces.setdefault(key, []).append((begin, name, size))
            continue
        listed = numbers.tolist()
        places = {key: listed.index(start) for key, (start, _) in spans.items() if start in listed}
        parts = {key: (place, place + spans[key][1] - spans[key][0]) for key, place in places.items()}
        if all(listed[start:stop] == list(range(*spans[key])) for key, (start, stop) in parts.items()):
            rows = {key: probes[key][0].numel() for key in parts}
            names |= {key: f"{name}[{start // rows[key]}:{stop // rows[key]}]" for key, (start, stop) in parts.items()}
    for key, runs in pieces.items():
        if sum(size for *_, size in runs) == probes[key].numel():
            names[key] = concat_pattern([name for _, name, _ in sorted(runs)]) or key
    return names


# Entries per axis of a probe: enough to split into 2, 3, 4, 6 or 12 parts, and few enough for large models.
_PROBED = 12


def _classifier_path(skeleton: nn.Module, num_labels: int) -> str:
    """Return the path of the last linear module that computes class scores, or ""."""
    paths = [
        path
        for path, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_labels
    ]
    if not type(skeleton).__name__.endswith("Classification") or not paths:
        return ""
    return paths[-1]


def key_spellings(names: Mapping[str, str], skeleton: Any) -> list[dict[str, str]]:
    """Return the key names that checkpoint files may use, as mappings from the skeleton's keys."""
    core = f"{skeleton.base_model_prefix}."
    keys = list(skeleton.state_dict())
    plain = [{key: names[key] for key in keys}, {key: key for key in keys}]
    # BERT's first checkpoints have TensorFlow's names, which the library still reads.
    if any("LayerNorm" in key for key in keys):
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        plain += [
            {
                key: functools.reduce(lambda name, pair: name.replace(*pair), old.items(), stored)
                for key, stored in spelling.items()
            }
            for spelling in plain
        ]
    alone = [{key: stored.removeprefix(core) for key, stored in spelling.items()} for spelling in plain]
    within = [{key: core + stored for key, stored in spelling.items()} for spelling in plain]
    return [*plain, *alone, *within]


def ignored_key_patterns(skeleton: Any) -> tuple[str, ...]:
    """Return regular expressions for checkpoint keys that the library ignores."""
    config = skeleton.config.get_text_config()
    depth, further = (
        getattr(config, "num_hidden_layers", 0),
        [getattr(config, key, 0) for key in _EXTRA_LAYERS],
    )
    count = max((n for n in further if isinstance(n, int)), default=0)
    extra = [rf"\blayers\.{depth + n}\." for n in range(count)]
    return (*(skeleton._keys_to_ignore_on_load_unexpected or ()), *BUFFERS, *extra)


def _additional_key_prefixes(classifier: str, own_head: HeadTemplate | None, skeleton: Any) -> tuple[str, ...]:
    """Return prefixes of checkpoint keys that the skeleton lacks but other models of the family have."""
    core = f"{skeleton.base_model_prefix}."
    parts = [f"{classifier}."] if classifier else []
    parts += [] if own_head is None else [name.removeprefix(core) for name in own_head.names.values()]
    keys = [key.removeprefix(core) for key in skeleton.state_dict()]
    parts += [part for part in _HEAD_PREFIXES if not any(key.startswith(part) for key in keys)]
    return (*parts, *(core + part for part in parts))


_TIMM_USAGE = """\
import timm
from PIL import Image

name = "local-dir:."  # this folder; on the Hub, hf-hub: and the model's id
model = timm.create_model(name, pretrained=True).eval()
model.reset_classifier(0)  # every task has its own
settings = timm.data.resolve_data_config({}, model=model)
transform = timm.data.create_transform(**settings, is_training=False)
features = model(transform(Image.open("image.png").convert("RGB"))[None])
"""


# Options of `timm.create_model` that read other files. An untrusted config.json must not set them.
_TIMM_LOADS = ("pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")
_PIXELS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


@loaders.register("timm")
def _load_timm(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a model of timm; its source is a model name, a folder or a Hub id."""
    import timm
    from timm.data import create_transform, resolve_data_config

    source = request.source.removeprefix("hf-hub:")
    name, stated, options = source, dict[str, Any](), dict[str, Any]()
    if not timm.is_model(source):
        name, stated, options = _timm_name_and_options(source, offline=request.access.offline)
    build = partial(timm.create_model, name, pretrained=False, **options)
    skeleton = build_on_meta(lambda: _fill_meta_buffers(build()), source)
    # Older folders have the pixel settings next to the architecture. A model built with `img_size` accepts only images
    # of this size, but its default settings may have another.
    pixels = {key: stated[key] for key in _PIXELS if key in stated} | dict(stated.get("pretrained_cfg") or {})
    if "input_size" not in pixels and (size := options.get("img_size")):
        pixels["input_size"] = (3, *([size] * 2 if isinstance(size, int) else size))
    if pixels:
        skeleton.pretrained_cfg = skeleton.default_cfg = {**skeleton.pretrained_cfg, **pixels}
    classifier = _remove_timm_classifier(skeleton, name)
    settings = resolve_data_config({}, model=skeleton)
    preprocess = image_preprocess("timm", create_transform(**settings, is_training=False), settings)
    chain = sequential_chain(skeleton, preprocess.example(), blocks=request.blocks)
    return Architecture(
        loader="timm",
        source=request.source,
        skeleton=skeleton,
        chain=replace(
            chain,
            architecture=f"timm {name}",
            modality=replace(IMAGE, pool="cls" if getattr(skeleton, "num_prefix_tokens", 0) else "mean"),
        ),
        layout=KeyLayout([{key: key for key in skeleton.state_dict()}], (f"{classifier}.",) if classifier else ()),
        preprocess=preprocess,
        folder=FolderFormat("model.safetensors", {"config.json": stated}, usage=lambda keys, files: _TIMM_USAGE)
        if stated
        else None,
        classifier=classifier,
    )


def _timm_name_and_options(source: str, *, offline: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return timm's name for the model of a folder or Hub id, its config.json, and options to build it with."""
    import timm

    hint = "Use a name in timm.list_models(), or a folder saved by timm."
    stated = require_config(source, "config.json", "a model of timm", offline=offline, hint=hint)
    name, options = str(stated.get("architecture")), dict(stated.get("model_args") or {})
    if not timm.is_model(name):
        raise wrong_family_error(stated, source, "a config.json of timm")
    if odd := [key for key in options if key in _TIMM_LOADS]:
        raise IncompatibleModelsError(
            f"config.json of {source} sets {odd[0]}, which reads other files",
            hint="Remove it from `model_args`.",
        )
    if "num_classes" in stated:
        options.setdefault("num_classes", stated["num_classes"])
    return name, stated, options


def _fill_meta_buffers(skeleton: nn.Module) -> nn.Module:
    """Compute the buffers that timm left on meta, one module at a time."""
    # Inner modules first, because outer buffers are computed from theirs.
    for module in reversed(list(skeleton.modules())):
        fill = getattr(module, "_init_buffers", None)
        if fill is None or not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        # `_apply` moves weights too. They go back to meta afterwards.
        weights = {id(part): dict(part._parameters) for part in module.modules() if part._parameters}
        module._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
        fill()
        for part in module.modules():
            part._parameters.update(weights.get(id(part), {}))
    return skeleton


def _remove_timm_classifier(skeleton: Any, name: str) -> str:
    """Remove the classifier and return its path, or ""."""
    classifier = skeleton.get_classifier()
    if isinstance(classifier, tuple | list):
        raise IncompatibleModelsError(
            f"{name} has {len(classifier)} classifiers; expected one",
            hint="Use the model without distillation.",
        )
    if not isinstance(classifier, nn.Linear):
        return ""
    path = next(path for path, module in skeleton.named_modules() if module is classifier)
    skeleton.set_submodule(path, nn.Identity())
    return path
