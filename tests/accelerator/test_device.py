"""The pretended accelerator punishes what a real one does, and computes what the CPU does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.engine.pool import ReadAhead
from driftlens.utils import devices
from driftlens.utils.devices import moved
from driftlens.utils.errors import RunError, SpecError
from tests.accelerator import NAME, turn
from tests.accelerator.subjects import models, pool_on


def test_tensors_of_two_devices_do_not_mix(sim: torch.device) -> None:
    here, there, host = torch.ones(3, device=sim), torch.ones(3, device=f"{NAME}:1"), torch.ones(3)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.linalg.vecdot(here, other)


@contextmanager
def beside(sim: torch.device) -> Iterator[Any]:
    """A stream of its own that this thread works in meanwhile."""
    before, stream = devices.current_stream(sim), devices.stream_of(sim)
    devices.use_stream(stream)
    try:
        yield stream
    finally:
        devices.use_stream(before)


WORK_BESIDE: dict[str, Callable[[Tensor], Tensor]] = {"a copy": lambda x: x, "a kernel": lambda x: x * 1}


@pytest.mark.parametrize("work", WORK_BESIDE.values(), ids=WORK_BESIDE)
def test_what_another_stream_makes_is_not_there_before_a_wait(
    sim: torch.device, work: Callable[[Tensor], Tensor]
) -> None:
    turn(is_lazy=True)
    current = devices.current_stream(sim)
    with beside(sim) as stream:
        made = work(moved(torch.ones(3), sim))
    with pytest.raises(RuntimeError, match="record_stream"):
        made.isnan()
    made.record_stream(current)
    assert made.isnan().all()
    current.wait_stream(stream)
    assert torch.equal(made.cpu(), torch.ones(3))


def test_pinned_memory_that_is_used_again_before_a_wait_is_sent_as_it_became(sim: torch.device) -> None:
    turn(is_lazy=True)
    source = torch.ones(3).pin_memory()
    sent, safe = source.to(sim, non_blocking=True), moved(source, sim)
    late = source.to(sim, non_blocking=True)
    source.zero_()
    assert torch.equal(sent.cpu(), torch.ones(3)) and torch.equal(safe.cpu(), torch.ones(3))
    assert torch.equal(late.cpu(), torch.zeros(3))


@pytest.mark.parametrize("forgotten", ["nothing", "wait", "record"])
def test_weights_read_ahead_are_waited_for(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    def take(self: ReadAhead, key: Hashable) -> dict[str, Tensor]:
        read, current = self._coming.pop(key).result(), devices.current_stream(sim)
        if forgotten != "wait":
            current.wait_stream(self._stream)
        for tensor in read.values() if forgotten != "record" else ():
            tensor.record_stream(current)
        return read

    if forgotten != "nothing":
        monkeypatch.setattr(ReadAhead, "take", take)
    turn(is_lazy=True)
    pool, on_host = pool_on(models(), sim), pool_on(models(), torch.device("cpu"))
    layer = pool.chain.blocks[0]
    pool.expect(["merged"], layer.index)
    read, expected = pool.parameters("merged", layer), on_host.parameters("merged", layer)
    refused = pytest.raises(RuntimeError, match="record_stream")
    with refused if forgotten == "record" else nullcontext():
        is_there = all(torch.equal(read[name].cpu(), expected[name]) for name in expected)
        assert is_there == (forgotten == "nothing")


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
