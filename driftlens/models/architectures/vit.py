"""CLIP's image towers as chains of layers. Entry point: `ClipViT`, the adapter of one library's towers.

Blocks are the library's own modules, called with the weights of any model. Shapes: pixels [n, c, h, w]; hidden
[n, t, d], token 0 being the class token (CLS) and the others the patches row by row; features [n, d].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.checkpoints.alignment import TowerKeyLayout
from driftlens.checkpoints.unsupported import LIVE
from driftlens.models.architecture import part_at
from driftlens.models.chain import IMAGE, Layer, LayerChain, Parameters, SideInputs, Site, Slot, State, Tap
from driftlens.models.tracing.hooks import buffers_on, call, evaluating, run_until
from driftlens.models.tracing.sites import site_kind, tapped
from driftlens.utils.errors import DataError, IncompatibleModelsError

# Processors of transformers return a dict; other entries than the pixels (texts) are not read.
PIXELS = "pixel_values"

Pooling = Literal["cls", "patch_mean"]
# The supported poolings by their names in open_clip.
POOLINGS: Mapping[str, Pooling] = {"tok": "cls", "avg": "patch_mean"}

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
class ClipViT:
    """The adapter of one library's CLIP image towers: the paths of their parts, and what is special.

    Attributes:
        inner: attribute of whole models that is the tower.
        attention: path of a block's attention, which knows the number of heads.
        activation: path of a block's activation.
        image_size: path of the tower's height and width, or of one number for both.
        entry: attribute of whole models that computes the feature of images.
        projects_inside: True if the projection belongs to the tower, stored as [in, out], and not to the whole model.
        holds: paths, one of which every tower or whole model of the library has.
        embeddings: the tower's parameters for patches, class token and positions.
        block_sites: the sites of a block in forward order: norm, q, k, v, out, norm, and both layers of the MLP.
        block_arguments: positional arguments of a block after its features.
        required: names of the parameters that every block has.
        optional: names of parameters that a block may have in addition.
        refusal: (whole model, tower) -> the reason why the tower is not supported, or None.
        unpack: a block -> the module to run for it, and its parameters' slots in the checkpoint, relative to the block.
    """

    name: str
    layout: TowerKeyLayout
    library: str
    supported: str
    inner: str
    blocks: str
    attention: str
    activation: str
    image_size: str
    entry: str
    projects_inside: bool
    holds: tuple[str, ...]
    embeddings: tuple[str, str, str]
    stem_norm: str
    block_sites: tuple[str, ...]
    head_norm: str
    projection: str
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    block_arguments: tuple[Any, ...] = ()
    refusal: Callable[[nn.Module, Any], str | None]
    unpack: Callable[[Any], tuple[nn.Module, dict[str, Slot]]]

    def matches(self, module: nn.Module) -> bool:
        """Return True if `module` is, or holds, an image tower that this adapter supports."""
        return self._why_not(module) is None

    def _why_not(self, module: nn.Module) -> str | None:
        """Return the reason why a module is not supported, or None."""
        tower, _ = self._tower(module)
        parts = (*self.embeddings, self.stem_norm, self.blocks, self.head_norm)
        missing = ", ".join(part for part in parts if part_at(tower, part) is None)
        reason = self.refusal(module, tower)
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
        reason = self._why_not(module)
        if reason is not None:
            raise IncompatibleModelsError(
                f"this model of {self.library} can't be split into layers: {reason}",
                hint=f"Supported are {self.supported}. {LIVE}",
            )
        tower, prefix = self._tower(module)
        blocks = [
            self._block(block, number + 2, f"{prefix}{self.blocks}.{number}")
            for number, block in enumerate(tower.get_submodule(self.blocks))
        ]
        projects = part_at(tower if self.projects_inside else module, self.projection) is not None
        if self.projects_inside:
            feature = prefix.removesuffix(".")
        else:
            feature = self.projection if projects else prefix + self.head_norm
        paths = (f"{prefix}{self.stem_norm}", *(block.path for block in blocks), feature)
        return LayerChain(
            architecture=self.name,
            layers=(
                self._stem(tower, prefix),
                *blocks,
                self._head(tower, prefix, len(blocks) + 2, projects),
            ),
            start=partial(_start, shape=self._pixel_shape(tower)),
            library_states=partial(_library_states, paths=paths, entry=self.entry),
            token_weights=_token_weight_rules(tower.get_parameter(self.embeddings[2]).shape[0]),
            settings=self._settings(tower),
            modality=IMAGE,
            final=feature,
        )

    def _tower(self, module: nn.Module) -> tuple[Any, str]:
        """Return the inner transformer and the prefix of its keys."""
        inner = getattr(module, self.inner, None)
        return (module, "") if inner is None else (inner, f"{self.inner}.")

    def _stem(self, tower: Any, prefix: str) -> Layer:
        keys, sites = (
            (*self.embeddings, *_affine(tower, self.stem_norm)),
            _sites(tower, self.stem_norm, "tokens"),
        )
        first_block = tower.get_submodule(self.blocks)[0]

        def run(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
            pixels = state["pixels"].to(parameters[self.embeddings[0]].dtype)
            # Position ids follow the pixels: a pass in float64 may run on the CPU while the model is on the GPU.
            with buffers_on(tower, pixels.device), tapped(tower, sites, tap):
                return {"hidden": run_until(first_block, lambda: call(tower, parameters, (pixels,), {}))}

        path = prefix + self.embeddings[0].partition(".")[0]
        return Layer(1, "stem", path, {key: Slot(prefix + key) for key in keys}, run, sites)

    def _block(self, block: nn.Module, index: int, path: str) -> Layer:
        norm1, q, k, v, out, norm2, fc1, fc2 = self.block_sites
        module, slots = self.unpack(block)
        sites = (
            *_sites(module, norm1, "hidden"),
            *_sites(module, q, norm1),
            *_sites(module, k, norm1, mixes_tokens=True),
            *_sites(module, v, norm1, mixes_tokens=True),
            *_sites(module, out, "attention"),
            *_sites(module, norm2, "attended"),
            *_sites(module, fc1, norm2),
            *_sites(module, fc2, "activation"),
        )
        run = partial(_run, module, self.block_arguments, sites)
        slots = {name: replace(slot, key=f"{path}.{slot.key}") for name, slot in slots.items()}
        return Layer(index, "block", path, slots, run, sites, is_residual=True)

    def _head(self, tower: Any, prefix: str, index: int, projects: bool) -> Layer:
        norm, (pooling, norm_first) = self.head_norm, _pooling(tower)
        slots = {key: Slot(prefix + key) for key in _affine(tower, norm)}
        if projects:
            inside, weight = self.projects_inside, f"{self.projection}.weight"
            slots[weight] = Slot(prefix + self.projection if inside else weight, transposed=inside)
        head = _PoolingHead(pooling, norm_first)
        head.add_module(norm, tower.get_submodule(norm))
        sites = _sites(head, norm, "hidden", token_weights="patches" if norm_first else "pooled")
        if projects:
            # Any size will do: the weight is replaced on every call.
            head.add_module(self.projection, nn.Linear(1, 1, bias=False, device="meta"))
            sites += _sites(head, self.projection, norm, token_weights="pooled")
        return Layer(index, "head", prefix + norm, slots, partial(_run, head, (), sites), sites)

    def _pixel_shape(self, tower: Any) -> tuple[int, int, int]:
        size = part_at(tower, self.image_size)
        height, width = [size] * 2 if isinstance(size, int) else size
        return tower.get_parameter(self.embeddings[0]).shape[1], height, width

    def _settings(self, tower: Any) -> dict[str, object]:
        block, (pooling, norm_first) = tower.get_submodule(self.blocks)[0], _pooling(tower)
        return {
            "activation": activation_name(block.get_submodule(self.activation)),
            "eps": block.get_submodule(self.block_sites[0]).eps,
            "num_heads": block.get_submodule(self.attention).num_heads,
            "patch_size": list(tower.get_parameter(self.embeddings[0]).shape[-2:]),
            "image_size": list(self._pixel_shape(tower)[1:]),
            "pooling": pooling,
            "norm_before_pooling": norm_first,
        }


def _pooling(tower: Any) -> tuple[Pooling, bool]:
    """Return how tokens are pooled, and True if the final norm runs on all tokens before that."""
    # Towers of transformers always pool by the class token and have no such attribute.
    kind = getattr(tower, "pool_type", "tok")
    # For a single token the order of norm and pooling makes no difference.
    return POOLINGS[kind], kind == "avg" and not tower.final_ln_after_pool


class _PoolingHead(nn.Module):
    """Pools tokens to one, [n, 1, d], and runs its children on it: the final norm, and a projection if there is one.

    With `norm_first` the norm runs on all tokens; for a single token the order makes no difference.
    """

    def __init__(self, pooling: Pooling, norm_first: bool) -> None:
        super().__init__()
        self.pooling, self.norm_first = pooling, norm_first

    def forward(self, hidden: Tensor) -> Tensor:
        norm, *projections = self.children()
        if self.norm_first:
            hidden = norm(hidden)
        pooled = hidden[:, :1] if self.pooling == "cls" else hidden[:, 1:].mean(dim=1, keepdim=True)
        if not self.norm_first:
            pooled = norm(pooled)
        for project in projections:
            pooled = project(pooled)
        return pooled.squeeze(1)


def _run(
    module: nn.Module,
    arguments: tuple[Any, ...],
    sites: tuple[Site, ...],
    parameters: Parameters,
    state: State,
    side: SideInputs,
    tap: Tap | None = None,
) -> State:
    with tapped(module, sites, tap):
        return {"hidden": call(module, parameters, (state["hidden"], *arguments), {})}


def _sites(parent: nn.Module, name: str, reads: str, **options: Any) -> tuple[Site, ...]:
    """Return the site that a module is; none for a norm without scale and shift, which has nothing to calibrate."""
    module = parent.get_submodule(name)
    kind = site_kind(module)
    return () if kind is None else (Site(name, kind, reads, eps=getattr(module, "eps", None), **options),)


def _affine(parent: nn.Module, path: str) -> list[str]:
    """Return the names of a norm's parameters, of which it may have none."""
    return [f"{path}.{key}" for key in parent.get_submodule(path).state_dict()]


def _pixels(inputs: Any) -> Tensor:
    pixels: Tensor = inputs[PIXELS] if isinstance(inputs, Mapping) else inputs
    return pixels


def _start(inputs: Any, *, shape: tuple[int, int, int]) -> tuple[State, SideInputs]:
    """Return the state at boundary 0; an image tower needs no side inputs."""
    pixels = _pixels(inputs)
    if tuple(pixels.shape[1:]) != shape:
        raise DataError(
            f"a batch of pixels is {list(pixels.shape)}; expected [n, {', '.join(map(str, shape))}]",
            hint="Use the model's own image processor.",
        )
    return {"pixels": pixels}, SideInputs()


def _library_states(module: nn.Module, inputs: Any, *, paths: Sequence[str], entry: str) -> list[State]:
    """Return the outputs of the modules at `paths` in one pass in eval mode, of tuples the first entry."""
    outputs: dict[str, Tensor] = {}

    def keep(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[path] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks, torch.no_grad(), evaluating(module):
        for path in paths:
            hooks.callback(module.get_submodule(path).register_forward_hook(partial(keep, path)).remove)
        getattr(module, entry, module)(_pixels(inputs))
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

    def weigh(count: int, cls: float, others: float, state: State, side: SideInputs) -> Tensor:
        entry = next(iter(state.values()))
        weights = entry.new_full((len(entry), count), others)
        weights[:, 0] = cls
        return weights

    return {
        "uniform": partial(weigh, num_tokens, 1, 1),
        "cls_emphasis": partial(weigh, num_tokens, 1, 0.01),
        "patches": partial(weigh, num_tokens, 0, 1),
        "pooled": partial(weigh, 1, 1, 1),
    }
