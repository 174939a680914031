"""Full products whatever the process has chosen, and every choice back afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

NEW_SWITCHES = hasattr(torch.backends, "fp32_precision")

SCRIPT = """
import os, sys, torch
from driftlens.base.threads import exact_products

b = torch.backends
torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports much, once for all children

def state():
    cuda = [b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn]
    cpu = [b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
    return [place.fp32_precision for place in [b, *cuda, *cpu]]

def asked(question):
    try:
        return str(question())
    except RuntimeError as error:
        return "mixed"

def everything():
    old = [asked(torch.get_float32_matmul_precision), asked(lambda: b.cudnn.allow_tf32)]
    found = [state(), *old]
    chosen = b.fp32_precision
    b.fp32_precision = "ieee"  # what follows the general switch now must follow it afterwards
    found.append(state())
    b.fp32_precision = chosen
    return found

def check(choice):
    exec(choice)
    before = everything()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = (x.double() @ x.double()).float()
    for _ in range(2):
        with exact_products():
            assert set(state()) == {"ieee"}, state()
            assert torch.get_float32_matmul_precision() == "highest"
            with exact_products():
                torch.testing.assert_close(x @ x, exact, rtol=1e-5, atol=1e-4)
            assert set(state()) == {"ieee"}, state()
    assert everything() == before, (before, everything())
    try:
        with exact_products():
            raise KeyError
    except KeyError:
        assert everything() == before

for choice in sys.argv[1:]:
    if os.fork() == 0:  # a child each: what was set once can't be made as if it never was
        try:
            check(choice)
        except BaseException:
            print(f"after {choice!r}:", file=sys.stderr)
            raise
        sys.exit(0)
    if os.wait()[1] != 0:
        sys.exit(1)
"""


CHOICES = [
    "",
    "torch.set_float32_matmul_precision('medium')",
    "torch.set_float32_matmul_precision('high')",
    "b.fp32_precision = 'tf32'",
    "b.fp32_precision = 'bf16'",
    "b.fp32_precision = 'ieee'",
    "b.cuda.matmul.fp32_precision = 'tf32'",
    "b.cudnn.conv.fp32_precision = 'ieee'",
    "b.cudnn.fp32_precision = 'tf32'",
    "b.mkldnn.matmul.fp32_precision = 'bf16'",
    "b.mkldnn.fp32_precision = 'bf16'",
    "torch.set_float32_matmul_precision('medium'); b.cuda.matmul.fp32_precision = 'ieee'",
    "b.mkldnn.matmul.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')",
    "b.cudnn.allow_tf32 = False",
]


@pytest.mark.skipif(not NEW_SWITCHES, reason="torch 2.9 brought these switches")
@pytest.mark.parametrize("choices", [CHOICES[:2], pytest.param(CHOICES, marks=pytest.mark.slow)])
def test_every_choice_is_overridden_and_comes_back(choices: list[str]) -> None:
    """In processes of their own: torch can't tell a switch that was set to its default from one never touched."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *choices], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_autocast_is_off_inside_and_on_again_afterwards() -> None:
    from driftlens.base.threads import exact_products

    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_products():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
