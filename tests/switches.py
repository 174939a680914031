"""A program: whether a choice of how torch multiplies, made in this process, is overridden and comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from driftlens.utils.devices import full_precision_matmul

b = torch.backends


def state() -> list[str]:
    cuda = [b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn]
    cpu = [b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
    return [place.fp32_precision for place in [b, *cuda, *cpu]]


def asked(question: Callable[[], object]) -> str:
    try:
        return str(question())
    except RuntimeError:
        return "mixed"


def everything() -> list[object]:
    old = [asked(torch.get_float32_matmul_precision), asked(lambda: b.cudnn.allow_tf32)]
    found: list[object] = [state(), *old]
    chosen = b.fp32_precision
    b.fp32_precision = "ieee"  # what follows the general switch now must follow it afterwards
    found.append(state())
    b.fp32_precision = chosen
    return found


def check(choice: str) -> None:
    exec(choice)
    before = everything()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = (x.double() @ x.double()).float()
    for _ in range(2):
        with full_precision_matmul():
            assert set(state()) == {"ieee"}, state()
            assert torch.get_float32_matmul_precision() == "highest"
            with full_precision_matmul():
                torch.testing.assert_close(x @ x, exact, rtol=1e-5, atol=1e-4)
            assert set(state()) == {"ieee"}, state()
    assert everything() == before, (before, everything())
    try:
        with full_precision_matmul():
            raise KeyError
    except KeyError:
        assert everything() == before


if __name__ == "__main__":
    check(sys.argv[1])
