"""Progress and cancellation: the same events for a bar in a terminal, lines in a log, JSON for a program, callbacks."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, TextIO, TypeVar

from driftlens.utils.errors import Cancelled, SpecError, sanitize_text

T = TypeVar("T")
Mode = Literal["auto", "rich", "jsonl", "none"]

# Phases in words for people; programs that read progress get the names.
_PHASE_TITLES = {
    "check": "checking weights",
    "merge": "merging",
    "choose": "choosing",
    "calibrate": "solving",
    "analyze": "measuring drift",
    "evaluate": "measuring accuracy",
    "params": "comparing weights",
    "explain": "attributing drift",
}
# Seconds between two lines of a log.
_LINE_SECONDS = 10.0


@dataclass(frozen=True)
class ProgressEvent:
    """The progress of one phase of a job: `done` of `total` units (None: unknown) after `seconds`.

    `label` is the current item, for example "task cars, layer 7 of 14"; `metrics` are numbers to show meanwhile.
    """

    phase: str
    done: int
    total: int | None
    label: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def remaining(self) -> float | None:
        """The estimated seconds left, or None if there is no estimate yet."""
        if not self.done or not self.total:
            return None
        return self.seconds * (self.total - self.done) / self.done


def phase_title(phase: str) -> str:
    """Return a phase in words, such as "featcal: measuring drift" for "featcal: analyze"."""
    prefix, colon, name = phase.rpartition(": ")
    return f"{prefix}{colon}{_PHASE_TITLES.get(name, name)}"


ProgressSink = Callable[[ProgressEvent], None]


def combine_sinks(*sinks: ProgressSink | None) -> ProgressSink:
    """Combine progress sinks into one that sends every event to all of them."""
    there = [sink for sink in sinks if sink is not None]

    def _send_to_all(event: ProgressEvent) -> None:
        for sink in there:
            sink(event)

    return _send_to_all


class CancelToken:
    """A flag to cancel a job; long loops poll it once per batch, and any thread may set it."""

    def __init__(self) -> None:
        self.is_set = False
        # True if the work has noticed the request and is cleaning up.
        self.is_heard = False

    def cancel(self) -> None:
        """Request cancellation at the next batch."""
        self.is_set = True

    def check(self) -> None:
        """Raise `Cancelled` if cancellation was requested."""
        if self.is_set:
            self.is_heard = True
            raise Cancelled(
                "cancelled",
                hint="Run the command again, with --resume (if it has this option) to keep finished phases.",
            )


@contextmanager
def open_progress_sink(
    mode: Mode = "auto", stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ProgressSink]:
    """Open the progress display of a mode (`auto`, `rich`, `jsonl`, `none`) for the length of the block.

    Args:
        mode: "auto" is a progress bar on a terminal and lines elsewhere.
        stream: where to write; standard error if None.
        clock: returns seconds.
    """
    target = sys.stderr if stream is None else stream
    draws = target.isatty() and os.environ.get("TERM") != "dumb"
    if mode == "rich" or (mode == "auto" and draws):
        with _progress_bars(target) as sink:
            yield sink
    elif mode == "auto":
        lines = _PlainLines(target, clock)
        yield lines
        # Not after an exception, because the phase is unfinished then.
        lines.close()
    elif mode == "jsonl":
        yield functools.partial(_write_json_line, target)
    elif mode == "none":
        yield lambda event: None
    else:
        raise SpecError(f"unknown progress mode {mode!r}; expected auto, rich, jsonl or none")


class _PlainLines:
    """Progress as plain log lines: one per finished phase, and at most one every ten seconds in between."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._written = clock()
        self._phase = ""
        self._done = 0
        self._began = clock()
        self._is_open = False

    def __call__(self, event: ProgressEvent) -> None:
        is_complete = event.done == event.total
        if event.phase != self._phase or event.done < self._done:
            self.close()
            self._phase, self._began, self._is_open = event.phase, self._clock() - event.seconds, True
        self._done = event.done
        if is_complete:
            self.close()
        # A phase that has just begun gets no line, however old the last line is.
        elif self._is_open and self._clock() - max(self._written, self._began) >= _LINE_SECONDS:
            count = f"{event.done}" if event.total is None else f"{event.done} of {event.total}"
            label = f", {sanitize_text(event.label)}" if event.label else ""
            self._write_line(f"{phase_title(event.phase)}: {count}{label}; {_format_elapsed_and_left(event)}")

    def close(self) -> None:
        """Print that the current phase is finished."""
        if self._is_open:
            self._write_line(f"{phase_title(self._phase)}: done in {format_duration(self._clock() - self._began)}")
        self._is_open = False

    def _write_line(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._written = self._clock()


def _write_json_line(stream: TextIO, event: ProgressEvent) -> None:
    """Write a progress event as one line of JSON; NaN and infinity become null."""
    record = {
        "event": "progress",
        "phase": event.phase,
        "done": event.done,
        "total": event.total,
        "label": event.label,
        "seconds": round(event.seconds, 3),
        "remaining": None if event.remaining is None else round(event.remaining, 3),
        "metrics": {name: value if math.isfinite(value) else None for name, value in event.metrics.items()},
    }
    print(json.dumps(record, ensure_ascii=False, allow_nan=False), file=stream, flush=True)


def format_duration(seconds: float) -> str:
    """Format seconds as text: "4.2 s", "53 s", "2 min 05 s", "1 h 02 min"."""
    # From 9.95 on, one decimal would read 10.0 s.
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _format_elapsed_and_left(event: ProgressEvent) -> str:
    left = "" if event.remaining is None else f", about {format_duration(event.remaining)} left"
    return f"{format_duration(event.seconds)} so far{left}"


@contextmanager
def _progress_bars(stream: TextIO) -> Iterator[ProgressSink]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.table import Column

    console = Console(file=stream)
    # Phase, count and times have priority; bar and label share the rest of the line.
    room = max(0, console.width - 64)
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=min(40, max(1, room // 2))),
        MofNCompleteColumn(),
        TextColumn("{task.fields[times]}", markup=False),
        TextColumn(
            "{task.fields[label]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=max(1, room // 2)),
        ),
    ]
    bars: dict[str, TaskID] = {}
    # Results go to standard output, which must not be redirected through the bars.
    with Progress(*columns, console=console, redirect_stdout=False) as progress:

        def _update_bar(event: ProgressEvent) -> None:
            # Writing to a closed terminal fails shortly before the hang-up signal arrives.
            with suppress(OSError):
                if event.phase not in bars:
                    bars[event.phase] = progress.add_task(phase_title(event.phase), times="", label="")
                is_complete = event.done == event.total
                progress.update(
                    bars[event.phase],
                    completed=event.done,
                    total=event.total,
                    times=f"done in {format_duration(event.seconds)}"
                    if is_complete
                    else _format_elapsed_and_left(event),
                    label="" if is_complete else sanitize_text(event.label),
                )

        yield _update_bar
