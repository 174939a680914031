"""The pretended accelerator punishes what a real one does, and computes what the CPU does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from driftlens.base import devices
from driftlens.base.errors import RunError, SpecError
from driftlens.engine.pool import moved
from tests.accelerator import NAME, counted, turn

WORK: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x @ x.mT,
    "slice": lambda x: x[1:, ::2].mT,
    "mask": lambda x: x[x[:, 0] > 0],
    "softmax": lambda x: torch.softmax(x, dim=1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]),
    "factor": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(len(x), device=x.device)),
    "order": lambda x: x.flatten().argsort(),
    "gradient": lambda x: torch.func.grad(lambda y: (y @ y.mT).tanh().sum())(x),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_its_bits_are_the_cpus(sim: torch.device, work: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    made = work(x.to(sim))
    assert made.device.type == NAME and torch.equal(made.cpu(), work(x))


def test_fresh_memory_holds_no_number(sim: torch.device) -> None:
    assert torch.empty(3, device=sim).isnan().all()


def test_tensors_of_two_devices_do_not_mix(sim: torch.device) -> None:
    here, there, host = torch.ones(3, device=sim), torch.ones(3, device=f"{NAME}:1"), torch.ones(3)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.linalg.vecdot(here, other)


def test_what_the_host_reads_and_copies_is_counted(sim: torch.device) -> None:
    before, x = counted(), torch.ones(3).to(sim)
    assert float(x.sum()) == 3 and bool((x > 0).all()) and x.cpu().sum() == 3
    seen = counted() - before
    assert (seen.read, seen.to_host, seen.to_device) == (2, 1, 1)


def test_its_memory_ends(sim: torch.device) -> None:
    devices.reset_peak_memory(sim)
    before = devices.peak_memory(sim)
    assert before is not None
    held = torch.ones(1000, device=sim)
    assert devices.peak_memory(sim) == before + held.nbytes
    turn(limit=before + 2 * held.nbytes)
    free = devices.memory(sim)
    assert free is not None and free[0] == held.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(2000, device=sim)
    with pytest.raises(RunError, match="has no memory left"):
        turn(limit=0)
        devices.resolve_device(sim)


def test_it_may_know_no_float64(sim: torch.device) -> None:
    turn(no_double=True)
    with pytest.raises(TypeError, match="float64"):
        torch.ones(3, device=sim).double()
    assert moved(torch.ones(3).double(), sim, torch.float32).dtype == torch.float32


def test_copies_that_nobody_waits_for_have_not_been_made(sim: torch.device) -> None:
    turn(is_lazy=True)
    before, stream = devices.current_stream(sim), devices.stream_of(sim)
    devices.use_stream(stream)
    try:
        copied = moved(torch.ones(3), sim)
    finally:
        devices.use_stream(before)
    assert copied.isnan().all()
    devices.current_stream(sim).wait_stream(stream)
    assert torch.equal(copied.cpu(), torch.ones(3))
    back = torch.zeros(3).pin_memory().copy_(copied, non_blocking=True)
    assert back.isnan().all()
    devices.synchronize(sim)
    assert torch.equal(back, torch.ones(3))


def test_it_is_found_and_may_vanish(sim: torch.device) -> None:
    assert devices.resolve_device("auto").type == NAME and devices.names() == ["cpu", "sim:0", "sim:1"]
    assert devices.device_name(sim) == "pretended accelerator"
    told = pytest.raises(RunError, match="sim no longer answers, to explain here failed")
    with told as caught, devices.answering(sim, "explain here"):
        turn(is_gone=True)
        torch.ones(3, device=sim)
    assert "\n" not in caught.value.message
    with pytest.raises(SpecError, match="there is no device 'sim' here: sim error: the device was lost"):
        devices.resolve_device(NAME)
