"""Two real processes: what they make together is what one would make, and none is left waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from driftlens.errors import Cancelled, RunError
from driftlens.suites.workers import NUM_WORKERS, Share, Workers, tell


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(num_values=8) as team:
        yield team


def ignore(*_: object) -> None:
    pass


def double(number: int) -> int:
    tell("doubling", number)
    return 2 * number


def descend(rank: int) -> list[float]:
    """Three steps on a quadratic whose data are split between the workers."""
    share = Share(rank, NUM_WORKERS)
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    data = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 1.0], [1.0, 1.0]])
    for _ in range(3):
        weight.grad = None
        rows = share.rows(torch.arange(4))
        (data[rows] @ weight).square().mean().backward()
        share.average_gradients([weight])
        assert weight.grad is not None
        weight.data -= 0.1 * weight.grad
    return weight.detach().tolist()


def give_up_or_wait(rank: int) -> None:
    share = Share(rank, NUM_WORKERS)
    if rank == 0:
        share.leave()
        raise ValueError("this worker gave up")
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    share.average_gradients([weight])


def fill(size: int) -> bytes:
    tell(size)
    return bytes(size)


def die(_: int) -> None:
    os._exit(9)


def test_results_come_in_the_order_of_the_jobs_and_news_arrive(workers: Workers):
    heard: list[tuple[object, ...]] = []
    assert workers.run(double, [(3,), (1,), (2,)], lambda *news: heard.append(news)) == [6, 2, 4]
    assert sorted(heard) == [("doubling", 1), ("doubling", 2), ("doubling", 3)]


def test_training_together_equals_training_alone_on_all_data(workers: Workers):
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    data = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 1.0], [1.0, 1.0]])
    for _ in range(3):
        (gradient,) = torch.autograd.grad((data @ weight).square().mean(), weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    both = workers.run(descend, [(rank,) for rank in range(NUM_WORKERS)], ignore)
    assert both[0] == both[1] == pytest.approx(weight.tolist(), rel=1e-6)


def test_alone_a_share_is_everything():
    share, weight = Share(), nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, 2.0])
    share.average_gradients([weight])
    assert share.rows(torch.arange(3)).tolist() == [0, 1, 2]
    assert weight.grad.tolist() == [1.0, 2.0]


def test_one_worker_that_gives_up_stops_the_other():
    with Workers(num_values=8) as team, pytest.raises(ValueError, match="gave up"):
        team.run(give_up_or_wait, [(rank,) for rank in range(NUM_WORKERS)], ignore)


def test_a_worker_that_dies_is_an_error():
    with Workers(num_values=8) as team, pytest.raises(RunError, match="ended unexpectedly"):
        team.run(die, [(0,)], ignore)


def test_what_the_listener_raises_stops_the_work():
    def cancel(*_: object) -> None:
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled), Workers(num_values=8) as team:
        team.run(double, [(number,) for number in range(10_000)], cancel)


def test_results_that_nobody_reads_any_more_are_not_waited_for():
    """They are larger than what a pipe between processes holds."""

    def cancel(*_: object) -> None:
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled), Workers(num_values=8) as team:
        team.run(fill, [(1 << 22,)] * 8, cancel)
