"""What processes on one machine take from each other: measured, kept, and read again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from driftlens.jobs.preflight import processes

CPU = torch.device("cpu")
KNOWN = processes.Rates(device="cpu", cores=4, threads=4, one=0.4, crowded=0.7)


def test_processes_on_one_machine_share_its_cores_and_its_memory() -> None:
    assert [KNOWN.pace(number) for number in (1, 2, 4, 8)] == pytest.approx(
        [1.0, 0.4 * 0.9, 0.4 * 0.7, 0.4 * 0.7 / 2]
    )
    assert dataclasses.replace(KNOWN, device="cuda").pace(8) == 1


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "cache" / "rates-cpu.json"
    monkeypatch.setattr(processes, "rates_file", lambda device: file)
    return file


@pytest.mark.slow
def test_what_was_measured_is_found_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_WIDTH", 64)
    monkeypatch.setattr(processes, "_SECONDS", 0.02)
    assert processes.measured_rates(CPU) is None
    told: list[str] = []
    found = processes.measure(CPU, told.append)
    assert told == ["processes"] and processes.measured_rates(CPU) == found
    numbers = [found.one, found.crowded, found.wire, found.latency, found.start]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert found.crowded <= 1 < found.start


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: "nonsense",
        lambda found: "[]",
        lambda found: json.dumps({**found, "cores": 10**6}),
        lambda found: json.dumps({**found, "one": "fast"}),
        lambda found: json.dumps({name: value for name, value in found.items() if name != "threads"}),
    ],
    ids=["no JSON", "a list", "another machine", "a word", "a number missing"],
)
def test_a_file_that_tells_nothing_of_this_machine_is_passed_over(kept: Path, spoil) -> None:
    mine = dataclasses.replace(KNOWN, cores=processes.cores())
    kept.parent.mkdir()
    older = {**dataclasses.asdict(mine), "reads": 1e9, "work": {"blocks": {"64": 1e9}}}
    kept.write_text(json.dumps(older))
    assert processes.measured_rates(CPU) == mine
    kept.write_text(spoil(dataclasses.asdict(mine)))
    assert processes.measured_rates(CPU) is None
