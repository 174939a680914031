"""What CLIP adapters share besides the arithmetic: token weights, activations, random towers, recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.models.chain import SideInputs, State
from driftlens.models.vit import Activation


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
