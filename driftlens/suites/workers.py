"""Two processes that draw, train one model together, and train others apart.

Each computes with one thread: models this small gain little from a second one, while two processes do two things at
once. What they make does not depend on the number of cores.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from driftlens.base.errors import RunError

NUM_WORKERS = 2

_PATIENCE = 1.0
"""Seconds after which a process that has died without a word is noticed."""

Job = TypeVar("Job")


@dataclass
class Worker:
    """One of the processes: its share of jobs and batches, and what all of them share."""

    rank: int
    _news: Connection
    _turn: Lock
    _barrier: Barrier
    _gradients: Any
    _step: int = field(default=0, init=False)

    def jobs(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Those of `jobs` that are this worker's."""
        return jobs[self.rank :: NUM_WORKERS]

    def rows(self, batch: Tensor) -> Tensor:
        """This worker's part of a batch of row numbers."""
        return batch.chunk(NUM_WORKERS)[self.rank]

    def tell(self, *news: Any) -> None:
        """Say something to the process that started this one."""
        with self._turn:
            self._news.send(news)

    def told_by_first(self, phase: str) -> Callable[[int, float], None]:
        """Tells steps and losses of what all workers do together, once."""
        return lambda done, loss: self.tell(phase, "", done, loss) if self.rank == 0 else None

    def meet(self) -> None:
        """Wait until all workers have come here."""
        self._barrier.wait()

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the mean over all workers in the place of each gradient; every worker must call it as often."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        # Two buffers take turns: who is a step ahead must not write where another still reads.
        shared = torch.frombuffer(self._gradients, dtype=torch.float32).view(2, NUM_WORKERS, -1)
        buffer = shared[self._step % 2, :, : len(flat)]
        self._step += 1
        buffer[self.rank] = flat
        self.meet()
        parts = torch.split(buffer.mean(dim=0), [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def work_together(
    work: Callable[..., None], arguments: Sequence[Any], on_news: Callable[..., None], num_values: int
) -> None:
    """Run `work(worker, *arguments)` in every process; `on_news` hears what the workers tell, in order.

    However it ends, no process is left.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process that runs threads may hang
    reader, writer = context.Pipe(duplex=False)
    gradients = context.RawArray(ctypes.c_float, 2 * NUM_WORKERS * num_values)
    shared = (writer, context.Lock(), context.Barrier(NUM_WORKERS), gradients)
    workers = [Worker(rank, *shared) for rank in range(NUM_WORKERS)]
    processes = [
        context.Process(target=_begin, args=(work, worker, arguments), daemon=True) for worker in workers
    ]
    num_started = 0
    try:
        for process in processes:
            process.start()
            num_started += 1
        num_done = 0
        while num_done < len(processes):
            # A worker's last word says that it is done, not its exit code: that may have gone to somebody else who
            # waits for processes.
            ended = sum(bool(wait([process.sentinel], 0)) or not process.is_alive() for process in processes)
            if reader.poll(0 if ended > num_done else _PATIENCE):
                news = reader.recv()
                if isinstance(news, BaseException):
                    raise news
                if news is None:
                    num_done += 1
                else:
                    on_news(*news)
            elif (
                ended > num_done
            ):  # nothing is left to read, and not all of them have said that they are done
                raise RunError(
                    "a process that was building the embedded suite ended unexpectedly",
                    hint="It may have run out of memory; the same command begins anew.",
                )
    finally:
        for process in processes[:num_started]:
            process.kill()
            process.join()


def _begin(work: Callable[..., None], worker: Worker, arguments: Sequence[Any]) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all; the process that started this one decides
    torch.set_num_threads(1)
    try:
        work(worker, *arguments)
        with worker._turn:
            worker._news.send(None)
    except Exception as error:
        try:
            with worker._turn:
                worker._news.send(error)
        finally:
            worker._barrier.abort()  # nobody else need wait, should nobody be left to end them
