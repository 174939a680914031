"""Image towers of CLIP in transformers and open_clip: their adapters and loaders.

Blocks are the library's own modules, called with the weights of any model. Shapes: pixels [n, c, h, w]; hidden
[n, t, d], token 0 being the class token (CLS) and the others the patches row by row; features [n, d].
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.checkpoints.alignment import TowerKeyLayout
from driftlens.checkpoints.loading import (
    TOKENIZERS,
    image_processor_config,
    load_tokenizer,
    read_json,
    require_config,
)
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.checkpoints.unsupported import LIVE
from driftlens.models.architecture import (
    Architecture,
    ArchitectureRequest,
    FolderFormat,
    build_on_meta,
    loaders,
    no_text_tower_error,
    reject_blocks_option,
)
from driftlens.models.architectures.encoders import read_plain_config
from driftlens.models.chain import (
    IMAGE,
    Layer,
    LayerChain,
    Parameters,
    SideInputs,
    Site,
    State,
    Tap,
    WeightSlot,
    adapters,
    attribute_at,
)
from driftlens.models.heads import TextTower
from driftlens.models.preprocessing import hf_clip_preprocess, open_clip_preprocess
from driftlens.models.tracing.block_call import (
    buffers_on_device,
    call_with_weights,
    eval_mode,
    run_until_module,
)
from driftlens.models.tracing.block_sites import site_kind, tap_sites
from driftlens.utils.errors import (
    DataError,
    IncompatibleModelsError,
    SpecError,
)
from driftlens.utils.files import expand_home

log = logging.getLogger("driftlens")

# Processors of transformers return a dict; other entries than the pixels (texts) are not read.
PIXELS = "pixel_values"

# The supported poolings by their names in open_clip.
_POOLINGS = {"tok": "cls", "avg": "patch_mean"}

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Return the name of the function that `activation` computes, or None."""
    # By values, because libraries have one function under many class names, and different functions under one.
    probe = torch.linspace(-6, 6, 97, dtype=torch.float64)
    with torch.no_grad():
        values = activation(probe)
    same = (name for name, other in _ACTIVATIONS.items() if torch.allclose(values, other(probe), 0, 1e-12))
    return next(same, None)


@dataclass(frozen=True, kw_only=True)
class _ClipAdapter:
    """The adapter for the CLIP image towers of one library: the paths of their modules, and library details.

    Of whole models, the attribute `inner` is the tower and `entry` computes the feature of images. Every model has one
    of the paths in `holds`. With `projects_inside` the projection belongs to the tower, stored as [in, out].
    `block_sites` are in forward order: norm, q, k, v, out, norm, and both layers of the MLP. Every block has the
    parameters `required` and may have `optional` ones; `unpack` maps it to the module to run for it, and to its
    parameters' slots in the checkpoint, relative to the block.
    """

    name: str
    layout: TowerKeyLayout
    library: str
    inner: str
    blocks: str
    attention: str
    activation: str
    image_size: str
    entry: str
    projects_inside: bool
    embeddings: tuple[str, str, str]
    stem_norm: str
    block_sites: tuple[str, ...]
    head_norm: str
    projection: str
    required: frozenset[str]
    holds: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    unpack: Callable[[Any], tuple[nn.Module, dict[str, WeightSlot]]]

    def matches(self, module: nn.Module) -> bool:
        """Return True if `module` is, or holds, an image tower that this adapter supports."""
        return self._unsupported_reason(module) is None

    def _unsupported_reason(self, module: nn.Module) -> str | None:
        tower, _ = self._tower_and_key_prefix(module)
        parts = (*self.embeddings, self.stem_norm, self.blocks, self.head_norm)
        missing = ", ".join(part for part in parts if attribute_at(tower, part) is None)
        reason = _unsupported_tower_reason(module, tower)
        if reason is None and missing:
            return f"{type(module).__name__} is no CLIP image tower of {self.library} (missing: {missing})"
        for index, block in enumerate(() if reason else tower.get_submodule(self.blocks)):
            keys, activation = set(block.state_dict()), block.get_submodule(self.activation)
            odd = sorted((keys - self.required - self.optional) | (self.required - keys))
            if odd:
                return f"block {index} is no plain pre-norm block (extra or missing: {', '.join(odd)})"
            if activation_name(activation) is None:
                return f"its activation is {activation}; expected {', '.join(_ACTIVATIONS)}"
        return reason

    def chain(self, module: nn.Module) -> LayerChain:
        """Return the layers of a tower; keys are those of `module.state_dict()`."""
        reason = self._unsupported_reason(module)
        if reason is not None:
            raise IncompatibleModelsError(
                f"this model of {self.library} can't be split into layers: {reason}",
                hint=LIVE,
            )
        tower, prefix = self._tower_and_key_prefix(module)
        blocks = [
            self._block_layer(block, number + 2, f"{prefix}{self.blocks}.{number}")
            for number, block in enumerate(tower.get_submodule(self.blocks))
        ]
        projects = attribute_at(tower if self.projects_inside else module, self.projection) is not None
        if self.projects_inside:
            feature = prefix.removesuffix(".")
        else:
            feature = self.projection if projects else prefix + self.head_norm
        paths = (f"{prefix}{self.stem_norm}", *(block.path for block in blocks), feature)
        return LayerChain(
            architecture=self.name,
            layers=(
                self._stem_layer(tower, prefix),
                *blocks,
                self._head_layer(tower, prefix, len(blocks) + 2, projects),
            ),
            start=partial(_state_from_pixels, shape=self._pixel_shape(tower)),
            library_states=partial(_record_module_outputs, paths=paths, entry=self.entry),
            token_weights=_token_weight_rules(tower.get_parameter(self.embeddings[2]).shape[0]),
            settings=self._architecture_settings(tower),
            modality=IMAGE,
            final=feature,
        )

    def _tower_and_key_prefix(self, module: nn.Module) -> tuple[Any, str]:
        inner = getattr(module, self.inner, None)
        return (module, "") if inner is None else (inner, f"{self.inner}.")

    def _stem_layer(self, tower: Any, prefix: str) -> Layer:
        keys = (*self.embeddings, *_norm_parameter_names(tower, self.stem_norm))
        sites = _sites_of_module(tower, self.stem_norm, "tokens")
        first_block = tower.get_submodule(self.blocks)[0]

        def run_stem(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
            pixels = state["pixels"].to(parameters[self.embeddings[0]].dtype)
            # Position ids follow the pixels: a pass in float64 may run on the CPU while the model is on the GPU.
            with buffers_on_device(tower, pixels.device), tap_sites(tower, sites, tap):
                return {
                    "hidden": run_until_module(
                        first_block, lambda: call_with_weights(tower, parameters, (pixels,), {})
                    )
                }

        path = prefix + self.embeddings[0].partition(".")[0]
        return Layer(1, "stem", path, {key: WeightSlot(prefix + key) for key in keys}, run_stem, sites)

    def _block_layer(self, block: nn.Module, index: int, path: str) -> Layer:
        norm1, q, k, v, out, norm2, fc1, fc2 = self.block_sites
        module, slots = self.unpack(block)
        sites = (
            *_sites_of_module(module, norm1, "hidden"),
            *_sites_of_module(module, q, norm1),
            *_sites_of_module(module, k, norm1, mixes_tokens=True),
            *_sites_of_module(module, v, norm1, mixes_tokens=True),
            *_sites_of_module(module, out, "attention"),
            *_sites_of_module(module, norm2, "attended"),
            *_sites_of_module(module, fc1, norm2),
            *_sites_of_module(module, fc2, "activation"),
        )
        run = partial(_run_layer_with_taps, module, sites)
        slots = {name: replace(slot, key=f"{path}.{slot.key}") for name, slot in slots.items()}
        return Layer(index, "block", path, slots, run, sites, is_residual=True)

    def _head_layer(self, tower: Any, prefix: str, index: int, projects: bool) -> Layer:
        norm, (pooling, norm_first) = self.head_norm, _pooling_and_norm_order(tower)
        slots = {key: WeightSlot(prefix + key) for key in _norm_parameter_names(tower, norm)}
        if projects:
            inside, weight = self.projects_inside, f"{self.projection}.weight"
            slots[weight] = WeightSlot(prefix + self.projection if inside else weight, transposed=inside)
        head = _PoolingHead(pooling, norm_first)
        head.add_module(norm, tower.get_submodule(norm))
        sites = _sites_of_module(head, norm, "hidden", token_weights="patches" if norm_first else "pooled")
        if projects:
            # Any size will do: the weight is replaced on every call.
            head.add_module(self.projection, nn.Linear(1, 1, bias=False, device="meta"))
            sites += _sites_of_module(head, self.projection, norm, token_weights="pooled")
        return Layer(index, "head", prefix + norm, slots, partial(_run_layer_with_taps, head, sites), sites)

    def _pixel_shape(self, tower: Any) -> tuple[int, int, int]:
        size = attribute_at(tower, self.image_size)
        height, width = [size] * 2 if isinstance(size, int) else size
        return tower.get_parameter(self.embeddings[0]).shape[1], height, width

    def _architecture_settings(self, tower: Any) -> dict[str, object]:
        block, (pooling, norm_first) = tower.get_submodule(self.blocks)[0], _pooling_and_norm_order(tower)
        return {
            "activation": activation_name(block.get_submodule(self.activation)),
            "eps": block.get_submodule(self.block_sites[0]).eps,
            "num_heads": block.get_submodule(self.attention).num_heads,
            "patch_size": list(tower.get_parameter(self.embeddings[0]).shape[-2:]),
            "image_size": list(self._pixel_shape(tower)[1:]),
            "pooling": pooling,
            "norm_before_pooling": norm_first,
        }


def _unsupported_tower_reason(module: nn.Module, tower: Any) -> str | None:
    """Return the reason why a tower is not supported, or None."""
    if hasattr(module, "classifier"):
        return f"{type(module).__name__} ends in a classifier"
    if hasattr(tower, "trunk"):
        return "it is a timm trunk (SigLIP, EVA02, ConvNeXt, ...); expected a transformer of open_clip"
    if hasattr(tower, "layer1") and hasattr(tower, "attnpool"):
        return "it is a ResNet; expected a vision transformer"
    if getattr(tower, "attn_pool", None) is not None:
        return "it pools by attention (attn_pool), as CoCa"
    if getattr(tower, "pool_type", "tok") not in _POOLINGS:
        return f"it pools by {tower.pool_type!r}, expected 'tok' or 'avg'"
    return None


def _pooling_and_norm_order(tower: Any) -> tuple[str, bool]:
    """Return how tokens are pooled, and True if the final norm runs on all tokens before that."""
    # Towers of transformers always pool by the class token and have no such attribute.
    kind = getattr(tower, "pool_type", "tok")
    # For a single token the order of norm and pooling makes no difference.
    return _POOLINGS[kind], kind == "avg" and not tower.final_ln_after_pool


class _PoolingHead(nn.Module):
    """Pools tokens to one, [n, 1, d], and runs its children on it: the final norm, and a projection if there is one.

    With `norm_first` the norm runs on all tokens; for a single token the order makes no difference.
    """

    def __init__(self, pooling: str, norm_first: bool) -> None:
        super().__init__()
        self.pooling, self.norm_first = pooling, norm_first

    def forward(self, hidden: Tensor, _mask: None = None) -> Tensor:
        norm, *projections = self.children()
        if self.norm_first:
            hidden = norm(hidden)
        pooled = hidden[:, :1] if self.pooling == "cls" else hidden[:, 1:].mean(dim=1, keepdim=True)
        if not self.norm_first:
            pooled = norm(pooled)
        for project in projections:
            pooled = project(pooled)
        return pooled.squeeze(1)


def _run_layer_with_taps(
    module: nn.Module,
    sites: tuple[Site, ...],
    parameters: Parameters,
    state: State,
    side: SideInputs,
    tap: Tap | None = None,
) -> State:
    # None is the attention mask of transformers; open_clip takes keys of its own there.
    with tap_sites(module, sites, tap):
        return {"hidden": call_with_weights(module, parameters, (state["hidden"], None), {})}


def _sites_of_module(parent: nn.Module, name: str, reads: str, **options: Any) -> tuple[Site, ...]:
    """Return the calibratable site of a module, or nothing for a norm without scale and shift."""
    module = parent.get_submodule(name)
    kind = site_kind(module)
    return () if kind is None else (Site(name, kind, reads, eps=getattr(module, "eps", None), **options),)


def _norm_parameter_names(parent: nn.Module, path: str) -> list[str]:
    return [f"{path}.{key}" for key in parent.get_submodule(path).state_dict()]


def _pixels_from_batch(inputs: Any) -> Tensor:
    pixels: Tensor = inputs[PIXELS] if isinstance(inputs, Mapping) else inputs
    return pixels


def _state_from_pixels(inputs: Any, *, shape: tuple[int, int, int]) -> tuple[State, SideInputs]:
    """Return the state at boundary 0; an image tower needs no side inputs."""
    pixels = _pixels_from_batch(inputs)
    if tuple(pixels.shape[1:]) != shape:
        raise DataError(
            f"a batch of pixels is {list(pixels.shape)}; expected [n, {', '.join(map(str, shape))}]",
            hint="Use the model's own image processor.",
        )
    return {"pixels": pixels}, SideInputs()


def _record_module_outputs(module: nn.Module, inputs: Any, *, paths: Sequence[str], entry: str) -> list[State]:
    """Return the outputs of the modules at `paths` in one pass in eval mode."""
    outputs: dict[str, Tensor] = {}

    def record_output(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[path] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks, torch.no_grad(), eval_mode(module):
        for path in paths:
            hooks.callback(module.get_submodule(path).register_forward_hook(partial(record_output, path)).remove)
        getattr(module, entry, module)(_pixels_from_batch(inputs))
    return [{"hidden": outputs[path]} for path in paths]


def _token_weight_rules(num_tokens: int) -> dict[str, Callable[[State, SideInputs], Tensor]]:
    """Return rules of token weights by name; each gives weights [n, t].

    - `uniform`: every token counts 1.
    - `cls_emphasis`: CLS counts 1, every other token 0.01. The FeatCal authors' code weighs the last block's
      sites this way, k and v projections excepted: of that block only the CLS row reaches the feature,
      through keys and values of all tokens.
    - `patches`: every token but CLS, for a norm whose output is averaged over patches.
    - `pooled`: the one token [n, 1] that is left after pooling.
    """

    def constant_token_weights(count: int, cls: float, others: float, state: State, side: SideInputs) -> Tensor:
        entry = next(iter(state.values()))
        weights = entry.new_full((len(entry), count), others)
        weights[:, 0] = cls
        return weights

    return {
        "uniform": partial(constant_token_weights, num_tokens, 1, 1),
        "cls_emphasis": partial(constant_token_weights, num_tokens, 1, 0.01),
        "patches": partial(constant_token_weights, num_tokens, 0, 1),
        "pooled": partial(constant_token_weights, 1, 1, 1),
    }


_HF_LAYOUT = TowerKeyLayout(
    loader="hf-clip",
    anchor="embeddings.class_embedding",
    tower="vision_model.",
    projection="visual_projection.weight",
)

_HF_SITES = (
    *("layer_norm1", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    *("layer_norm2", "mlp.fc1", "mlp.fc2"),
)
_HF_KEYS = tuple(map(".".join, itertools.product(_HF_SITES, ("weight", "bias"))))


HF_CLIP_VIT = _ClipAdapter(
    name="hf_clip_vit",
    layout=_HF_LAYOUT,
    library="transformers",
    inner="vision_model",
    blocks="encoder.layers",
    holds=("encoder.layers", "vision_model.encoder.layers"),
    attention="self_attn",
    activation="mlp.activation_fn",
    image_size="embeddings.image_size",
    # `CLIPModel.forward` requires texts as well.
    entry="get_image_features",
    projects_inside=False,
    embeddings=(
        "embeddings.patch_embedding.weight",
        "embeddings.class_embedding",
        "embeddings.position_embedding.weight",
    ),
    # Misspelled in the library.
    stem_norm="pre_layrnorm",
    block_sites=_HF_SITES,
    head_norm="post_layernorm",
    projection="visual_projection",
    required=frozenset(_HF_KEYS),
    unpack=lambda block: (block, {key: WeightSlot(key) for key in _HF_KEYS}),
)
adapters.register(HF_CLIP_VIT.name)(HF_CLIP_VIT)


@loaders.register("hf-clip")
def _load_hf_clip(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a CLIP, or a CLIP image tower, of transformers; its source is a folder or Hub id."""
    source, offline = request.source, request.access.offline
    config = read_plain_config(request, "hf-clip")
    skeleton = _hf_skeleton(config, source)
    size = skeleton.config.image_size
    preprocess = hf_clip_preprocess(image_processor_config(source, offline=offline), (size, size), source)

    return Architecture(
        loader="hf-clip",
        source=source,
        skeleton=skeleton,
        chain=HF_CLIP_VIT.chain(skeleton),
        layout=_HF_LAYOUT,
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors",
            {"config.json": config, "preprocessor_config.json": preprocess.settings},
            usage=partial(_hf_usage_code, type(skeleton).__name__),
        ),
        open_text=partial(_load_hf_text_tower, config, source, offline),
    )


_WHOLE = """\
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

folder = "."  # this one, or the model's id on the Hub
model, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder)
prompts = ["a photo of a cat.", "a photo of a dog."]
inputs = processor(text=prompts, images=Image.open("image.png"), padding=True, return_tensors="pt")
output = model(**inputs)
features, scores = output.image_embeds, output.logits_per_image  # features of unit length
"""
_TOWER = """\
from PIL import Image
from transformers import CLIPImageProcessor, {tower}

folder = "."  # this one, or the model's id on the Hub
model, processor = {tower}.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder)
features = model(**processor(images=Image.open("image.png"), return_tensors="pt")).{output}
"""


def _hf_usage_code(tower: str, keys: Collection[str], files: Collection[str]) -> str:
    """Return Python that uses a saved folder: with texts if it has a tokenizer, or else the image tower alone."""
    is_whole = any(key.startswith("text_model.") for key in keys)
    if is_whole and not set(TOKENIZERS).isdisjoint(files):
        return _WHOLE
    if is_whole:
        log.warning("the base has no tokenizer files, so the saved folder can't read prompts")
    output = "pooler_output" if tower == "CLIPVisionModel" else "image_embeds"
    return _TOWER.format(tower=tower, output=output)


def _hf_skeleton(config: dict[str, Any], source: str) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

    vision, named = config, config.get("architectures") or []
    if config["model_type"] == "clip":
        # A whole CLIP projects to its own projection_dim; the copy inside vision_config may be stale.
        vision = {**config.get("vision_config", {}), "projection_dim": config.get("projection_dim", 512)}
    tower = CLIPVisionModel if "CLIPVisionModel" in named else CLIPVisionModelWithProjection

    def build_tower() -> Any:
        tower_config = CLIPVisionConfig.from_dict(vision)
        # Eager attention computes its softmax in float32, so a pass in float64 would be no more exact.
        tower_config._attn_implementation = "sdpa"
        return tower(tower_config)

    return build_on_meta(build_tower, source)


def _load_hf_text_tower(config: dict[str, Any], source: str, offline: bool, base: StateSource) -> TextTower:
    from transformers import CLIPConfig, CLIPModel

    if config["model_type"] != "clip":
        raise no_text_tower_error(source)
    model = build_on_meta(lambda: CLIPModel(CLIPConfig.from_dict(config)), source)
    _load_text_tower_weights(model, base, _HF_LAYOUT)
    tokenizer = _load_clip_tokenizer(source, model.config.text_config, offline)
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def embed_prompts(prompts: Sequence[str]) -> Tensor:
        tokens = tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        # Not `get_text_features`, whose return type has changed between versions of transformers.
        features: Tensor = model.text_projection(model.text_model(**tokens).pooler_output)
        return features

    return TextTower(embed_prompts, model.logit_scale.exp().item())


def _load_clip_tokenizer(source: str, text_config: Any, offline: bool) -> Any:
    tokenizer = load_tokenizer(source, offline=offline, kind="CLIPTokenizer")
    # The text feature is read at the end token. Old configurations have the id 2, but mean the last of the vocabulary.
    end = text_config.eos_token_id if text_config.eos_token_id != 2 else text_config.vocab_size - 1
    # transformers 5 makes an empty tokenizer where there are no files, rather than fail.
    if tokenizer is None or tokenizer.eos_token_id != end:
        raise SpecError(
            f"{source} has no tokenizer for its text tower",
            hint="Put the base's tokenizer files next to its config.json, or use `heads.<task>.file`.",
        )
    return tokenizer


def _load_text_tower_weights(model: nn.Module, base: StateSource, layout: TowerKeyLayout) -> None:
    """Load a base's weights into a whole CLIP, except its image tower, in float32; raise if there is no text tower."""
    before = layout.wrapper_prefix(base.headers, base.name)
    keys = [key for key in model.state_dict() if not key.startswith((layout.tower, layout.projection))]
    if not all(before + key in base.headers for key in keys):
        raise no_text_tower_error(base.name)
    # `assign`, because the model is on meta; not strict, because the image tower stays there.
    model.load_state_dict({key: base.read(before + key).float() for key in keys}, strict=False, assign=True)


CONFIG_FILE = "open_clip_config.json"
_OPEN_LAYOUT = TowerKeyLayout(loader="open-clip", anchor="class_embedding", tower="visual.", projection="proj")
_FOREIGN_TEXT = ("hf_model_name", "hf_tokenizer_name", "tokenizer_kwargs")
_OPEN_USAGE = """\
import open_clip
from PIL import Image

name = "local-dir:."  # this folder; on the Hub, hf-hub: and the model's id
model, preprocess = open_clip.create_model_from_pretrained(name)
tokenizer = open_clip.get_tokenizer(name)
model.eval()
features = model.encode_image(preprocess(Image.open("image.png"))[None])
texts = model.encode_text(tokenizer(["a photo of a cat.", "a photo of a dog."]))
"""
# Only the image tower of this model is used, and the constructor of open_clip requires a text tower.
_SMALLEST_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}


class _UnpackedAttention(nn.Module):
    """Self-attention with three linear modules for the packed projection: queries, keys and values are sites."""

    # Three products take as long as one with the packed weight: measured for the widths of ViT-B and ViT-L.
    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.num_heads, self.is_torchs = packed.num_heads, isinstance(packed, nn.MultiheadAttention)
        width = packed.in_proj_weight.shape[1]
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, device="meta") for _ in range(4)
        )

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        """Return what the packed attention returns without a mask."""
        queries, keys, values = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return (output,) if self.is_torchs else output


_OPEN_SITES = (
    *("ln_1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
    *("ln_2", "mlp.c_fc", "mlp.c_proj"),
)


def _unpack_open_clip_block(block: Any) -> tuple[nn.Module, dict[str, WeightSlot]]:
    """Return a block with unpacked attention, and the slots of its parameters."""
    width = block.attn.in_proj_weight.shape[1]
    slots = {key: WeightSlot(key) for key in block.state_dict() if ".in_proj_" not in key}
    for part in ("weight", "bias"):
        for position, site in enumerate(_OPEN_SITES[1:4]):
            rows = (position * width, (position + 1) * width)
            slots[f"{site}.{part}"] = WeightSlot(f"attn.in_proj_{part}", rows=rows)
    # A shallow copy: the model itself keeps its packed attention.
    unpacked = copy.copy(block)
    unpacked._modules = {**block._modules, "attn": _UnpackedAttention(block.attn)}
    return unpacked, slots


OPEN_CLIP_VIT = _ClipAdapter(
    name="open_clip_vit",
    layout=_OPEN_LAYOUT,
    library="open_clip",
    inner="visual",
    blocks="transformer.resblocks",
    holds=("transformer.resblocks", "visual.transformer.resblocks"),
    attention="attn",
    activation="mlp.gelu",
    image_size="image_size",
    entry="visual",
    projects_inside=True,
    embeddings=("conv1.weight", "class_embedding", "positional_embedding"),
    stem_norm="ln_pre",
    block_sites=_OPEN_SITES,
    head_norm="ln_post",
    projection="proj",
    required=frozenset(
        (
            *("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"),
            *("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
        )
    ),
    optional=frozenset(("ls_1.gamma", "ls_2.gamma", "ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")),
    unpack=_unpack_open_clip_block,
)
adapters.register(OPEN_CLIP_VIT.name)(OPEN_CLIP_VIT)


@loaders.register("open-clip")
def _load_open_clip(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of an open_clip model, given a name, configuration file, folder or Hub id."""
    reject_blocks_option(request, "open-clip")
    source = request.source
    stated = _open_clip_config(source, request.access.offline)
    config = stated.get("model_cfg", stated)
    skeleton = _open_clip_skeleton(config, source)
    # Before preprocessing: trunks and ResNets have no `image_size`, and the adapter raises with the reason.
    chain = OPEN_CLIP_VIT.chain(skeleton)
    preprocess = open_clip_preprocess(stated.get("preprocess_cfg"), tuple(skeleton.image_size), source)
    folder = {CONFIG_FILE: {"model_cfg": config, "preprocess_cfg": preprocess.settings}}

    return Architecture(
        loader="open-clip",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=_OPEN_LAYOUT,
        preprocess=preprocess,
        folder=FolderFormat(
            "open_clip_model.safetensors",
            folder,
            lambda: tuple(_open_clip_model(config, source).state_dict()),
            lambda keys, files: _OPEN_USAGE,
        ),
        open_text=partial(_load_open_clip_text_tower, config, source),
    )


def _open_clip_config(source: str, offline: bool) -> dict[str, Any]:
    """Return the configuration: a model section, or model and preprocessing sections as on the Hub."""
    import open_clip

    # open_clip accepts ViT-B/32 as a name of ViT-B-32.
    name = source.replace("/", "-")
    if name in open_clip.list_models():
        return dict(open_clip.get_model_config(name))
    path = expand_home(source)
    if path.is_file():
        return read_json(path)
    place = source.removeprefix("hf-hub:").removeprefix("local-dir:")
    hint = (
        "Use a name in open_clip.list_models() (-quickgelu for OpenAI's weights) or a model_config.json. Folders of "
        "transformers need the loader hf-clip."
    )
    return require_config(place, CONFIG_FILE, "a model of open_clip", offline=offline, hint=hint)


def _open_clip_skeleton(config: dict[str, Any], source: str) -> Any:
    # Some text towers are downloaded when they are built, and the image tower does not depend on them.
    alone = {**config, "text_cfg": _SMALLEST_TEXT, "custom_text": False}
    return _open_clip_model(alone, source).visual


def _open_clip_model(config: dict[str, Any], source: str) -> Any:
    """Return the whole CLIP, without weights."""
    import open_clip

    options = {key: value for key, value in config.items() if key not in ("custom_text", "multimodal_cfg")}
    model = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
    return build_on_meta(lambda: model(**options), source)


def _load_open_clip_text_tower(config: dict[str, Any], source: str, base: StateSource) -> TextTower:
    from open_clip import SimpleTokenizer

    text = config.get("text_cfg", {})
    special = next((option for option in _FOREIGN_TEXT if option in text), None)
    if special is not None:
        raise SpecError(
            f"the text tower of {source} has {special} = {text[special]!r}, which is not supported",
            hint="Use precomputed class embeddings in `heads.<task>.file`.",
        )
    model = _open_clip_model(config, source)
    _load_text_tower_weights(model, base, _OPEN_LAYOUT)
    tokenizer = SimpleTokenizer(context_length=model.context_length)

    @torch.no_grad()
    def embed_prompts(prompts: Sequence[str]) -> Tensor:
        features: Tensor = model.encode_text(tokenizer(list(prompts)))
        return features

    return TextTower(embed_prompts, model.logit_scale.exp().item())
