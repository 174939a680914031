"""What the tests on the pretended accelerator share: the device, with all switches as at first afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accelerator import NAME, turn


@pytest.fixture
def sim(device: torch.device) -> Iterator[torch.device]:
    if device.type != NAME:
        pytest.skip(f"runs with --device {NAME}, as test_apart.py has it")
    yield device
    turn()


@pytest.fixture(autouse=True)
def attention_by_products() -> Iterator[None]:
    """On all devices alike: the CPU's own kernel for it rounds in another way."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield
