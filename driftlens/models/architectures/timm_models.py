"""The loader for image models of timm, by name, from a folder as timm saves it, or from the Hub.

The classifier is removed; its input is the final feature.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from driftlens.checkpoints.alignment import Spellings
from driftlens.checkpoints.loading import needed_config
from driftlens.checkpoints.unsupported import wrong_family
from driftlens.models.architecture import Architecture, ArchitectureRequest, FolderFormat, loaders, weightless
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import IMAGE
from driftlens.models.preprocessing import image_preprocess
from driftlens.utils.errors import IncompatibleModelsError

_USAGE = """\
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
_LOADS = ("pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")
_PIXELS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


@loaders.register("timm")
def _load_timm(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a model of timm; its source is a model name, a folder or a Hub id."""
    import timm
    from timm.data import create_transform, resolve_data_config

    source = request.source.removeprefix("hf-hub:")
    name, stated, options = source, dict[str, Any](), dict[str, Any]()
    if not timm.is_model(source):
        name, stated, options = _stated(source, offline=request.access.offline)
    build = partial(timm.create_model, name, pretrained=False, **options)
    skeleton = weightless(lambda: _with_buffers(build()), source)
    # Older folders have the pixel settings next to the architecture. A model built with `img_size` accepts only images
    # of this size, but its default settings may have another.
    pixels = {key: stated[key] for key in _PIXELS if key in stated} | dict(stated.get("pretrained_cfg") or {})
    if "input_size" not in pixels and (size := options.get("img_size")):
        pixels["input_size"] = (3, *([size] * 2 if isinstance(size, int) else size))
    if pixels:
        skeleton.pretrained_cfg = skeleton.default_cfg = {**skeleton.pretrained_cfg, **pixels}
    classifier = _without_classifier(skeleton, name)
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
        layout=Spellings(
            [{key: key for key in skeleton.state_dict()}], (f"{classifier}.",) if classifier else ()
        ),
        preprocess=preprocess,
        folder=FolderFormat("model.safetensors", {"config.json": stated}, usage=lambda keys, files: _USAGE)
        if stated
        else None,
        classifier=classifier,
    )


def _stated(source: str, *, offline: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return timm's name for the model of a folder or Hub id, its config.json, and options to build it with."""
    import timm

    hint = "Use a name in timm.list_models(), or a folder saved by timm."
    stated = needed_config(source, "config.json", "a model of timm", offline=offline, hint=hint)
    name, options = str(stated.get("architecture")), dict(stated.get("model_args") or {})
    if not timm.is_model(name):
        raise wrong_family(stated, source, "a config.json of timm")
    if odd := [key for key in options if key in _LOADS]:
        raise IncompatibleModelsError(
            f"config.json of {source} sets {odd[0]}, which reads other files",
            hint="Remove it from `model_args`.",
        )
    if "num_classes" in stated:
        options.setdefault("num_classes", stated["num_classes"])
    return name, stated, options


def _with_buffers(skeleton: nn.Module) -> nn.Module:
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


def _without_classifier(skeleton: Any, name: str) -> str:
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
