"""The pretended accelerator punishes what a real one does, and computes what the CPU does."""

from __future__ import annotations

import pytest
import torch

from driftlens.utils import devices
from driftlens.utils.devices import to_device
from driftlens.utils.errors import RunError, SpecError
from tests.accelerator import NAME, turn


def test_tensors_of_two_devices_do_not_mix(sim: torch.device) -> None:
    here, there, host = torch.ones(3, device=sim), torch.ones(3, device=f"{NAME}:1"), torch.ones(3)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.linalg.vecdot(here, other)


def test_pinned_memory_that_is_used_again_before_a_wait_is_sent_as_it_became(sim: torch.device) -> None:
    turn(is_lazy=True)
    source = torch.ones(3).pin_memory()
    sent, safe = source.to(sim, non_blocking=True), to_device(source, sim)
    late = source.to(sim, non_blocking=True)
    source.zero_()
    assert torch.equal(sent.cpu(), torch.ones(3)) and torch.equal(safe.cpu(), torch.ones(3))
    assert torch.equal(late.cpu(), torch.zeros(3))


def test_it_is_found_and_may_vanish(sim: torch.device) -> None:
    assert devices.resolve_device("auto").type == NAME and devices.available_devices() == [
        "cpu",
        "sim:0",
        "sim:1",
    ]
    assert devices.device_name(sim) == "pretended accelerator"
    told = pytest.raises(RunError, match="sim no longer responds: to explain here failed")
    with told as caught, devices.convert_device_errors(sim, "explain here"):
        turn(is_gone=True)
        torch.ones(3, device=sim)
    assert "\n" not in caught.value.message
    with pytest.raises(SpecError, match="device 'sim' is not available: sim error: the device was lost"):
        devices.resolve_device(NAME)
