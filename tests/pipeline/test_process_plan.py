"""What each of several processes takes: counted by hand, and of a decoder that no machine here could hold."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from driftlens.base.access import Access
from driftlens.engine.sites import select_sites
from driftlens.jobs.preflight import processes
from driftlens.jobs.preflight.job import checked
from driftlens.jobs.preflight.jobs import SpecStudy
from driftlens.jobs.preflight.processes import (
    Group,
    Processes,
    plan_processes,
    solve_share,
    solved_groups,
    wire_bytes,
)
from driftlens.jobs.preflight.rehearsal import Extent, Measured, Rehearsed
from driftlens.jobs.study.opening import open_models
from driftlens.spec import load_spec
from tests.pipeline.checking import check
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.world import DEPTH, World

KNOWN = processes.Rates(
    device="cpu", cores=4, threads=4, one=0.4, crowded=0.8, wire=1e9, latency=1e-3, start=5.0
)
EXTENTS = [Extent(1, 72, 2), Extent(2, 16, 2), Extent(4, 72, 2), Extent(2, 8, 1)]


def rehearsed(opened: SpecStudy, *phases: str) -> Rehearsed:
    """What takes a second for every block and sample, and another for every block."""
    measured = [Measured(at, at.blocks * (1 + at.samples)) for at in EXTENTS]
    stored = [Measured(at, 1000 * at.samples) for at in EXTENTS]
    return Rehearsed(opened.study, dict.fromkeys(phases, measured), stored, resident=10**9)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "measured_rates", lambda device: KNOWN)
    monkeypatch.setattr(SpecStudy, "analysis", lambda opened, **_: rehearsed(opened, "analyze", "params"))
    monkeypatch.setattr(
        SpecStudy, "calibration", lambda opened, *_, **__: rehearsed(opened, "calibrate", "analyze")
    )


@pytest.fixture
def groups(world: World) -> list[list[Group]]:
    """Of FeatCal's walk through the tiny transformer of `world`."""
    models = open_models(load_spec(world.spec()), Access())
    chain, headers = models.architecture.chain, models.sources["base"].headers
    return solved_groups(chain, headers, select_sites(chain))


def planned(world: World, number: int, per_machine: int | None = None) -> Processes:
    _, opened = checked(load_spec(world.spec()), Access())
    assert opened is not None
    return plan_processes(opened, opened.analysis(), number, per_machine)


def test_sites_that_read_the_same_are_one_group(groups: list[list[Group]]) -> None:
    """Width 16, an MLP four times as wide: q, k and v, then out, fc1 and fc2; nothing in the stem."""
    block = [Group(16, (16, 16, 16)), Group(16, (16,)), Group(16, (64,)), Group(64, (16,))]
    assert groups == [[], *[block] * DEPTH]


def test_the_wire_carries_half_gram_matrices_cross_moments_and_what_is_solved(
    groups: list[list[Group]],
) -> None:
    numbers = 3 * 16**2 + 64**2 + (3 + 1 + 4 + 4) * 16 * 16  # sums this narrow are held whole
    weights = (3 + 1 + 4 + 4) * 16 * 16
    batches = {"a": 5, "b": 5}
    assert wire_bytes(groups, batches, 1) == (0, 0, 0)
    both = DEPTH * (8 * numbers + 4 * weights)
    assert wire_bytes(groups, batches, 2) == (both, both, DEPTH * 4 + 2 * (DEPTH + 1))
    # Of four, two share a task: the second of them sends its moments to the first.
    sent, received, times = wire_bytes(groups, batches, 4)
    assert sent == received == DEPTH * (8 * numbers * (2 * 3 / 4 + 1) + 4 * weights)
    assert times == DEPTH * 4 * 2 + 4 * (DEPTH + 1)


def test_solves_that_one_process_does_while_others_wait_are_waited_for(groups: list[list[Group]]) -> None:
    assert solve_share(groups, 1) == pytest.approx(1)
    cost = [16**3 / 3 + 2 * outs * 16**2 for outs in (48, 16, 64)] + [64**3 / 3 + 2 * 16 * 64**2]
    assert solve_share(groups, 64) == pytest.approx(max(cost) / sum(cost))


def test_batches_are_divided_and_more_processes_than_these_only_share_the_machine(world: World) -> None:
    """Two tasks of two batches."""
    found = {number: planned(world, number, 1).shares for number in (1, 2, 4)}
    for name in ("analyze", "calibrate"):
        one, two, four = (found[number][name] for number in (1, 2, 4))
        assert two.memory_bytes <= one.memory_bytes and one.wire_bytes == 0 < two.wire_bytes
        assert four.seconds < two.seconds < one.seconds
    four, eight = (planned(world, number, number).shares for number in (4, 8))
    for name in ("analyze", "calibrate"):
        assert four[name].seconds < eight[name].seconds


def test_a_number_that_nobody_has_is_refused(world: World) -> None:
    number = processes.MOST + 1
    result = check(world.spec(), estimate=True, processes=number)
    assert result.exit_code == 2 and f"processes is {number}" in result.problems[0].text
    result = check(world.spec(), estimate=True, processes=2, per_machine=number)
    assert result.exit_code == 2 and f"per_machine is {number}" in result.problems[0].text


def test_processes_that_crowd_a_machine_take_longer(world: World) -> None:
    spread, crowded = (planned(world, 8, number) for number in (4, 8))
    assert spread.per_machine == 4 and crowded.per_machine == 8
    for name in ("analyze", "calibrate"):  # twice as many as there are cores: everything takes twice as long
        assert crowded.shares[name].seconds == pytest.approx(2 * spread.shares[name].seconds, rel=0.1)


def test_the_plan_stands_under_the_estimate_and_in_json(world: World) -> None:
    result = check(world.spec(), estimate=True, processes=2)
    assert "each of 2 processes, 2 on a machine like this:" in result.text().splitlines()
    plan = json.loads(json.dumps(result.as_dict()))["processes"]
    assert {*plan["shares"]} == {"analyze", "calibrate"} and plan["number"] == 2 and plan["measured"]
    assert "processes" not in check(world.spec(), estimate=True).as_dict()


@pytest.mark.slow
def test_a_decoder_of_8b_with_five_experts_is_planned_from_its_headers(tmp_path: Path) -> None:
    spec = eight_billions(tmp_path)
    many = check(spec, estimate=True, processes=64)
    assert not many.problems, many.text()
    assert many.processes is not None and many.processes.per_machine == KNOWN.cores
    shares = many.processes.shares
    # Two weight-sized arrays in float64 go around per layer, and what was solved in float32, of 6.98e9 numbers.
    solved = 32 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336)
    halves = 32 * (3 * 4096 * (4096 + 128) + 14336 * (14336 + 112)) // 2  # and blocks on the diagonal
    # One batch of each task: whole, so that no moments go from process to process before they are summed up.
    rows = shares["calibrate"].wire_bytes - (8 * (solved + halves) * 2 * 63 / 64 + 4 * solved)
    assert 0 <= rows < 1e9


def eight_billions(folder: Path) -> dict[str, object]:
    """A spec whose checkpoints are headers, some numbers, and holes."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    names = ["base", *"abcde"]
    for seed, name in enumerate(names):
        place = folder / name
        config.save_pretrained(place)
        word_tokenizer().save_pretrained(place)
        write_holes(place / "model.safetensors", shapes, torch.Generator().manual_seed(seed))
    rows = [{"input": "is it red", "target": "yes"}, {"input": "is it", "target": "no"}] * 32
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {"kind": "jsonl", "calibration": str(file), "test": str(file)}
    return {
        "version": 1,
        "name": "eight",
        "architecture": {"loader": "hf-decoder", "source": str(folder / "base")},
        "base": {"weights": str(folder / "base")},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "experts": {name: {"weights": str(folder / name)} for name in names[1:]},
        "data": {"defaults": {"n": 16, "n_diagnosis": 16, "n_test": 16}, **dict.fromkeys(names[1:], data)},
    }


def write_holes(file: Path, shapes: dict[str, torch.Size], generator: torch.Generator) -> None:
    """A checkpoint in bfloat16 whose tensors begin with some numbers and go on with zeros that no disk holds."""
    headers, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape.numel()
        headers[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(headers).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        begin = out.tell()
        for header in headers.values():
            start, stop = header["data_offsets"]
            numbers = torch.randn(min(512, (stop - start) // 2), generator=generator).to(torch.bfloat16)
            out.seek(begin + start)
            out.write(numbers.view(torch.int16).numpy().tobytes())
        out.truncate(begin + end)
