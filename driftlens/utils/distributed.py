"""Processes of one job under `torchrun`, and the permissions, progress sink and cancel token of a job (`JobContext`).

Every process runs the same program on the same files. Each task belongs to one rank; the main rank collects results in
the order of the tasks, so that they are those of one process, and it alone writes. Entry point:
`join_process_group`. A `ProcessGroup` of one process answers every call at once.

An error in any process ends the job: its connections close, and every other process raises the posted error.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

from driftlens.utils.errors import (
    Cancelled,
    DriftLensError,
    RunError,
    SpecError,
    add_error_context,
    wrap_library_error,
)
from driftlens.utils.progress import (
    CancelToken,
    Mode,
    ProgressEvent,
    ProgressSink,
    combine_sinks,
    open_progress_sink,
)

log = logging.getLogger("driftlens")
T = TypeVar("T")

# Timeout for all processes to start: a scheduler may start machines minutes apart.
_JOIN = timedelta(minutes=5)
# Seconds for the other processes to read the error from the main process's store.
_READ = 1.0
# Timeout for one result of another process, which may measure a whole task first.
_WAIT = timedelta(days=1)


class ProcessGroup:
    """This process within a distributed job of `size` processes; rank 0 is the main process."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        """Describe a process of `torch.distributed`'s default group; `store` is shared by all of them."""
        self.rank, self.size, self._store = rank, size, store
        self._common: list[BaseException] = []

    @property
    def is_main_process(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    def owner_ranks(self, items: Sequence[str]) -> dict[str, int]:
        """Assign items to ranks round-robin; return the rank of each item."""
        return {item: place % self.size for place, item in enumerate(items)}

    def own_items(self, items: Sequence[str]) -> list[str]:
        """Return the items assigned to this process; empty if there are more processes than items."""
        return [item for item, owner in self.owner_ranks(items).items() if owner == self.rank]

    def warn_idle(self, items: Sequence[str]) -> None:
        """Log a warning if there are more processes than tasks, with the number of idle processes."""
        if self.size > len(items):
            idle = self.size - len(items)
            log.warning("%d of %d processes are idle: there are only %d tasks", idle, self.size, len(items))

    def run_on_rank(self, owner: int, work: Callable[[], T]) -> T | None:
        """Run `work` on one rank and return its result on the main rank; None on others. Same order on all ranks."""
        value = work() if self.rank == owner else None
        if owner == 0:
            return value
        if self.rank == owner:
            self._send_object(value, 0)
        return cast("T", self._receive_object(owner)) if self.is_main_process else None

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank and return its result on all ranks; a `DriftLensError` is raised on all."""
        if self.size == 1:
            return work()
        if self.is_main_process:
            value, error = outcome = _result_or_error(work)
            for rank in range(1, self.size):
                self._send_object(outcome, rank)
        else:
            value, error = self._receive_object(0)
        if error is not None:
            raise self._mark_raised_on_all(error)
        return cast("T", value)

    def gather(self, value: T) -> list[T]:
        """Gather a value from every process and return the list, by rank, on all; tensors are moved to the CPU."""
        if self.size == 1:
            return [value]
        import torch

        values: list[Any] = [None] * self.size
        with self._report_broken_connection():
            torch.distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""
        self.gather(None)

    def map(self, items: Sequence[str], work: Callable[[str], T]) -> dict[str, T]:
        """Apply `work` to the items, distributed over the ranks, and return all results on every rank."""
        if self.size == 1:
            return {item: work(item) for item in items}
        parts: dict[str, T] = {}
        for part, error in self.gather(_result_or_error(lambda: {item: work(item) for item in self.own_items(items)})):
            if error is not None:
                raise self._mark_raised_on_all(error)
            parts |= part or {}
        return {item: parts[item] for item in items}

    def is_raised_on_all(self, error: BaseException) -> bool:
        """Return True if all processes have raised this error at the same place, so that they may continue."""
        return self.size == 1 or error in self._common

    def broadcast_error(self, error: BaseException) -> bool:
        """Send the error that ends this process to the others; return True if it was the first, to be printed."""
        if self.size == 1:
            return True
        if isinstance(error, KeyboardInterrupt):
            error = Cancelled("cancelled")
        if not isinstance(error, DriftLensError):
            error = wrap_library_error(error) or RunError(f"process {self.rank}: {type(error).__name__}: {error}")
        # In hexadecimal, because the store compares text.
        ours = pickle.dumps((type(error), error.message, error.hint, self.rank)).hex()
        try:
            is_first = self._store.compare_set("failed", "", ours) == ours.encode()
        except RuntimeError:
            # The store belonged to the main process, which has ended.
            return self.rank <= 1
        if self.is_main_process and is_first:
            import torch

            # Closing their connections makes the others read the error from this process's store.
            with suppress(RuntimeError, ValueError):
                torch.distributed.destroy_process_group()
            time.sleep(_READ)
        return bool(is_first)

    def _mark_raised_on_all(self, error: DriftLensError) -> DriftLensError:
        self._common.append(error)
        return error

    @contextmanager
    def _report_broken_connection(self) -> Iterator[None]:
        """Replace a broken connection's error by the error that ended the other process."""
        try:
            yield
        except RuntimeError as broken:
            error: DriftLensError = RunError(
                f"another of the {self.size} processes was killed or ran out of memory",
                hint="Repeat the command with --resume.",
            )
            # The store may be gone, too.
            with suppress(RuntimeError):
                if self._store.check(["failed"]):
                    kind, message, hint, _ = pickle.loads(bytes.fromhex(self._store.get("failed").decode()))
                    error = kind(message, hint=hint)
            raise error from broken

    def _send_object(self, value: object, to: int) -> None:
        import torch

        file = io.BytesIO()
        _TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        with self._report_broken_connection():
            torch.distributed.send_object_list([file.getvalue()], dst=to, device=torch.device("cpu"))

    def _receive_object(self, source: int) -> Any:
        import torch

        data: list[Any] = [None]
        with self._report_broken_connection():
            torch.distributed.recv_object_list(data, src=source, device=torch.device("cpu"))
        return pickle.loads(data[0])


class _TensorPickler(pickle.Pickler):
    """Pickle GPU tensors so that they are unpickled on the GPU of the receiving process."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            # Without an index, a device is the one that `set_process_device` chose.
            return torch.Tensor.to, (value.detach().cpu(), value.device.type)
        return NotImplemented


# A job of one process.
ALONE = ProcessGroup()


def _result_or_error(work: Callable[[], T]) -> tuple[T | None, DriftLensError | None]:
    try:
        return work(), None
    except DriftLensError as error:
        return None, error


@contextmanager
def join_process_group() -> Iterator[ProcessGroup]:
    """Join the processes that torchrun has started; without torchrun, yield a group of one process."""
    if world_size() == 1:
        yield ALONE
        return
    import torch

    from driftlens.utils.devices import set_process_device

    dist: Any = torch.distributed
    number = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=_JOIN))
        set_process_device(number)
        group = dist.PrefixStore("group", store)
        # Only whole results of tasks are exchanged, so a faster backend would save no time.
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=_WAIT)
    except (RuntimeError, ValueError, KeyError) as error:
        raise SpecError(
            f"the {world_size()} processes of the job can't connect: {str(error).splitlines()[0][:200]}",
            hint="Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process.",
        ) from error
    # A prefix of its own, so that keys of the process group can't collide with these.
    team = ProcessGroup(rank, size, dist.PrefixStore("team", store))
    yield team
    # A process that leaves early breaks the connections of those that still send results.
    team.barrier()
    dist.destroy_process_group()


def world_size() -> int:
    """Return WORLD_SIZE from the environment; 1 if it is not set, or if RANK is not."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() and int(size) > 1 and "RANK" in os.environ else 1


@dataclass(frozen=True)
class Permissions:
    """Device, network access (`offline`) and permission to run code named in the spec (`trust`) of a job."""

    device: str | None = None
    offline: bool = False
    trust: bool = False
    team: ProcessGroup = ALONE

    @property
    def cli_options(self) -> list[str]:
        """The command-line options that grant the same permissions."""
        device = [] if self.device is None else ["--device", self.device]
        return [*device, *["--offline"] * self.offline, *["--trust-code"] * self.trust]

    def import_function(self, target: str, role: str) -> Callable[..., Any]:
        """Import the function `package.module:function`; raise a `SpecError` if running code is not permitted."""
        if not self.trust:
            raise SpecError(
                f"the {role} {target} is Python code, which needs permission to run",
                hint="If you trust it, repeat the command with --trust-code.",
            )
        module, _, name = target.partition(":")
        with add_error_context(f"the {role} {target}"):
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


class ProgressReporter:
    """Sends the progress of long loops to a sink, and raises `Cancelled` if the cancel token is set."""

    def __init__(self, sink: ProgressSink | None = None, cancel: CancelToken | None = None) -> None:
        self._sink = sink
        self._cancel = cancel
        self._phase = ""
        self._done = 0
        self._started = time.monotonic()

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """Report that `done` of `total` units of a phase are finished, after checking for cancellation.

        Args:
            phase: name of the phase.
            done: finished units.
            total: number of units, or None if unknown.
            label: the current item.
            metrics: numbers to show.
        """
        if self._cancel is not None:
            self._cancel.check()
        # A phase may report 0 units many times, once per batch; only a decrease means that it starts again.
        if phase != self._phase or done < self._done:
            self._phase, self._started = phase, time.monotonic()
        self._done = done
        if self._sink is not None:
            self._sink(ProgressEvent(phase, done, total, label, time.monotonic() - self._started, metrics))

    def track(self, items: Iterable[T], phase: str, label: Callable[[T], str] = str) -> Iterator[T]:
        """Iterate over `items` and report progress before each of them and at the end.

        Args:
            items: the units of the phase.
            phase: name of the phase.
            label: item -> its label.
        """
        total = len(items) if isinstance(items, Sized) else None
        done = 0
        for item in items:
            self.step(phase, done, total, label(item))
            yield item
            done += 1
        self.step(phase, done, total)


class TaskProgress:
    """Progress of one task within a phase that goes through all tasks."""

    def __init__(self, reporter: ProgressReporter, phase: str, units: Mapping[str, int], task: str) -> None:
        self._reporter, self._phase, self._task = reporter, phase, task
        self._before = sum(list(units.values())[: list(units).index(task)])
        self._all, self._total = units[task], sum(units.values())

    def step(self, done: int, label: str) -> None:
        """Report the current item and how many of the task's units are done."""
        self._reporter.step(self._phase, self._before + done, self._total, f"task {self._task}: {label}")

    def finish(self) -> None:
        """Report that the task is done."""
        self._reporter.step(self._phase, self._before + self._all, self._total, f"task {self._task}")


@dataclass(frozen=True)
class JobContext:
    """Permissions, progress sink and cancel token of a job; `live` opens modules that are already in memory."""

    access: Permissions = Permissions()
    on_progress: ProgressSink | None = None
    cancel: CancelToken | None = None
    live: Callable[[int | None], Any] | None = None

    def with_phase_prefix(self, prefix: str) -> JobContext:
        """Return a copy of the context whose progress phases are prefixed with `prefix`."""
        sink = self.on_progress
        if sink is None:
            return self
        return replace(self, on_progress=lambda event: sink(replace(event, phase=f"{prefix}: {event.phase}")))

    def reporter(self, *sinks: ProgressSink) -> ProgressReporter:
        """Return a progress reporter for these sinks and the job's own; it also polls the cancel token."""
        return ProgressReporter(combine_sinks(*sinks, self.on_progress), self.cancel)


@dataclass(frozen=True)
class JobArguments:
    """Keyword arguments of every function that computes: progress, cancellation, device and permissions.

    Attributes:
        progress: display of progress on stderr: auto, rich, jsonl or none.
        on_progress: called with every `ProgressEvent`.
        cancel: a token whose `cancel()` stops the work at the next batch; finished phases are kept.
        device: `auto`, `cpu`, `cuda`, `mps`, `xpu`, or `cuda:1`; overrides the spec.
        offline: True to use only files that were downloaded before.
        trust: True to run Python code that the spec names.
    """

    progress: Mode = "auto"
    on_progress: ProgressSink | None = None
    cancel: CancelToken | None = None
    device: str | None = None
    offline: bool = False
    trust: bool = False

    @property
    def access(self) -> Permissions:
        """Device and permissions of the job."""
        return Permissions(self.device, self.offline, self.trust)

    @contextmanager
    def context(self, live: Callable[[int | None], Any] | None = None) -> Iterator[JobContext]:
        """Yield the job context; progress is displayed inside the block."""
        # A caller's inference mode would forbid gradients. If torch is not imported, the mode is off.
        torch = sys.modules.get("torch")
        with (
            open_progress_sink(self.progress) as shown,
            torch.inference_mode(False) if torch else nullcontext(),
        ):
            yield JobContext(self.access, combine_sinks(shown, self.on_progress), self.cancel, live)


@dataclass(frozen=True)
class QuietJobArguments(JobArguments):
    """The same keyword arguments as `JobArguments`, without a progress display by default."""

    progress: Mode = "none"
