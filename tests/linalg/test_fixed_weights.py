"""Derivatives through layers with fixed weights, against torch's own rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from driftlens.linalg.state import FixedWeights

# torch.func.jvp scripts its decompositions on first use and warns that scripting is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")


WIDE, TALL, SHIFT, SCALE = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed, shape in enumerate([(3, 4), (4, 4), (4,), (4,)])
)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WIDE),
    "linear with bias by name": lambda x: F.linear(input=x, weight=TALL, bias=SHIFT),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "norm with scale alone": lambda x: F.layer_norm(x, [4], weight=SCALE, eps=0.1),
    "norm with shift alone": lambda x: F.layer_norm(x, (4,), bias=SHIFT),
    "norm over two axes": lambda x: F.layer_norm(x, (2, 4), torch.outer(SHIFT[:2], SCALE)),
    "gelu": lambda x: F.gelu(x),
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "numbers": lambda x: torch.mul(1.7 * x.mul(0.3), other=3) / 7,
    "a tensor beside numbers": lambda x: x * SHIFT / (2 * x.square() + 3),
}


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


def test_products_and_values_are_those_of_torch_itself(generator: torch.Generator) -> None:
    call = layer(generator)
    x = torch.randn(5, 2, 4, generator=generator, dtype=torch.float64)
    vectors = torch.randn(7, 5, 2, 4, generator=generator, dtype=torch.float64)
    plain = (call(x), push(call, x, vectors))
    with FixedWeights():
        fixed = (call(x), push(call, x, vectors))
    for found, wanted in zip(fixed, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Products(TorchDispatchMode):
    """Counts matrix products, and all that is done, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.all = 0, Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.all[str(function)] += 1
        self.count += str(function).startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul"))
        return function(*args, **(kwargs or {}))


def test_a_linear_map_costs_one_product_for_the_point_and_one_for_all_vectors(
    generator: torch.Generator,
) -> None:
    weight = torch.randn(3, 4, generator=generator)
    x, vectors = torch.randn(5, 4, generator=generator), torch.randn(7, 5, 4, generator=generator)
    with FixedWeights(), Products() as products:
        push(lambda point: F.linear(point, weight), x, vectors)  # type: ignore[arg-type]
    assert products.count == 2


def test_a_product_with_a_number_is_two_products_and_has_no_tangent_of_the_number(
    generator: torch.Generator,
) -> None:
    x, v = torch.randn(2, 5, 4, generator=generator)
    with FixedWeights(), Products() as products:
        jvp(lambda point: 3.0 * point, (x,), (v,))
    assert products.all["aten.mul.Scalar"] + products.all["aten.mul.Tensor"] == 2
    assert not products.all["aten._efficientzerotensor.default"] and not products.all["aten.add.Tensor"]


def test_afterwards_weights_move_again(generator: torch.Generator) -> None:
    weight = torch.randn(3, 4, generator=generator, requires_grad=True)
    with FixedWeights():
        F.linear(torch.ones(4), weight)
    F.linear(torch.ones(4), weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(3, 4))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3], ids=["small", "usual", "large"])
def test_each_rule_has_the_dense_jacobian_of_torch(name: str, scale: float, generator: torch.Generator) -> None:
    call, x = CALLS[name], scale * torch.randn(2, 4, generator=generator, dtype=torch.float64)
    dense = torch.autograd.functional.jacobian(call, x).flatten(-2)
    with FixedWeights():
        value = call(x)
        columns = vmap(lambda v: jvp(call, (x,), (v,))[1])(torch.eye(8, dtype=x.dtype).view(8, 2, 4))
    assert torch.equal(value, call(x))
    tolerance = 1e-12 * float(dense.abs().max())
    torch.testing.assert_close(columns.movedim(0, -1), dense, rtol=0, atol=tolerance)
