"""A pre-norm vision transformer as three pure functions: stem, block and head.

Both CLIP libraries compute the same thing under different parameter names, so every function takes a small
table of names. Shapes: pixels [n, c, h, w]; hidden [n, t, d], token 0 being the class token (CLS) and the
others the patches row by row; features [n, d]. `tap(site, x)` is called with the input of each calibratable
module just before it runs, and what it returns with the output. Attention goes through
`scaled_dot_product_attention`, whose backend the caller may choose by context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.models.chain import LayerCall, Parameters, SideInputs, Site, State, Tap

Activation = Callable[[Tensor], Tensor]
Pooling = Literal["cls", "patch_mean"]


@dataclass(frozen=True)
class StemNames:
    """Parameter names of the stem; `norm` is None where nothing is normalised before the first block."""

    patches: str
    cls: str
    positions: str
    norm: str | None


@dataclass(frozen=True)
class BlockNames:
    """Site names of a block in the order in which they run; scales (LayerScale) are parameters, if any."""

    norm1: str
    q: str
    k: str
    v: str
    out: str
    norm2: str
    fc1: str
    fc2: str
    scale1: str | None = None
    scale2: str | None = None


@dataclass(frozen=True)
class HeadNames:
    """Parameter names of the head; `projection` is None where the normalised vector is the feature."""

    norm: str
    projection: str | None


def vit_stem(
    parameters: Parameters, pixels: Tensor, *, names: StemNames, eps: float, tap: Tap | None = None
) -> Tensor:
    """Tokens entering the first block [n, t, d]: patches and CLS, plus positions, normalised."""
    kernel = parameters[names.patches]
    # The stride is the kernel: patches don't overlap.
    grid = F.conv2d(pixels.to(kernel.dtype), kernel, stride=kernel.shape[-2:])
    cls = parameters[names.cls].expand(len(pixels), 1, -1)
    tokens = torch.cat([cls, grid.flatten(2).mT], dim=1) + parameters[names.positions]
    return tokens if names.norm is None else _norm(parameters, names.norm, tokens, eps, tap)


def vit_block(
    parameters: Parameters,
    hidden: Tensor,
    *,
    names: BlockNames,
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
    names: HeadNames,
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
        pooled = _pooled(_norm(parameters, names.norm, hidden, eps, tap), pooling)
    else:
        pooled = _norm(parameters, names.norm, _pooled(hidden, pooling), eps, tap)
    if names.projection is not None:
        pooled = _linear(parameters, names.projection, pooled, tap)
    return pooled.squeeze(1)


def block_sites(names: BlockNames, *, eps: float, affine: bool = True) -> tuple[Site, ...]:
    """Calibratable modules of a block, in execution order; q, k and v read the same tensor.

    `eps` is the constant of the norms.
    Norms without scale and shift (`affine=False`) have nothing to calibrate and are left out.
    """
    sites = (
        Site(names.norm1, "layer_norm", input="hidden", eps=eps),
        Site(names.q, "linear", input=names.norm1),
        Site(names.k, "linear", input=names.norm1, mixes_tokens=True),
        Site(names.v, "linear", input=names.norm1, mixes_tokens=True),
        Site(names.out, "linear", input="attention"),
        Site(names.norm2, "layer_norm", input="attended", eps=eps),
        Site(names.fc1, "linear", input=names.norm2),
        Site(names.fc2, "linear", input="activation"),
    )
    return tuple(site for site in sites if affine or site.kind == "linear")


def layer_call(compute: Callable[..., Tensor], reads: str = "hidden") -> LayerCall:
    """`compute(parameters, tensor, tap=...)` as a layer: reads one entry of the state, writes `hidden`."""

    def call(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        return {"hidden": compute(parameters, state[reads], tap=tap)}

    return call


def _attention(
    parameters: Parameters, normed: Tensor, names: BlockNames, num_heads: int, tap: Tap | None
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


def _heard(hear: Callable[[Tensor], None] | None, output: Tensor) -> Tensor:
    if hear is not None:
        hear(output)
    return output


def _scaled(parameters: Parameters, scale: str | None, branch: Tensor) -> Tensor:
    return branch if scale is None else branch * parameters[scale]


def quick_gelu(x: Tensor) -> Tensor:
    """Elementwise x * sigmoid(1.702 x), the cheap stand-in for GELU with which OpenAI trained CLIP."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Activation] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}


def activation_name(activation: Activation) -> str | None:
    """Key in `ACTIVATIONS` of the function that `activation` computes, or None; found by trying it out.

    Libraries offer the same function under many class names, and different functions under one.
    """
    probe = torch.linspace(-6, 6, 97, dtype=torch.float64)
    with torch.no_grad():
        found = activation(probe)
    same = (name for name, known in ACTIVATIONS.items() if torch.allclose(found, known(probe), 0, 1e-12))
    return next(same, None)


def known_activation(activation: Activation) -> str:
    """The same of a tower that has been accepted, so that it has a name."""
    name = activation_name(activation)
    assert name is not None
    return name


def start(inputs: Tensor) -> tuple[State, SideInputs]:
    """State at boundary 0 of an image tower, which needs nothing beside its pixels."""
    return {"pixels": inputs}, SideInputs()


def token_weight_rules(num_tokens: int) -> dict[str, Callable[[State, SideInputs], Tensor]]:
    """How much each token of a site's input counts in moments, by rule; each gives weights [n, t].

    - `uniform`: every token counts 1.
    - `cls_emphasis`: CLS counts 1, every other token 0.01. The FeatCal authors' code weighs the last block's
      sites this way, k and v projections excepted: of that block only the CLS row reaches the feature,
      through keys and values of all tokens.
    - `patches`: every token but CLS, for a norm whose output is averaged over patches.
    - `pooled`: the one token [n, 1] that is left after pooling.
    """

    def ones(state: State, count: int) -> Tensor:
        entry = next(iter(state.values()))
        return torch.ones(len(entry), count, dtype=entry.dtype, device=entry.device)

    def cls_emphasis(state: State, side: SideInputs) -> Tensor:
        weights = ones(state, num_tokens)
        weights[:, 1:] = 0.01
        return weights

    def patches(state: State, side: SideInputs) -> Tensor:
        weights = ones(state, num_tokens)
        weights[:, 0] = 0
        return weights

    return {
        "uniform": lambda state, side: ones(state, num_tokens),
        "cls_emphasis": cls_emphasis,
        "patches": patches,
        "pooled": lambda state, side: ones(state, 1),
    }


def scrambled(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The module that `build` returns, in eval mode, every parameter shifted by noise.

    Freshly initialised towers have zero biases and unit norms, which would hide a bias or norm that is left
    out. The caller's random state is not touched.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = build()
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


def library_states(
    module: nn.Module,
    inputs: Tensor,
    *,
    paths: Sequence[str],
    run: Callable[[nn.Module, Tensor], object] | None = None,
) -> list[State]:
    """States at boundaries 1..L from one ordinary forward pass of the library's own module.

    Args:
        module: the tower, or what holds it.
        inputs: pixels.
        paths: of the modules whose outputs these states are.
        run: computes (module, pixels); None runs the last of these modules, the whole tower.
    """
    modules = [module.get_submodule(path) for path in paths]
    outputs = record_outputs(modules, lambda: run(module, inputs) if run else modules[-1](inputs))
    return [{"hidden": output} for output in outputs]


def record_outputs(modules: Sequence[nn.Module], run: Callable[[], object]) -> list[Tensor]:
    """Output of each of `modules` while `run` runs without gradients, in the order of `modules`.

    Modules that return tuples (encoder layers of transformers 4) are recorded by their first entry. The
    hooks are gone afterwards, also when `run` fails.
    """
    seen: dict[int, Tensor] = {}

    def hook_at(position: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen[position] = output[0] if isinstance(output, tuple) else output

        return keep

    with ExitStack() as hooks, torch.no_grad():
        for position, module in enumerate(modules):
            hooks.callback(module.register_forward_hook(hook_at(position)).remove)
        run()
    return [seen[position] for position in range(len(modules))]
