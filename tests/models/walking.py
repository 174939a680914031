"""A chain walked beside its module's own forward pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.sources import module_source
from driftlens.models.chain import LayerChain, State
from driftlens.models.frames import result


def weights(chain: LayerChain, module: nn.Module) -> list[dict[str, Tensor]]:
    """The parameters of each layer, read through its slots."""
    source = module_source(module, "module")
    return [
        {name: slot.own(source.read(slot.key)) for name, slot in layer.parameters.items()}
        for layer in chain.layers
    ]


def walk(chain: LayerChain, module: nn.Module, inputs: Any) -> list[State]:
    """States at boundaries 0..L, with the weights of `module`."""
    state, side = chain.start(inputs)
    states = [state]
    with torch.no_grad():
        for layer, parameters in zip(chain.layers, weights(chain, module), strict=True):
            states.append(layer.call(parameters, states[-1], side))
    return states


def plain_forward(module: nn.Module, inputs: Any) -> Tensor:
    inputs = copy.deepcopy(inputs)
    with torch.no_grad():
        if isinstance(inputs, dict):
            return result(module(**inputs))
        return result(module(*inputs) if isinstance(inputs, tuple) else module(inputs))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
