"""Everything about a model except its weights: skeleton, layers, key names, preprocessing, text tower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from driftlens.checkpoints.alignment import KeyLayout, Layout
from driftlens.checkpoints.loading import (
    embedding_folder,
    embedding_notices,
    find_config_folder,
    read_prompts,
    require_known_modules,
)
from driftlens.checkpoints.lora import LoraSource
from driftlens.checkpoints.tensor_sources import CompositeSource, StateSource, rename_keys
from driftlens.checkpoints.unsupported import LIVE, wrap_library_errors
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import IMAGE, LayerChain
from driftlens.models.heads import LmHeadSpec, TextTower
from driftlens.models.preprocessing import Preprocess, image_preprocess
from driftlens.models.readouts import HeadTemplate, add_embedding_head, embedding_head
from driftlens.models.vocabularies import vocabulary_row_counts
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, SpecError
from driftlens.utils.registry import Registry

# Subfolder of saved folders. Heads are not merged, so each task keeps the head of its own expert there.
HEADS = "heads"


@dataclass(frozen=True)
class FolderFormat:
    """How to save a model as a folder that its original library loads.

    `weights` is the file of the weights, `configs` the content of JSON files by name, `required` returns the keys that
    the library requires, even if the base's file lacks them, and `usage` Python that loads the folder with these keys
    and other files, or "".
    """

    weights: str
    configs: Mapping[str, object]
    required: Callable[[], Collection[str]] = frozenset
    usage: Callable[[Collection[str], Collection[str]], str] = lambda keys, files: ""


@dataclass(frozen=True)
class Architecture:
    """One network architecture, without weights.

    Attributes:
        loader: the loader that built it, or `live` for a module of the caller's.
        source: Hub id, folder, model name or file.
        skeleton: the library's own module in eval mode; parameters are on meta unless the loader is `live`.
        chain: the skeleton's layers.
        layout: the key names of checkpoints; None if they must match exactly.
        preprocess: samples -> raw inputs; None if the caller passes raw inputs.
        folder: how to save it for the original library; None if only a state dict can be saved.
        open_text: the base's weights under their own key names -> its text tower; None without one.
        classifier: path of the linear classifier of whole models, which the skeleton lacks; "" without one.
        lm: the skeleton's language-model head; None without one.
        own_head: the head of several layers that whole models have instead; None without one.
    """

    loader: str
    source: str
    skeleton: nn.Module
    chain: LayerChain
    layout: Layout | None = None
    preprocess: Preprocess | None = None
    folder: FolderFormat | None = None
    open_text: Callable[[StateSource], TextTower] | None = field(default=None, repr=False)
    classifier: str = ""
    lm: LmHeadSpec | None = None
    own_head: HeadTemplate | None = None

    @property
    def adapter(self) -> str:
        """The name of the adapter for the model family."""
        return self.chain.architecture

    @property
    def has_classifier(self) -> bool:
        """True if whole models of this architecture end in a classifier."""
        return bool(self.classifier) or self.own_head is not None

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user."""
        return (self.preprocess.notice,) if self.preprocess is not None and self.preprocess.notice else ()

    @property
    def source_info(self) -> dict[str, str]:
        """The loader and the source of the architecture, for manifests."""
        return {"loader": self.loader, "source": self.source}

    @property
    def keys(self) -> tuple[str, ...]:
        """The skeleton's key names, in its order."""
        return tuple(self.skeleton.state_dict())

    def align(self, source: StateSource, *, fallback: StateSource | None = None) -> StateSource:
        """Return a checkpoint under the skeleton's key names, without text tower and index buffers.

        `fallback`, the base, provides the projection of experts that were saved without.
        """
        if self.layout is None:
            return source
        return self.layout.align(source, self.keys, fallback)

    def lora_base(self, base: StateSource, folder: str) -> StateSource:
        """Return the base under the weight names that LoRA adapters in `folder` use."""
        if not isinstance(self.layout, KeyLayout):
            return base
        # Adapters of another structure are read by the names in the base's own file.
        with contextlib.suppress(CheckpointError, IncompatibleModelsError):
            aligned = self.align(base)
            places = {key: (aligned, key) for key in aligned.headers} | self._pooler_sources(base)
            head = self.lm.head if self.loader in CAUSAL and self.lm is not None else ""
            # A tied base has no tensor for the head. An adapter that changes the head needs one to be added to.
            if head and head not in places:
                table = next(key for key in vocabulary_row_counts(self.skeleton) if key != head)
                headed = CompositeSource(base.name, {**places, head: (aligned, table)})
                if LoraSource(headed, folder).has_untied_head(table, head):
                    return headed
            LoraSource(aligned, folder)
            return CompositeSource(base.name, places)
        return base

    def _pooler_sources(self, base: StateSource) -> dict[str, tuple[StateSource, str]]:
        """Return the base's pooler weights by their names in the whole model, each with its source and key."""
        core = f"{getattr(self.skeleton, 'base_model_prefix', '')}."
        names = () if self.own_head is None else self.own_head.names.values()
        return {
            name: (base, key)
            for name in names
            for key in base.headers
            if name.startswith(core) and f".{key}".endswith(f".{name.removeprefix(core)}")
        }

    def classifier_keys(self, stored: StateSource) -> tuple[str, ...] | None:
        """Return the checkpoint keys of the classifier's weights, or None if the checkpoint has no classifier."""
        linear = (f"{self.classifier}.weight",) if self.classifier else ()
        names = linear if self.own_head is None else tuple(self.own_head.names.values())
        keys = []
        for name in names:
            # A pooler has the key of the base, which may be a core alone.
            core = getattr(self.skeleton, "base_model_prefix", "")
            spelled = (name, name.removeprefix(f"{core}."))
            ends = [key for end in spelled for key in stored.headers if f".{key}".endswith(f".{end}")]
            if not ends:
                return None
            # Another module's key may have the same ending. The whole model's own has no further prefix.
            keys.append(min(ends, key=len))
        return tuple(keys) or None

    def classifier_source(self, stored: StateSource) -> StateSource | None:
        """Return the classifier's weights in a checkpoint under the library's names; None if it has none."""
        keys = self.classifier_keys(stored)
        if keys is None:
            return None
        if self.own_head is not None:
            return rename_keys(stored, dict(zip(self.own_head.names, keys, strict=True)))
        places = {"weight": keys[0], "bias": f"{keys[0].removesuffix('weight')}bias"}
        present = {part: key for part, key in places.items() if key in stored.headers}
        return rename_keys(stored, {f"{self.classifier}.{part}": key for part, key in present.items()})

    def text_tower(self, base: StateSource) -> TextTower:
        """Return the text tower of a base, which is given under its own key names."""
        if self.open_text is None:
            raise no_text_tower_error(self.source)
        with wrap_library_errors(self.source):
            return self.open_text(base)


@dataclass(frozen=True)
class ArchitectureRequest:
    """The arguments of a loader; see `load_architecture`."""

    source: str
    blocks: str | None = None
    access: Permissions = Permissions()
    untied: bool = False
    unread: bool = False
    pictured: bool = False


loaders: Registry[Callable[[ArchitectureRequest], Architecture]] = Registry(
    "loader", "driftlens.models.architectures", "driftlens.loaders"
)

# Loaders of models with a language-model head. An adapter or an expert may untie it from the embeddings.
CAUSAL = ("hf-decoder", "hf-vlm", "hf-seq2seq")

PYTHON = "python:"


def load_architecture(
    loader: str,
    source: str,
    *,
    blocks: str | None = None,
    access: Permissions = Permissions(),
    untied: bool = False,
    unread: bool = False,
    pictured: bool = False,
) -> Architecture:
    """Return the architecture of `source`, without reading weights.

    Args:
        loader: the name of a registered loader, or `python:package.module:function`.
        source: Hub id or local folder; for open_clip also a model name or a model_config.json. OpenAI's weights need
            a quickgelu name: `ViT-B-32-quickgelu`.
        blocks: path of the list of blocks, for loaders that read any model.
        access: the permissions of the run.
        untied: True to give a language model a head apart from its embeddings.
        unread: True if no text will be read, so that no tokenizer is needed.
        pictured: True if samples are texts with images.
    """
    request = ArchitectureRequest(source, blocks, access, untied, unread, pictured)
    if loader.startswith(PYTHON) and loader not in loaders:
        return _load_from_python_function(loader, request)
    # The configuration is untrusted: libraries raise errors of any class on one that they do not expect.
    with wrap_library_errors(request.source):
        return _with_sentence_embedding(loaders[loader](request))


def _with_sentence_embedding(architecture: Architecture) -> Architecture:
    """Make the embedding the final feature if the folder belongs to sentence-transformers."""
    is_asked = architecture.chain.modality.name == "text" and architecture.lm is None
    preprocess = architecture.preprocess
    root = embedding_folder(find_config_folder(architecture.source)) if is_asked else None
    if root is None or preprocess is None or preprocess.texts is None:
        return architecture
    require_known_modules(root)
    readout, stated = embedding_head(root), read_prompts(root)
    notices = filter(None, (preprocess.notice, *embedding_notices(root)))
    pools_lead = readout.pooling.includes_prompt
    reader = replace(preprocess.texts, prompts=stated, lead=stated.default, pools_lead=pools_lead)
    return replace(
        architecture,
        chain=add_embedding_head(architecture.chain, readout),
        own_head=None,  # classifiers of experts do not read the embedding
        preprocess=replace(preprocess, transform=reader, texts=reader, notice="; ".join(notices)),
    )


def reject_blocks_option(request: ArchitectureRequest, loader: str) -> None:
    """Raise if `architecture.blocks` is set for a loader whose models have fixed blocks."""
    if request.blocks is not None:
        raise SpecError(
            f"architecture.blocks is {request.blocks!r}, but the loader {loader} has fixed blocks",
            hint="Remove `blocks`, or use the loader hf-auto or timm.",
        )


def _load_from_python_function(loader: str, request: ArchitectureRequest) -> Architecture:
    """Load a module and its image transform by calling the user's function."""
    target = loader.removeprefix(PYTHON)
    function = request.access.import_function(target, "loader")
    with wrap_library_errors(target):
        returned = function(request.source) if request.source else function()
    module, transform = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(module, nn.Module) or not callable(transform):
        raise SpecError(
            f"{target} returned {type(returned).__name__}; expected a pair: an nn.Module with weights, and a function "
            "from a PIL image to the input tensor",
            hint="For example `return model.eval(), transform`, as in torchvision and timm.",
        )
    preprocess = image_preprocess(target, transform)
    with wrap_library_errors(target):
        chain = sequential_chain(module.eval(), preprocess.example(), blocks=request.blocks)
    chain = replace(chain, modality=replace(IMAGE, pool=chain.modality.pool))
    return Architecture(loader, request.source or target, module, chain, preprocess=preprocess)


def no_text_tower_error(source: str) -> SpecError:
    """Return the error for zero-shot heads of a model without text tower."""
    return SpecError(
        f"{source} has no text tower for class names and templates",
        hint="Use a whole CLIP as base and `architecture.source`, or embeddings in `heads.<task>.file`.",
    )


# Limit of the values that a constructor may write into one tensor: 512 MiB in float32. An untrusted configuration
# may ask for tables of any size, which would exhaust the memory before an error.
MAX_FILLED = 1 << 27

_FILLING = frozenset({torch.randn, torch.rand, torch.ones, torch.zeros, torch.full, torch.arange, torch.linspace})
# By name, because transformers replaces torch's functions while it builds a model.
_DRAWING = frozenset(
    {"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_"}
    | {"xavier_uniform_", "orthogonal_"}
)


class _SizeLimit(TorchFunctionMode):
    """Raises for huge tensors in untrusted configurations, and skips random initialization on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Random numbers for meta tensors have no effect, but take time for each weight.
        if getattr(func, "__name__", "") in _DRAWING and (drawn := args[0] if args else kwargs["tensor"]).is_meta:
            return drawn
        if func in _FILLING:
            size = func(*args, **{**(kwargs or {}), "device": "meta"}).numel()
            if size > MAX_FILLED:
                raise ValueError(f"a tensor has {size:,} values; the limit is {MAX_FILLED:,}")
        return func(*args, **(kwargs or {}))


def build_on_meta(build: Callable[[], nn.Module], source: str) -> Any:
    """Build a model with parameters on meta and real buffers, in eval mode, without gradients."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _SizeLimit():
        module = build()
    saved = module.state_dict()
    # Buffers that no checkpoint has must be computed here, and can't be if they depend on weights.
    bare = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in saved]
    if bare:
        raise IncompatibleModelsError(
            f"the model of {source} computes {bare[0]} from weights, which are not loaded yet",
            hint=LIVE,
        )
    return module.eval().requires_grad_(False)
