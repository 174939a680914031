"""Progress and cancellation: the same events for terminal, JSON lines and callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import TypeVar

from driftlens.errors import Cancelled

T = TypeVar("T")


@dataclass(frozen=True)
class ProgressEvent:
    """How far one phase has come.

    Attributes:
        phase: what is being done, for example "analyze".
        done: units finished.
        total: units in all, or None when unknown.
        label: what is at hand, for example "task cars, layer 7 of 14".
        seconds: time since the phase began.
        metrics: numbers worth showing while waiting.
    """

    phase: str
    done: int
    total: int | None
    label: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def remaining(self) -> float | None:
        """Seconds left at the pace so far, or None when that can't be told yet."""
        if not self.done or not self.total:
            return None
        return self.seconds * (self.total - self.done) / self.done


ProgressSink = Callable[[ProgressEvent], None]


class CancelToken:
    """A flag polled once per batch; `cancel` may be called from another thread or a signal handler."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """Ask the work to stop at the next batch."""
        self._cancelled = True

    def check(self) -> None:
        """Raise `Cancelled` if somebody asked to stop.

        Raises:
            Cancelled: `cancel` was called.
        """
        if self._cancelled:
            raise Cancelled(
                "cancelled",
                hint="What was finished is kept; run the command again, with --resume where it has that option.",
            )


class Reporter:
    """Hands events to a sink and polls the cancel token; every long loop goes through `track` or `step`."""

    def __init__(self, sink: ProgressSink | None = None, cancel: CancelToken | None = None) -> None:
        self._sink = sink
        self._cancel = cancel
        self._phase = ""
        self._done = 0
        self._started = time.monotonic()

    def step(self, phase: str, done: int, total: int | None, label: str = "", **metrics: float) -> None:
        """Report that `done` of `total` units are finished, after checking for cancellation.

        Raises:
            Cancelled: somebody asked to stop.
        """
        if self._cancel is not None:
            self._cancel.check()
        # A phase may say "nothing done yet" many times, once per batch; only going back means that it begins anew.
        if phase != self._phase or done < self._done:
            self._phase, self._started = phase, time.monotonic()
        self._done = done
        if self._sink is not None:
            self._sink(ProgressEvent(phase, done, total, label, time.monotonic() - self._started, metrics))

    def track(self, items: Iterable[T], phase: str, label: Callable[[T], str] = str) -> Iterator[T]:
        """Yield `items`, reporting before each and once at the end.

        Raises:
            Cancelled: somebody asked to stop.
        """
        total = len(items) if isinstance(items, Sized) else None
        done = 0
        for item in items:
            self.step(phase, done, total, label(item))
            yield item
            done += 1
        self.step(phase, done, total)
