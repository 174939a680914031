"""Two real processes: what they make together is what one would make, and none is left waiting."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from driftlens.base.errors import RunError
from driftlens.suites.training import NUM_WORKERS, Worker, work_together


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert all(wait([child.sentinel], 0) for child in multiprocessing.active_children())


def together(work: Any, *arguments: Any) -> list[tuple[Any, ...]]:
    """What the workers told."""
    heard: list[tuple[Any, ...]] = []
    work_together(work, arguments, lambda *news: heard.append(news), num_values=8)
    return heard


def divide_then_descend(worker: Worker, jobs: list[int]) -> None:
    """First jobs apart, then three steps on a quadratic whose data are split between the workers."""
    for job in worker.jobs(jobs):
        worker.tell("job", job)
    worker.meet()
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    data = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 1.0], [1.0, 1.0]])
    for _ in range(3):
        weight.grad = None
        (data[worker.rows(torch.arange(4))] @ weight).square().mean().backward()
        worker.average_gradients([weight])
        assert weight.grad is not None
        weight.data -= 0.1 * weight.grad
    worker.tell("weight", weight.tolist())


def give_up_or_wait(worker: Worker) -> None:
    if worker.rank == 0:
        raise ValueError("this worker gave up")
    worker.meet()


def die_or_wait(worker: Worker) -> None:
    if worker.rank == 0:
        os._exit(9)
    worker.meet()


@pytest.mark.slow
def test_jobs_are_divided_and_training_together_equals_training_alone_on_all_data():
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    data = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 1.0], [1.0, 1.0]])
    for _ in range(3):
        (gradient,) = torch.autograd.grad((data @ weight).square().mean(), weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    heard = together(divide_then_descend, [3, 1, 2])
    assert sorted(heard[:3]) == [("job", 1), ("job", 2), ("job", 3)], "told before they met, heard before"
    (_, one), (_, other) = heard[3:]
    assert len(heard) == 3 + NUM_WORKERS
    assert one == other == pytest.approx(weight.tolist(), rel=1e-6)


@pytest.mark.slow
def test_a_script_that_begins_when_it_is_imported_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text("raise SystemExit('begun once more')")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert len(together(divide_then_descend, [3, 1, 2])) == 3 + NUM_WORKERS
    assert sys.modules["__main__"] is script


@pytest.mark.slow
def test_one_worker_that_gives_up_stops_the_other():
    with pytest.raises(ValueError, match="gave up"):
        together(give_up_or_wait)


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error():
    with pytest.raises(RunError, match="ended unexpectedly"):
        together(die_or_wait)


@pytest.fixture
def nobody_keeps_exit_codes() -> Iterator[None]:
    """As where something else in the process waits for any child."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow  # what a worker says counts, not its exit code
@pytest.mark.usefixtures("nobody_keeps_exit_codes")
def test_ends_are_told_apart_without_exit_codes():
    with pytest.raises(RunError, match="ended unexpectedly"):
        together(die_or_wait)
    assert len(together(divide_then_descend, [3, 1, 2])) == 3 + NUM_WORKERS
