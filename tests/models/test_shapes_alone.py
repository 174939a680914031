"""What passes shapes at once, against what torch makes of them step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.models.taking_apart.interception import ShapesAlone

X, LONG = torch.randn(2, 3, 4, 8, device="meta"), torch.randn(2, 3, 6, 8, device="meta")
W, HALF = torch.randn(8, device="meta"), torch.randn(2, 3, 4, 8, device="meta", dtype=torch.float16)
CALLS: dict[str, Callable[[], Tensor]] = {
    "sum": lambda: X + X[:, :1],
    "sum of another type": lambda: X + HALF,
    "sum with a number": lambda: 2 + X.mul(0.5),
    "sum times a number": lambda: torch.add(X, X, alpha=2),
    "sum with a complex number": lambda: X + 2j,
    "sum of whole numbers": lambda: X.long() + 1.5,
    "sum of what lies otherwise": lambda: X.mT + X.mT,
    "product": lambda: W * X,
    "product with a tensor of one number": lambda: X * torch.tensor(2.0, dtype=torch.float64),
    "power": lambda: X.pow(2),
    "power of powers": lambda: X.pow(W),
    "linear map": lambda: F.linear(X, LONG[0, 0], LONG[0, 0, :, 0].contiguous()),
    "linear map without bias": lambda: F.linear(X.transpose(1, 2), weight=LONG[0, 0]),
    "linear map of one vector": lambda: F.linear(W, LONG[0, 0]),
    "linear map to one number": lambda: F.linear(X, W),
    "linear map of another type": lambda: F.linear(X, HALF[0, 0]),
    "norm": lambda: F.layer_norm(X, (8,), W, W),
    "norm of what lies otherwise": lambda: F.layer_norm(X.transpose(1, 2), (8,), weight=W),
    "gelu": lambda: F.gelu(X, approximate="tanh"),
    "attention": lambda: F.scaled_dot_product_attention(X, LONG, LONG[..., :5], is_causal=True),
    "attention of groups": lambda: F.scaled_dot_product_attention(
        X.repeat(1, 2, 1, 1), LONG, LONG, enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_shape_type_and_order_are_those_of_torch(name: str) -> None:
    wanted = CALLS[name]()
    with ShapesAlone():
        found = CALLS[name]()
    assert found.is_meta and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize(
    "call",
    [
        lambda: X + LONG,
        lambda: F.linear(X, LONG[0, 0, :, :7]),
        lambda: F.layer_norm(X, (7,)),
        lambda: F.scaled_dot_product_attention(X, W, W),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(call: Callable[[], Tensor]) -> None:
    with pytest.raises(Exception) as wanted:
        call()
    with ShapesAlone(), pytest.raises(type(wanted.value)) as found:
        call()
    assert str(found.value) == str(wanted.value)


def test_numbers_are_computed() -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with ShapesAlone():
        assert torch.equal(F.gelu(x + x), F.gelu(2 * x))
