"""Threads that torch computes with, and products that keep all bits of float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from driftlens.utils.devices import use_num_threads
from tests.forked import Forked


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch is given four threads, which it has again afterwards."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4, "what torch was given did not come back"
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wanted", "limit", "expected"),
    [(None, "", 4), (None, "2", 4), (2, "", 2), (8, "", 8), (8, "2", 2), (8, "3,2", 3), (1, "many", 1)],
    ids=str,
)
def test_the_number_asked_for_is_limited_by_openmps_own_variable(
    wanted: int | None, limit: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    with use_num_threads(wanted):
        assert torch.get_num_threads() == expected


NEW_SWITCHES = hasattr(torch.backends, "fp32_precision")

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


@pytest.mark.slow
@pytest.mark.skipif(not NEW_SWITCHES, reason="torch 2.9 brought these switches")
@pytest.mark.parametrize("choices", [CHOICES[:2], pytest.param(CHOICES, marks=pytest.mark.every)])
def test_every_choice_is_overridden_and_comes_back(choices: list[str]) -> None:
    """In processes of their own: torch can't tell a switch that was set to its default from one never touched."""
    for choice in choices:
        process = Forked(choice, module="tests.switches")
        _, said = process.communicate(timeout=300)
        assert process.wait() == 0, f"after {choice!r}: {said}"


def test_autocast_is_off_inside_and_on_again_afterwards() -> None:
    from driftlens.utils.devices import full_precision_matmul

    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision_matmul():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
