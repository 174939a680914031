"""What a machine does in a second: measured, kept, and read between what was measured."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from driftlens.jobs.preflight import rates
from driftlens.jobs.preflight.costs import Effort

CPU = torch.device("cpu")
KNOWN = rates.Rates(
    device="cpu",
    cores=4,
    threads=4,
    work={
        "blocks": {64: 1e9, 256: 4e9, 1024: 4e9},
        "steps": {64: 1e8},
        "sums": {64: 2e9},
        "solves": {64: 1e8},
    },
    reads=1e8,
    one=0.4,
    crowded=0.7,
)


def test_between_widths_rates_lie_on_a_log_scale_and_beyond_them_stay() -> None:
    at = [KNOWN.at("blocks", width) for width in (1, 64, 128, 256, 500, 10_000)]
    assert at == pytest.approx([1e9, 1e9, 2e9, 4e9, 4e9, 4e9])


def test_a_time_is_the_sum_of_its_parts() -> None:
    effort = Effort({("blocks", 128): 4e9, ("sums", 9): 1e9}, samples=10, reads=1e8)
    assert effort.seconds(KNOWN, 0.1) == pytest.approx(2 + 0.5 + 1 + 1)
    twice = effort * 0.5 + effort + Effort({("solves", 64): 1e8})
    assert twice.seconds(KNOWN, 0.1, pace=0.5) == pytest.approx(2 * (1.5 * 4.5 + 1))


def test_processes_on_one_machine_share_its_cores_and_its_memory() -> None:
    assert [KNOWN.pace(number) for number in (1, 2, 4, 8)] == pytest.approx(
        [1.0, 0.4 * 0.9, 0.4 * 0.7, 0.4 * 0.7 / 2]
    )
    assert dataclasses.replace(KNOWN, device="cuda").pace(8) == 1


@pytest.fixture
def kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    file = tmp_path / "cache" / "rates-cpu.json"
    monkeypatch.setattr(rates, "rates_file", lambda device: file)
    return file


@pytest.mark.slow
def test_what_was_measured_is_found_again(kept: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "WIDTHS", (16, 32, 64))
    monkeypatch.setattr(rates, "_SECONDS", 0.02)
    assert rates.measured_rates(CPU) is None
    told: list[str] = []
    found = rates.measure(CPU, told.append)
    assert told == ["blocks", "steps", "sums", "solves", "processes"]
    assert rates.measured_rates(CPU) == found == rates.rates_here(CPU, 32)
    numbers = [rate for work in found.work.values() for rate in work.values()]
    numbers += [found.reads, found.one, found.crowded, found.wire, found.latency, found.start]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert found.crowded <= 1 < found.start


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: "nonsense",
        lambda found: "[]",
        lambda found: json.dumps({**found, "cores": 10**6}),
        lambda found: json.dumps({**found, "work": {"blocks": {"wide": 1}}}),
        lambda found: json.dumps({name: value for name, value in found.items() if name != "reads"}),
    ],
    ids=["no JSON", "a list", "another machine", "odd widths", "a rate missing"],
)
def test_a_file_that_tells_nothing_of_this_machine_is_measured_past(kept: pathlib.Path, spoil) -> None:
    mine = dataclasses.replace(KNOWN, cores=rates.cores())
    kept.parent.mkdir()
    kept.write_text(json.dumps(dataclasses.asdict(mine)))
    assert rates.measured_rates(CPU) == mine
    kept.write_text(spoil(dataclasses.asdict(mine)))
    assert rates.measured_rates(CPU) is None
    quick = rates.rates_here(CPU, 64)
    assert set(quick.work) == {"blocks", "steps", "sums", "solves"} and quick.at("blocks", 64) > 0


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_walk_counts_the_operations_that_it_does(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []

    def once(work: Callable[[], float], device: torch.device, seconds: float) -> float:
        with FlopCounterMode(display=False) as counter:
            told = work()
        counted.append(counter.get_total_flops())
        return told

    monkeypatch.setattr(rates, "_timed", once)
    told = rates._walked(CPU, 64, 0.0, tokens=tokens)
    assert counted[0] <= told <= 1.2 * counted[0]  # the counter knows nothing of this attention
