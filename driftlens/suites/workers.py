"""Two processes that draw, train one model together, and train others apart.

Each computes with one thread: models this small gain little from a second one, while two processes do two things at
once. What they make does not depend on the number of cores.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier, Event
from threading import BrokenBarrierError
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from driftlens.errors import Cancelled, RunError

NUM_WORKERS = 2
_POLL_SECONDS = 0.2

Job = TypeVar("Job")
Result = TypeVar("Result")
News = tuple[Any, ...]
"""What a worker says while it works; the caller of `Workers.run` knows what it means."""


@dataclass
class _Team:
    """What a worker shares with the others and with the process that started them."""

    news: multiprocessing.Queue[News]
    stop: Event
    barrier: Barrier
    gradients: Tensor
    told: int = 0


_teams: list[_Team] = []
"""In a worker its team; empty elsewhere."""


class Workers:
    """The processes; use it as a context manager.

    Args:
        num_values: number of trained values of the largest model trained together.
    """

    def __init__(self, num_values: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that runs threads may hang
        self._news: multiprocessing.Queue[News] = context.Queue()
        self._stop = context.Event()
        shared = context.RawArray(ctypes.c_float, 2 * NUM_WORKERS * num_values)
        self._pool = ProcessPoolExecutor(
            NUM_WORKERS,
            mp_context=context,
            initializer=_join_team,
            initargs=(self._news, self._stop, context.Barrier(NUM_WORKERS), shared),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def run(
        self, function: Callable[[Job], Result], jobs: Sequence[Job], on_news: Callable[..., None]
    ) -> list[Result]:
        """What `function` gives for each job, in order; `on_news` hears what the workers `tell`.

        Raises:
            RunError: a worker died.
            Exception: what a job or `on_news` raised.
        """
        futures = [self._pool.submit(_counting, function, job) for job in jobs]
        heard = 0
        try:
            while not _settled(futures):
                heard += self._listen(on_news, _POLL_SECONDS)
            results = [future.result() for future in futures]
            # News travel apart from results and may come later than these.
            while heard < sum(told for _, told in results):
                heard += self._listen(on_news, _POLL_SECONDS)
            return [result for result, _ in results]
        except BrokenProcessPool as error:
            raise RunError(
                "a process that was building the embedded suite ended unexpectedly",
                hint="It may have run out of memory; the same command begins anew.",
            ) from error

    def _listen(self, on_news: Callable[..., None], seconds: float) -> int:
        """Hand on all news and count them; wait at most `seconds` for the first."""
        heard = 0
        while True:
            try:
                news = self._news.get(timeout=0.0 if heard else seconds)
            except queue.Empty:
                return heard
            on_news(*news)
            heard += 1


def _settled(futures: Sequence[Future[Any]]) -> bool:
    """Whether all are done, or one has failed, which the others may be waiting for."""
    failed = any(future.done() and future.exception() is not None for future in futures)
    return failed or all(future.done() for future in futures)


def _counting(function: Callable[[Job], Result], job: Job) -> tuple[Result, int]:
    """In a worker: do one job, and count what it tells."""
    team = _teams[0]
    before = team.told
    result = function(job)
    return result, team.told - before


def _join_team(news: multiprocessing.Queue[News], stop: Event, barrier: Barrier, shared: Any) -> None:
    torch.set_num_threads(1)
    gradients = torch.frombuffer(shared, dtype=torch.float32).view(2, NUM_WORKERS, -1)
    _teams.append(_Team(news, stop, barrier, gradients))


def tell(*news: Any) -> None:
    """In a worker: say something to `on_news`, and stop here if nobody wants the result any more.

    Raises:
        Cancelled: the work was called off.
    """
    team = _teams[0]
    if team.stop.is_set():
        raise Cancelled("cancelled")
    team.news.put(news)
    team.told += 1


@dataclass
class Share:
    """One worker's share in training a model together: a part of every batch, and the mean of all gradients.

    `Share()` is all of it: one process that trains alone.
    """

    rank: int = 0
    size: int = 1
    _step: int = field(default=0, init=False)

    def rows(self, batch: Tensor) -> Tensor:
        """This worker's part of a batch of row numbers."""
        return batch.chunk(self.size)[self.rank]

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the mean over all workers in the place of each gradient; every worker must call it as often.

        Raises:
            Cancelled: another worker stopped.
        """
        if self.size == 1:
            return
        team = _teams[0]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # Two buffers take turns: who is a step ahead must not write where another still reads.
        buffer = team.gradients[self._step % 2]
        self._step += 1
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        buffer[self.rank, : len(flat)] = flat
        try:
            team.barrier.wait()
        except BrokenBarrierError:
            raise Cancelled("another worker stopped") from None
        mean = buffer[: self.size, : len(flat)].mean(dim=0)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(mean, sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def leave(self) -> None:
        """Stop waiting for one another: call it when this worker gives up, or the others wait for ever."""
        if self.size > 1:
            _teams[0].barrier.abort()
