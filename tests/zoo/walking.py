"""A chain walked layer by layer, and what it is compared with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.models.chain import Layer, LayerChain, State
from driftlens.models.tracing.block_call import first_tensor


def parameters(layer: Layer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's parameters, cut out of a state dict the way its slots say."""
    return {
        name: slot.to_layer_layout(weights[slot.key] if slot.rows is None else weights[slot.key][slice(*slot.rows)])
        for name, slot in layer.parameters.items()
    }


def weights(chain: LayerChain, module: nn.Module) -> list[dict[str, Tensor]]:
    """The parameters of each layer."""
    return [parameters(layer, module.state_dict()) for layer in chain.layers]


@torch.no_grad()
def walk(chain: LayerChain, model: nn.Module | Mapping[str, Tensor], inputs: Any) -> list[State]:
    """States at boundaries 0..L, with the weights of a model."""
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    state, side = chain.start(inputs)
    states = [state]
    for layer in chain.layers:
        states.append(layer.call(parameters(layer, weights), states[-1], side))
    return states


def chain_states(chain: LayerChain, model: nn.Module | Mapping[str, Tensor], inputs: Any) -> list[State]:
    """States at boundaries 1..L, as the library's own are listed."""
    return walk(chain, model, inputs)[1:]


def largest_difference(first: list[State], second: list[State]) -> float:
    """Largest absolute difference of any entry at any boundary."""
    return max(
        (one[name] - other[name]).abs().max().item()
        for one, other in zip(first, second, strict=True)
        for name in one.keys() | other.keys()
    )


def plain_forward(module: nn.Module, inputs: Any) -> Tensor:
    inputs = copy.deepcopy(inputs)
    with torch.no_grad():
        if isinstance(inputs, dict):
            return first_tensor(module(**inputs))
        return first_tensor(module(*inputs) if isinstance(inputs, tuple) else module(inputs))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
