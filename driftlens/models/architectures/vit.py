"""CLIP's image towers: a pre-norm vision transformer as three pure functions, and what its adapters share.

Both CLIP libraries compute the same thing under different parameter names, so every function takes a table of
`Names`, and an adapter is a `ClipViT` that says where its library keeps what. Shapes: pixels [n, c, h, w]; hidden
[n, t, d], token 0 being the class token (CLS) and the others the patches row by row; features [n, d].
`tap(site, x)` is called with the input of each calibratable module just before it runs, and what it returns with the
output. Attention goes through `scaled_dot_product_attention`, whose backend the caller may choose by context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.checkpoints.alignment import KeyLayout
from driftlens.checkpoints.unsupported import LIVE
from driftlens.models.chain import (
    IMAGE,
    Layer,
    LayerCall,
    LayerChain,
    Parameters,
    SideInputs,
    Site,
    Slot,
    State,
    Tap,
)
from driftlens.models.tracing.hooks import evaluating
from driftlens.utils.errors import DataError, IncompatibleModelsError

Activation = Callable[[Tensor], Tensor]
Pooling = Literal["cls", "patch_mean"]


@dataclass(frozen=True)
class Names:
    """What a library calls the parts of an image tower, in the order in which they run; None where a part is missing.

    `patches`, `cls`, `positions` and the scales (LayerScale) are parameters, all else are modules: those of a block
    inside the block, `projection` inside the whole model.
    """

    patches: str
    cls: str
    positions: str
    stem_norm: str | None
    norm1: str
    q: str
    k: str
    v: str
    out: str
    norm2: str
    fc1: str
    fc2: str
    head_norm: str
    projection: str | None
    scale1: str | None = None
    scale2: str | None = None

    @property
    def block_sites(self) -> tuple[str, ...]:
        """The modules of a block, in the order in which they run."""
        return self.norm1, self.q, self.k, self.v, self.out, self.norm2, self.fc1, self.fc2


def vit_stem(
    parameters: Parameters, pixels: Tensor, *, names: Names, eps: float, tap: Tap | None = None
) -> Tensor:
    """Tokens entering the first block [n, t, d]: patches and CLS, plus positions, normalised."""
    kernel = parameters[names.patches]
    # The stride is the kernel: patches don't overlap.
    grid = F.conv2d(pixels.to(kernel.dtype), kernel, stride=kernel.shape[-2:])
    cls = parameters[names.cls].expand(len(pixels), 1, -1)
    tokens = torch.cat([cls, grid.flatten(2).mT], dim=1) + parameters[names.positions]
    return tokens if names.stem_norm is None else _norm(parameters, names.stem_norm, tokens, eps, tap)


def vit_block(
    parameters: Parameters,
    hidden: Tensor,
    *,
    names: Names,
    num_heads: int,
    eps: float,
    activation: Activation,
    tap: Tap | None = None,
) -> Tensor:
    """Tokens leaving a pre-norm block [n, t, d]: h + attention(norm1(h)), then h + mlp(norm2(h))."""
    normed = _norm(parameters, names.norm1, hidden, eps, tap)
    mixed = _attention(parameters, normed, names, num_heads, tap)
    hidden = hidden + _scaled(parameters, names.scale1, _linear(parameters, names.out, mixed, tap))
    normed = _norm(parameters, names.norm2, hidden, eps, tap)
    inner = activation(_linear(parameters, names.fc1, normed, tap))
    return hidden + _scaled(parameters, names.scale2, _linear(parameters, names.fc2, inner, tap))


def vit_head(
    parameters: Parameters,
    hidden: Tensor,
    *,
    names: Names,
    eps: float,
    pooling: Pooling,
    norm_first: bool = False,
    tap: Tap | None = None,
) -> Tensor:
    """Image features [n, d], not normalised to unit length: pooled tokens, final norm, projection.

    `norm_first` normalises every token before pooling; for a single token the order makes no difference.
    Taps see the pooled vector as a sequence of one token, [n, 1, d].
    """
    if norm_first:
        pooled = _pooled(_norm(parameters, names.head_norm, hidden, eps, tap), pooling)
    else:
        pooled = _norm(parameters, names.head_norm, _pooled(hidden, pooling), eps, tap)
    if names.projection is not None:
        pooled = _linear(parameters, names.projection, pooled, tap)
    return pooled.squeeze(1)


def _attention(
    parameters: Parameters, normed: Tensor, names: Names, num_heads: int, tap: Tap | None
) -> Tensor:
    # Three products, not one with concatenated weights: measured at equal speed for ViT-B and ViT-L widths.
    queries, keys, values = (
        _linear(parameters, site, normed, tap).reshape(*normed.shape[:-1], num_heads, -1).transpose(1, 2)
        for site in (names.q, names.k, names.v)
    )
    return F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)


def _pooled(hidden: Tensor, pooling: Pooling) -> Tensor:
    return hidden[:, :1] if pooling == "cls" else hidden[:, 1:].mean(dim=1, keepdim=True)


def _linear(parameters: Parameters, site: str, x: Tensor, tap: Tap | None) -> Tensor:
    hear = None if tap is None else tap(site, x)
    return _heard(hear, F.linear(x, parameters[f"{site}.weight"], parameters.get(f"{site}.bias")))


def _norm(parameters: Parameters, site: str, x: Tensor, eps: float, tap: Tap | None) -> Tensor:
    hear = None if tap is None else tap(site, x)
    weight, bias = parameters.get(f"{site}.weight"), parameters.get(f"{site}.bias")
    return _heard(hear, F.layer_norm(x, x.shape[-1:], weight, bias, eps))


def _heard(hear: Callable[[Tensor], Tensor | None] | None, output: Tensor) -> Tensor:
    changed = None if hear is None else hear(output)
    return output if changed is None else changed


def _scaled(parameters: Parameters, scale: str | None, branch: Tensor) -> Tensor:
    return branch if scale is None else branch * parameters[scale]


def quick_gelu(x: Tensor) -> Tensor:
    """Elementwise x * sigmoid(1.702 x), the cheap stand-in for GELU with which OpenAI trained CLIP."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Activation] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation_name(activation: Activation) -> str | None:
    """Key in `ACTIVATIONS` of the function that `activation` computes, or None; found by trying it out.

    Libraries offer the same function under many class names, and different functions under one.
    """
    probe = torch.linspace(-6, 6, 97, dtype=torch.float64)
    with torch.no_grad():
        values = activation(probe)
    same = (name for name, known in ACTIVATIONS.items() if torch.allclose(values, known(probe), 0, 1e-12))
    return next(same, None)


class ClipViT(ABC):
    """The adapter of one library's CLIP image towers; subclasses say where the library keeps what.

    Attributes:
        inner: where whole models keep the tower.
        attention: path of a block's attention, which knows the number of heads.
        activation: path of a block's activation.
        image_size: path of the tower's height and width, or of one number for both.
        projects_inside: whether the projection belongs to the tower, stored as [in, out], or to the whole model.
        holds: paths, one of which every tower or whole model of the library has.
        optional: names of parameters that a block may have in addition to those in `required`.
    """

    name: str
    layout: KeyLayout
    names: Names
    library: str
    supported: str
    inner: str
    blocks: str
    attention: str
    activation: str
    image_size: str
    projects_inside: bool
    holds: tuple[str, ...]
    optional: frozenset[str] = frozenset()

    @property
    def required(self) -> frozenset[str]:
        """The names of a block's parameters."""
        return frozenset(f"{site}.{part}" for site in self.names.block_sites for part in ("weight", "bias"))

    @abstractmethod
    def _why_not_tower(self, module: nn.Module, tower: Any) -> str | None:
        """What keeps the adapter from understanding a tower, its blocks left out, in words."""

    @abstractmethod
    def _library_pass(self, module: nn.Module, names: Names, prefix: str) -> tuple[str, str]:
        """Path of the module that returns the feature, and what is called with pixels ('' is the model itself)."""

    def _block_slots(self, block: nn.Module, names: Names, path: str) -> dict[str, Slot]:
        return {key: Slot(f"{path}.{key}") for site in names.block_sites for key in _affine(block, site)}

    def _pooling(self, tower: Any) -> tuple[Pooling, bool]:
        """How tokens are pooled, and whether the final norm runs before that in a way that matters."""
        return "cls", False

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is, or holds, an image tower that this adapter understands."""
        return self._why_not(module) is None

    def _why_not(self, module: nn.Module) -> str | None:
        tower, _ = self._tower(module)
        reason = self._why_not_tower(module, tower)
        for index, block in enumerate(() if reason else tower.get_submodule(self.blocks)):
            keys, activation = set(block.state_dict()), block.get_submodule(self.activation)
            odd = sorted((keys - self.required - self.optional) | (self.required - keys))
            if odd:
                return f"block {index} is not the plain pre-norm block (extra or missing: {', '.join(odd)})"
            if activation_name(activation) is None:
                return f"its activation {activation} is none of {', '.join(ACTIVATIONS)}"
        return reason

    def chain(self, module: nn.Module) -> LayerChain:
        """The tower taken apart; keys are those of `module.state_dict()`."""
        reason = self._why_not(module)
        if reason is not None:
            raise IncompatibleModelsError(
                f"this model of {self.library} can't be taken apart: {reason}",
                hint=f"Supported are {self.supported}. {LIVE}",
            )
        tower, prefix = self._tower(module)
        names, stem_norm = self.names, self.names.stem_norm
        if _part(tower if self.projects_inside else module, names.projection) is None:
            names = replace(names, projection=None)
        if isinstance(_part(tower, stem_norm), nn.Identity):
            names = replace(names, stem_norm=None)
        blocks = [
            self._block(block, names, number + 2, f"{prefix}{self.blocks}.{number}")
            for number, block in enumerate(tower.get_submodule(self.blocks))
        ]
        feature, run = self._library_pass(module, names, prefix)
        paths = (f"{prefix}{stem_norm}", *(block.path for block in blocks), feature)
        return LayerChain(
            architecture=self.name,
            layers=(
                self._stem(tower, names, prefix),
                *blocks,
                self._head(tower, names, prefix, len(blocks) + 2),
            ),
            start=partial(_start, shape=self._pixel_shape(tower)),
            library_states=partial(library_states, paths=paths, run=run),
            token_weights=_token_weight_rules(tower.get_parameter(names.positions).shape[0]),
            settings=self._settings(tower),
            modality=IMAGE,
            final=feature,
        )

    def _missing(self, module: nn.Module, tower: Any) -> str | None:
        names = self.names
        parts = (names.patches, names.cls, names.positions, names.stem_norm, self.blocks, names.head_norm)
        missing = ", ".join(part for part in parts if part and _part(tower, part) is None)
        subject = f"{type(module).__name__} is no CLIP image tower of {self.library}"
        return f"{subject} (no {missing})" if missing else None

    def _tower(self, module: nn.Module) -> tuple[Any, str]:
        """The inner transformer and the prefix of its keys."""
        inner = getattr(module, self.inner, None)
        return (module, "") if inner is None else (inner, f"{self.inner}.")

    def _stem(self, tower: Any, names: Names, prefix: str) -> Layer:
        norm = names.stem_norm
        affine = [] if norm is None else _affine(tower, norm)
        eps = 0.0 if norm is None else tower.get_submodule(norm).eps
        sites = (Site(norm, "layer_norm", input="tokens", eps=eps),) if norm and affine else ()
        slots = {key: Slot(prefix + key) for key in (names.patches, names.cls, names.positions, *affine)}
        call = _layer_call(partial(vit_stem, names=names, eps=eps), reads="pixels")
        return Layer(1, "stem", prefix + names.patches.partition(".")[0], slots, call, sites)

    def _block(self, block: Any, names: Names, index: int, path: str) -> Layer:
        if _part(block, names.scale1) is None:
            names = replace(names, scale1=None, scale2=None)
        eps = block.get_submodule(names.norm1).eps
        activation = activation_name(block.get_submodule(self.activation))
        assert activation is not None  # or the tower had been refused
        call = partial(
            vit_block,
            names=names,
            num_heads=block.get_submodule(self.attention).num_heads,
            eps=eps,
            activation=ACTIVATIONS[activation],
        )
        norm = partial(Site, kind="layer_norm", eps=eps)
        sites: tuple[Site, ...] = (
            norm(names.norm1, input="hidden"),
            Site(names.q, "linear", input=names.norm1),
            Site(names.k, "linear", input=names.norm1, mixes_tokens=True),
            Site(names.v, "linear", input=names.norm1, mixes_tokens=True),
            Site(names.out, "linear", input="attention"),
            norm(names.norm2, input="attended"),
            Site(names.fc1, "linear", input=names.norm2),
            Site(names.fc2, "linear", input="activation"),
        )
        slots = self._block_slots(block, names, path)
        # Norms without scale and shift have nothing to calibrate.
        sites = tuple(site for site in sites if f"{site.name}.weight" in slots)
        return Layer(index, "block", path, slots, _layer_call(call), sites, is_residual=True)

    def _head(self, tower: Any, names: Names, prefix: str, index: int) -> Layer:
        (pooling, norm_first), norm = self._pooling(tower), names.head_norm
        eps = tower.get_submodule(norm).eps
        slots = {key: Slot(prefix + key) for key in _affine(tower, norm)}
        tokens = "patches" if norm_first else "pooled"
        sites = [Site(norm, "layer_norm", "hidden", tokens, eps=eps)] if slots else []
        if names.projection is not None:
            inside = self.projects_inside
            key = prefix + names.projection if inside else f"{names.projection}.weight"
            slots[f"{names.projection}.weight"] = Slot(key, transposed=inside)
            sites.append(Site(names.projection, "linear", norm, "pooled"))
        call = partial(vit_head, names=names, eps=eps, pooling=pooling, norm_first=norm_first)
        return Layer(index, "head", prefix + norm, slots, _layer_call(call), tuple(sites))

    def _pixel_shape(self, tower: Any) -> tuple[int, int, int]:
        size = _part(tower, self.image_size)
        height, width = [size] * 2 if isinstance(size, int) else size
        return tower.get_parameter(self.names.patches).shape[1], height, width

    def _settings(self, tower: Any) -> dict[str, object]:
        block = tower.get_submodule(self.blocks)[0]
        return {
            "activation": activation_name(block.get_submodule(self.activation)),
            "eps": block.get_submodule(self.names.norm1).eps,
            "num_heads": block.get_submodule(self.attention).num_heads,
            "patch_size": list(tower.get_parameter(self.names.patches).shape[-2:]),
            "image_size": list(self._pixel_shape(tower)[1:]),
            "pooling": self._pooling(tower)[0],
        }


def _part(parent: Any, path: str | None) -> Any:
    """What lies at a path; None where there is no such thing."""
    for name in path.split(".") if path else ():
        parent = getattr(parent, name, None)
    return parent if path else None


def _affine(parent: nn.Module, path: str) -> list[str]:
    """Names of a module's parameters; a norm may have none."""
    return [f"{path}.{key}" for key in parent.get_submodule(path).state_dict()]


def _layer_call(compute: Callable[..., Tensor], reads: str = "hidden") -> LayerCall:
    """`compute(parameters, tensor, tap=...)` as a layer: reads one entry of the state, writes `hidden`."""

    def call(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        return {"hidden": compute(parameters, state[reads], tap=tap)}

    return call


PIXELS = "pixel_values"
"""What a batch that is a dict calls its pixels, as processors of transformers do; nothing else in it is read."""


def pixels_in(inputs: Any) -> Tensor:
    """The pixels of a batch: the tensor that it is, or its entry `pixel_values`."""
    pixels: Tensor = inputs[PIXELS] if isinstance(inputs, Mapping) else inputs
    return pixels


def _start(inputs: Any, *, shape: tuple[int, int, int]) -> tuple[State, SideInputs]:
    """State at boundary 0 of an image tower, which needs nothing beside its pixels."""
    pixels = pixels_in(inputs)
    if tuple(pixels.shape[1:]) != shape:
        raise DataError(
            f"a batch of pixels is {list(pixels.shape)}; the image tower wants [n, {', '.join(map(str, shape))}]",
            hint="Prepare images as the model's own processor does.",
        )
    return {"pixels": pixels}, SideInputs()


def library_states(module: nn.Module, inputs: Any, *, paths: Sequence[str], run: str) -> list[State]:
    """What the modules at `paths` return in one pass in eval mode; neither hooks nor modes are left changed.

    Of tuples (encoder layers of transformers 4) the first entry counts. `run` is what is called, see `_library_pass`.
    """
    outputs: dict[str, Tensor] = {}

    def keep(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[path] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks, torch.no_grad():
        if module.training:
            hooks.enter_context(evaluating(module))
        for path in paths:
            hooks.callback(module.get_submodule(path).register_forward_hook(partial(keep, path)).remove)
        (getattr(module, run) if run else module)(pixels_in(inputs))
    return [{"hidden": outputs[path]} for path in paths]


def _token_weight_rules(num_tokens: int) -> dict[str, Callable[[State, SideInputs], Tensor]]:
    """How much each token of a site's input counts in moments, by rule; each gives weights [n, t].

    - `uniform`: every token counts 1.
    - `cls_emphasis`: CLS counts 1, every other token 0.01. The FeatCal authors' code weighs the last block's
      sites this way, k and v projections excepted: of that block only the CLS row reaches the feature,
      through keys and values of all tokens.
    - `patches`: every token but CLS, for a norm whose output is averaged over patches.
    - `pooled`: the one token [n, 1] that is left after pooling.
    """

    def rule(count: int, cls: float, others: float) -> Callable[[State, SideInputs], Tensor]:
        def weigh(state: State, side: SideInputs) -> Tensor:
            entry = next(iter(state.values()))
            weights = entry.new_full((len(entry), count), others)
            weights[:, 0] = cls
            return weights

        return weigh

    return {
        "uniform": rule(num_tokens, 1, 1),
        "cls_emphasis": rule(num_tokens, 1, 0.01),
        "patches": rule(num_tokens, 0, 1),
        "pooled": rule(1, 1, 1),
    }
