"""Two processes that draw, train one model together, and train others apart.

Each computes with one thread: models this small gain little from a second one, while two processes do two things at
once. What they make does not depend on the number of cores.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier, Event
from threading import BrokenBarrierError
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from driftlens.errors import Cancelled, RunError

NUM_WORKERS = 2
_POLL_SECONDS = 0.2

Result = TypeVar("Result")


@dataclass
class _Team:
    """What a worker shares with the others and with the process that started them."""

    messages: multiprocessing.Queue[tuple[int | None, Any]]
    stop: Event
    barrier: Barrier
    gradients: Tensor


_teams: list[_Team] = []
"""In a worker its team; empty elsewhere."""


class Workers:
    """The processes; use it as a context manager.

    Args:
        num_values: number of trained values of the largest model trained together.
    """

    def __init__(self, num_values: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that runs threads may hang
        self._messages: multiprocessing.Queue[tuple[int | None, Any]] = context.Queue()
        self._stop = context.Event()
        shared = context.RawArray(ctypes.c_float, 2 * NUM_WORKERS * num_values)
        self._pool = ProcessPoolExecutor(
            NUM_WORKERS,
            mp_context=context,
            initializer=_join_team,
            initargs=(self._messages, self._stop, context.Barrier(NUM_WORKERS), shared),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        function: Callable[..., Result],
        jobs: Sequence[tuple[Any, ...]],
        on_news: Callable[..., None],
    ) -> list[Result]:
        """What `function` gives for the arguments of each job, in order; `on_news` hears what the workers `tell`.

        Raises:
            RunError: a worker died.
            Exception: what a job or `on_news` raised.
        """
        futures = [self._pool.submit(_do, at, function, job) for at, job in enumerate(jobs)]
        results: dict[int, Result] = {}
        try:
            while len(results) < len(jobs):
                for future in futures:
                    if future.done():
                        future.result()  # raises where a job has failed, which the others may be waiting for
                try:
                    job, content = self._messages.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if job is None:
                    on_news(*content)
                else:
                    results[job] = content
        except BrokenProcessPool as error:
            raise RunError(
                "a process that was building the embedded suite ended unexpectedly",
                hint="It may have run out of memory; the same command begins anew.",
            ) from error
        return [results[at] for at in range(len(jobs))]


def _do(at: int, function: Callable[..., Any], job: tuple[Any, ...]) -> None:
    """In a worker: do one job. Its result takes the way that news take, so that none of them comes later."""
    _teams[0].messages.put((at, function(*job)))


def _join_team(
    messages: multiprocessing.Queue[tuple[int | None, Any]], stop: Event, barrier: Barrier, shared: Any
) -> None:
    torch.set_num_threads(1)
    messages.cancel_join_thread()  # whoever has stopped reading needn't be waited for at the end
    gradients = torch.frombuffer(shared, dtype=torch.float32).view(2, NUM_WORKERS, -1)
    _teams.append(_Team(messages, stop, barrier, gradients))


def tell(*news: Any) -> None:
    """In a worker: say something to `on_news`, and stop here if nobody wants the result any more.

    Raises:
        Cancelled: the work was called off.
    """
    if _teams[0].stop.is_set():
        raise Cancelled("cancelled")
    _teams[0].messages.put((None, news))


class Share:
    """One worker's share in training a model together: a part of every batch, and the mean of all gradients.

    `Share()` is all of it: one process that trains alone.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._step = 0

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
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        # Two buffers take turns: who is a step ahead must not write where another still reads.
        buffer = _teams[0].gradients[self._step % 2, : self.size, : len(flat)]
        self._step += 1
        buffer[self.rank] = flat
        try:
            _teams[0].barrier.wait()
        except BrokenBarrierError:
            raise Cancelled("another worker stopped") from None
        parts = torch.split(buffer.mean(dim=0), [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def leave(self) -> None:
        """Stop waiting for one another: call it when this worker gives up, or the others wait for ever."""
        if self.size > 1:
            _teams[0].barrier.abort()
