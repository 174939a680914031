"""Derivatives with respect to features alone: the weights of a layer are held fixed.

Under `vmap(jvp(...))` torch's own rules treat weights as something that might move and work out for every vector what
depends on the point alone: beside the product W v two more for the point, the slope of the activation, the moments of
the norm. The rules here make pushing many vectors through a block about as dear as that many forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FixedWeights(TorchFunctionMode):
    """Inside this context weights and biases of `linear` and `layer_norm` don't move, whatever module calls them.

    Nor does a plain number that a tensor is multiplied or divided by: torch makes a tensor of it, and for each product
    works out in Python what a tangent of zeros would add. `gelu` has no weights; its slope is worked out once for all
    vectors.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Put the rules below in the place of torch's own."""
        if function in _BY_NUMBER and not kwargs:
            tensor, other = args
            if isinstance(tensor, Tensor) and isinstance(other, int | float):
                return _BY_NUMBER[function](tensor, other)
        rule: Callable[..., Any] = _RULES.get(function, function)
        return rule(*args, **(kwargs or {}))


class _FixedLinear(torch.autograd.Function):
    """x -> x W' + b with W and b held fixed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        weight = inputs[1]
        ctx.set_materialize_grads(False)  # or zeros as large as the weight are made for every call
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


class _FixedLayerNorm(torch.autograd.Function):
    """x -> w z + b over the last axis, z = (x - mean) / sqrt(var + eps), with w and b held fixed.

    dz = (v - mean(v) - z mean(z v)) / sqrt(var + eps), a symmetric map.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None, float], output: Tensor
    ) -> None:
        x, weight, _, ctx.eps = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        z, scale = _standardised(x, ctx.eps)
        return _without_moments(tangent, z) * _weighted(scale, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        z, scale = _standardised(x, ctx.eps)
        return _without_moments(_weighted(cotangents[0], weight), z) * scale, None, None, None


class _Gelu(torch.autograd.Function):
    """GELU by torch's own slope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, approximate: str) -> Tensor:
        return F.gelu(x, approximate=approximate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        x, ctx.approximate = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gelu_slope(x, ctx.approximate) * tangent

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _gelu_slope(x, ctx.approximate) * cotangents[0], None


def _standardised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """z, and 1 / sqrt(var + eps)."""
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    return (x - mean) * scale, scale


def _without_moments(vector: Tensor, z: Tensor) -> Tensor:
    """v - mean(v) - z mean(z v): what shifts and stretches its input, a norm does not see."""
    along = torch.linalg.vecdot(z, vector).unsqueeze(-1) / z.shape[-1]
    return torch.addcmul(vector - vector.mean(dim=-1, keepdim=True), z, along, value=-1)


def _weighted(factor: Tensor, weight: Tensor | None) -> Tensor:
    return factor if weight is None else factor * weight


def _gelu_slope(x: Tensor, approximate: str) -> Tensor:
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
    return slope


# Each takes what torch's function of its name takes.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _FixedLinear.apply(input, weight, bias)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _FixedLayerNorm.apply(input, weight, bias, eps)


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    return _Gelu.apply(input, approximate)


_RULES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.gelu: _gelu,
}
_BY_NUMBER: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), torch.ops.aten.mul.Scalar),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), torch.ops.aten.div.Scalar),
}
"""Operators for a tensor and a plain number."""
