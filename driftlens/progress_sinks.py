"""Where progress events go: a bar in a terminal, lines in a log, JSON for a program, or nowhere."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from driftlens.errors import SpecError
from driftlens.progress import ProgressEvent, ProgressSink

Mode = Literal["auto", "rich", "jsonl", "none"]

_LINE_SECONDS = 10.0


@contextmanager
def sink_for(
    mode: Mode = "auto", stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ProgressSink]:
    """A sink for progress events, open for the length of the block.

    Args:
        mode: "auto" draws a bar on a terminal and writes plain lines elsewhere; "rich" draws a bar; "jsonl"
            writes one JSON object per event; "none" writes nothing.
        stream: where it goes; standard error unless given, since standard output carries results only.
        clock: seconds, for plain lines.

    Raises:
        SpecError: there is no such mode.
    """
    target = sys.stderr if stream is None else stream
    if mode == "rich" or (mode == "auto" and _draws(target)):
        with _bars(target) as sink:
            yield sink
    elif mode == "auto":
        lines = PlainLines(target, clock)
        yield lines
        lines.close()  # not after an exception: the phase at hand was not finished then
    elif mode == "jsonl":
        yield json_lines(target)
    elif mode == "none":
        yield lambda event: None
    else:
        raise SpecError(f"no progress mode is called {mode!r}; there are auto, rich, jsonl, none")


class PlainLines:
    """One line per finished phase, and in between at most one line in ten seconds; nothing is redrawn."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._written = clock()
        self._phase = ""
        self._done = 0
        self._began = clock()
        self._is_open = False

    def __call__(self, event: ProgressEvent) -> None:
        """Write the lines that `event` is worth."""
        is_complete = event.done == event.total
        if event.phase != self._phase or event.done < self._done:
            self.close()
            self._phase, self._began, self._is_open = event.phase, self._clock() - event.seconds, True
        self._done = event.done
        if is_complete:
            self.close()
        elif self._is_open and self._clock() - self._written >= _LINE_SECONDS:
            self._write(_line(event))

    def close(self) -> None:
        """Say that the phase at hand is over, if one is."""
        if self._is_open:
            self._write(f"{self._phase}: done in {duration(self._clock() - self._began)}")
        self._is_open = False

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._written = self._clock()


def json_lines(stream: TextIO) -> ProgressSink:
    """A sink that writes every event as one line of JSON; what JSON has no number for is null."""

    def write(event: ProgressEvent) -> None:
        record = {
            "event": "progress",
            "phase": event.phase,
            "done": event.done,
            "total": event.total,
            "label": event.label,
            "seconds": round(event.seconds, 3),
            "remaining": None if event.remaining is None else round(event.remaining, 3),
            "metrics": {
                name: value if math.isfinite(value) else None for name, value in event.metrics.items()
            },
        }
        print(json.dumps(record, ensure_ascii=False, allow_nan=False), file=stream, flush=True)

    return write


def duration(seconds: float) -> str:
    """A time for people: "4.2 s", "53 s", "2 min 05 s", "1 h 02 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _draws(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _line(event: ProgressEvent) -> str:
    count = f"{event.done}" if event.total is None else f"{event.done} of {event.total}"
    label = f", {_harmless(event.label)}" if event.label else ""
    return f"{event.phase}: {count}{label}; {_times(event)}"


def _harmless(label: str) -> str:
    """The label without control characters: the name of a task must not steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in label)


def _times(event: ProgressEvent) -> str:
    left = "" if event.remaining is None else f", about {duration(event.remaining)} left"
    return f"{duration(event.seconds)} so far{left}"


@contextmanager
def _bars(stream: TextIO) -> Iterator[ProgressSink]:
    """One bar per phase, redrawn in place."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[times]}", markup=False),
        TextColumn("{task.fields[label]}", markup=False),
    ]
    bars: dict[str, TaskID] = {}
    # Standard output carries the result; only what goes to standard error has to make way for the bars.
    with Progress(*columns, console=Console(file=stream), redirect_stdout=False) as progress:

        def draw(event: ProgressEvent) -> None:
            if event.phase not in bars:
                bars[event.phase] = progress.add_task(event.phase, times="", label="")
            progress.update(
                bars[event.phase],
                completed=event.done,
                total=event.total,
                times=_times(event),
                label=_harmless(event.label),
            )

        yield draw
