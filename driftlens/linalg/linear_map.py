"""Linear maps that derivatives pass through with one product.

Under `vmap(jvp(...))` torch's own rule for `linear` treats the weight as something that might move: beside the product
W v it forms two more products for the point and adds zeros to every vector. Most of a transformer block is linear maps,
so the rule here, which holds the weight fixed, is what makes pushing many vectors through a block about as dear as that
many forward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _FixedLinear(torch.autograd.Function):
    """x -> x W' + b with W and b held fixed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        weight = inputs[1]
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (weight,) = ctx.saved_tensors
        return F.linear(tangent, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return cotangents[0] @ weight, None, None


class FixedWeights(TorchFunctionMode):
    """Inside this context every `linear` has a weight and a bias that don't move, for any module that calls it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Put the rule above in the place of `torch.nn.functional.linear`."""
        if function is F.linear:
            return _fixed_linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _fixed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _FixedLinear.apply(input, weight, bias)
