"""Devices: one place knows them, and what isn't there, or has gone, is told in one paragraph."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

import driftlens
from driftlens.data import samples
from driftlens.utils import devices
from driftlens.utils.devices import to_device
from driftlens.utils.errors import RunError, SpecError

CPU = torch.device("cpu")
SOURCES = [
    file
    for folder in ("driftlens", "reports", "app", "benchmarks")
    for file in sorted((Path(driftlens.__file__).parents[1] / folder).rglob("*.py"))
]
ASKS = re.compile(r"torch\.(cuda|mps|xpu|accelerator)\b|\.(is_cuda|is_mps|is_xpu)\b|type == ['\"](cuda|mps|xpu)")
"""What asks torch about a kind of accelerator, or about accelerators."""


def test_one_file_asks_torch_about_accelerators() -> None:
    asking = {file.name for file in SOURCES if ASKS.search(file.read_text(encoding="utf-8"))}
    assert len(SOURCES) > 150 and asking == {"devices.py"}


def test_the_host_has_all_that_is_asked_of_a_device() -> None:
    assert devices.device_name(CPU) == "cpu" and devices.available_devices()[0] == "cpu"
    assert devices.has_float64(CPU) and devices.device_for_dtype(torch.float64, CPU) == CPU
    assert devices.device_memory(CPU) is devices.peak_memory(CPU) is None
    devices.reset_peak_memory(CPU)
    devices.synchronize(CPU)
    tensor = torch.ones(2)
    assert to_device(tensor, CPU) is tensor and to_device(tensor, CPU, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("name", ["cuda:99", "mps:7", "meta", "tpu", "cpu:x"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(SpecError, match=f"device '{name}' is not available") as caught:
        devices.resolve_device(name)
    assert "Use `auto` or `cpu`" in caught.value.hint and "\n" not in caught.value.message


def test_too_little_memory_is_told_in_one_paragraph() -> None:
    told = pytest.raises(RunError, match="cpu has too little memory to explain here: all 80 GiB")
    with told as caught, devices.convert_device_errors(CPU, "explain here"):
        raise torch.OutOfMemoryError("all 80 GiB are in use\nand a page of advice")
    assert "--resume" in caught.value.hint and "\n" not in caught.value.message


def test_an_error_that_is_not_the_devices_goes_on_as_it_is() -> None:
    with (
        pytest.raises(RuntimeError, match="shapes") as caught,
        devices.convert_device_errors(CPU, "explain here"),
    ):
        raise RuntimeError("shapes disagree")
    assert not isinstance(caught.value, RunError)


@pytest.mark.parametrize(("fits", "sizes"), [(8, [8]), (2, [8, 4, 2]), (0, [8, 4, 2, 1])])
def test_work_begins_anew_with_half_the_batch_until_it_fits(
    fits: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    told: list[str] = []
    monkeypatch.setattr(samples.gc, "collect", lambda: 0)  # all that tests before this one have left takes long

    def work() -> None:
        tried.append(samples.reduced_batch_size(8))
        if tried[-1] > fits:
            raise torch.OutOfMemoryError

    outcome = contextlib.nullcontext() if fits else pytest.raises(torch.OutOfMemoryError)
    with outcome, samples.halve_batch_on_oom(8, told.append) as done:
        done(work)
    assert (
        tried == sizes and told == [f"batches of {size}" for size in sizes[1:]] and samples.reduced_batch_size(8) == 8
    )


def test_sums_have_a_quarter_of_an_accelerator_or_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("meta")  # its memory is told below
    monkeypatch.setattr(devices, "device_memory", lambda device: None if device.type == "cpu" else (800, 1000))
    assert devices.moments_budget(place, 100) == 200
    assert devices.moments_budget(place, 300) == 300
    assert devices.moments_budget(torch.device("cpu"), 100) == 100
    with devices.offload_moments() as move:
        move()
        assert devices.moments_budget(place, 100) == 100, "sums that lie on the host have the budget alone"
