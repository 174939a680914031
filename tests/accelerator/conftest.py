"""What the tests on the pretended accelerator share: the device, with all switches as at first afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accelerator import NAME, turn


@pytest.fixture(scope="session")
def pretended(device: torch.device) -> torch.device:
    """Asked for by whatever is made for these tests, which elsewhere would be made for nothing."""
    if device.type != NAME:
        pytest.skip(f"runs with --device {NAME}, as test_apart.py has it")
    return device


@pytest.fixture
def sim(pretended: torch.device) -> Iterator[torch.device]:
    yield pretended
    turn()


@pytest.fixture(autouse=True)
def attention_by_products() -> Iterator[None]:
    """On all devices alike: the CPU's own kernel for it rounds in another way."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield
