"""How the number of threads is chosen: with a clock that is told how long each number takes, never with a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from driftlens.base import threads
from driftlens.base.errors import SpecError
from driftlens.base.threads import VARIABLE, fewest_threads, settled_threads, using_threads
from tests.forked import Forked


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch is given four threads, and nobody has said anything about them."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4, "what torch was given did not come back"
    torch.set_num_threads(before)


class Machine:
    """Work whose calls take, by number of threads, these seconds in turn; its own clock passes with it."""

    def __init__(self, seconds: Mapping[int, list[float]]) -> None:
        self.now = 0.0
        self.asked: list[int] = []
        self._seconds = seconds
        self._calls = dict.fromkeys(seconds, 0)

    def work(self) -> None:
        number = torch.get_num_threads()
        self.asked.append(number)
        series = self._seconds[number]
        self.now += series[self._calls[number] % len(series)]
        self._calls[number] += 1

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: [2e-3], 2: [1e-3]}, 2),
        ({1: [1e-3], 2: [1e-3]}, 1),
        ({1: [1.25e-3], 2: [1e-3]}, 1),
        ({1: [1.35e-3], 2: [1e-3]}, 2),
        ({1: [1e-3], 2: [9e-3]}, 1),
        ({1: [8e-3], 2: [4.4e-3], 4: [2.4e-3], 8: [2e-3]}, 4),
        # Two threads halve the time of nine calls in ten; the tenth waits for a thread that isn't running.
        ({1: [1e-3], 2: [*[0.5e-3] * 9, 8e-3]}, 1),
        # A hiccup of 4 ms in some fifty calls with one thread is no gain of the others.
        ({1: [*[1e-3] * 50, 5e-3], 2: [1e-3]}, 1),
        # All but one thread are kept waiting by a neighbour: half of the machine is still faster than one thread.
        ({1: [8e-3], 2: [4e-3], 4: [2e-3], 5: [9e-3]}, 4),
    ],
)
def test_the_fewest_threads_are_taken_that_are_nearly_as_fast_as_the_fastest(
    seconds: Mapping[int, list[float]], expected: int
):
    machine = Machine(seconds)
    assert fewest_threads(machine.work, sorted(seconds), machine.clock) == expected


def test_a_machine_that_stands_still_between_two_calls_is_no_division_by_zero():
    """The clock jumps by a second whenever it is read."""
    machine = Machine({1: [1e-3], 2: [1e-3]})

    def clock() -> float:
        machine.now += 1.0
        return machine.now

    assert fewest_threads(machine.work, [1, 2], clock) == 1


def test_candidates_take_turns():
    machine = Machine({1: [4e-3], 2: [4e-3]})
    fewest_threads(machine.work, [1, 2], machine.clock)
    turns = [one for one, next_ in zip(machine.asked, [*machine.asked[1:], 0], strict=True) if one != next_]
    assert turns[:6] == [1, 2, 1, 2, 1, 2]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The candidates of every measurement, of which the second is chosen."""
    found: list[list[int]] = []

    def choose(work: Callable[[], object], candidates: list[int]) -> int:
        work()
        found.append(list(candidates))
        return candidates[1]

    monkeypatch.setattr(threads, "fewest_threads", choose)
    monkeypatch.setattr(threads, "_believed", {})
    return found


def test_a_phase_computes_with_what_was_measured_and_gives_it_back(measured: list[list[int]]):
    with settled_threads(34, 16, phase="analyze:cars") as number:
        assert number == torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4
    with pytest.raises(KeyError), settled_threads(34, 16, phase="analyze:cars"):
        raise KeyError


def test_a_measurement_holds_for_some_seconds_and_for_layers_of_its_size(
    measured: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    counts = []
    for second, rows in ((0, 34), (9, 34), (9.5, 35), (12, 34), (21, 34)):
        now[0] = second
        with settled_threads(rows, 16, phase="analyze:cars") as number:
            assert number == torch.get_num_threads() == 2
        counts.append(len(measured))
    assert counts == [1, 1, 2, 3, 3]


def test_what_torch_was_given_is_the_limit(measured: list[list[int]]):
    torch.set_num_threads(3)
    with settled_threads(34, 16, phase="analyze:cars"):
        pass
    torch.set_num_threads(1)
    with settled_threads(34, 16, phase="analyze:cars") as number:
        assert number == 1
    torch.set_num_threads(4)
    assert measured == [[1, 2, 3]], "one thread leaves nothing to choose"


def test_whoever_says_a_number_decides(measured: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "3")
    with settled_threads(34, 16, phase="analyze:cars") as number:
        assert number == torch.get_num_threads() == 3
    with using_threads(2):
        assert torch.get_num_threads() == 2, "also outside of phases"
        with settled_threads(34, 16, phase="analyze:cars") as number:
            assert number == torch.get_num_threads() == 2
    assert not measured


def test_openmps_own_variable_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    with using_threads(8):
        assert torch.get_num_threads() == 2
    with using_threads(1):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_number_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(SpecError, match=VARIABLE), settled_threads(34, 16, phase="analyze:cars"):
        pass
    with pytest.raises(SpecError, match="from 1 upwards"), using_threads(0):
        pass


def test_every_choice_is_said_once_to_who_wants_to_know(
    measured: list[list[int]], caplog: pytest.LogCaptureFixture
):
    threads._tell.cache_clear()
    with caplog.at_level("DEBUG", logger="driftlens"):
        for task in ("cars", "digits"):
            with settled_threads(34, 16, phase=f"analyze:{task}"):
                pass
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == "DEBUG"
    assert "analyze" in message and "2 of 4 threads" in message and "--threads" in message


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


@pytest.mark.skipif(not NEW_SWITCHES, reason="torch 2.9 brought these switches")
@pytest.mark.parametrize("choices", [CHOICES[:2], pytest.param(CHOICES, marks=pytest.mark.slow)])
def test_every_choice_is_overridden_and_comes_back(choices: list[str]) -> None:
    """In processes of their own: torch can't tell a switch that was set to its default from one never touched."""
    for choice in choices:
        process = Forked(choice, module="tests.switches")
        _, said = process.communicate(timeout=300)
        assert process.wait() == 0, f"after {choice!r}: {said}"


def test_autocast_is_off_inside_and_on_again_afterwards() -> None:
    from driftlens.base.threads import exact_products

    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_products():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
