"""Derivatives through layers with fixed weights, against torch's own rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from driftlens.linalg.fixed_weights import FixedWeights

# torch.func.jvp scripts its decompositions on first use and warns that scripting is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")


def layer(generator: torch.Generator) -> nn.Module:
    hidden = nn.Sequential(
        nn.LayerNorm(4, eps=0.1),
        nn.Linear(4, 6),
        nn.GELU(),
        nn.LayerNorm(6, elementwise_affine=False),
        nn.Linear(6, 2, bias=False),
        nn.GELU(approximate="tanh"),
        nn.Linear(2, 3),
    ).double()
    for parameter in hidden.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(False)


def push(call: nn.Module, x: Tensor, vectors: Tensor) -> Tensor:
    return vmap(lambda v: jvp(call, (x,), (v,))[1])(vectors)


def test_products_and_values_are_those_of_torch_itself(generator: torch.Generator):
    call = layer(generator)
    x = torch.randn(5, 2, 4, generator=generator, dtype=torch.float64)
    vectors = torch.randn(7, 5, 2, 4, generator=generator, dtype=torch.float64)
    covector = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
    plain = (call(x), push(call, x, vectors), vjp(call, x)[1](covector)[0])
    with FixedWeights():
        fixed = (call(x), push(call, x, vectors), vjp(call, x)[1](covector)[0])
    for found, wanted in zip(fixed, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_derivatives_of_derivatives_pass_through(generator: torch.Generator):
    call = layer(generator)
    x, v = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)

    def gradient(point: Tensor) -> Tensor:
        value, pull = vjp(lambda p: call(p).square().sum(), point)
        return pull(torch.ones_like(value))[0]

    wanted = jvp(gradient, (x,), (v,))[1]
    with FixedWeights():
        torch.testing.assert_close(jvp(gradient, (x,), (v,))[1], wanted, rtol=1e-12, atol=1e-12)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += str(function).startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul"))
        return function(*args, **(kwargs or {}))


def test_a_linear_map_costs_one_product_for_the_point_and_one_for_all_vectors(generator: torch.Generator):
    weight = torch.randn(3, 4, generator=generator)
    x, vectors = torch.randn(5, 4, generator=generator), torch.randn(7, 5, 4, generator=generator)
    with FixedWeights(), Products() as products:
        push(lambda point: F.linear(point, weight), x, vectors)  # type: ignore[arg-type]
    assert products.count == 2


def test_afterwards_weights_move_again(generator: torch.Generator):
    weight = torch.randn(3, 4, generator=generator, requires_grad=True)
    with FixedWeights():
        F.linear(torch.ones(4), weight)
    F.linear(torch.ones(4), weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(3, 4))
