from __future__ import annotations

import errno
import io
import json

import pytest

from driftlens.utils.distributed import ProgressReporter
from driftlens.utils.errors import Cancelled
from driftlens.utils.progress import CancelToken, ProgressEvent, open_progress_sink


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(*events: tuple[float, ProgressEvent], ends: float | None = None) -> list[str]:
    """The lines of some events, each at its time."""
    clock, stream = Clock(), io.StringIO()
    with open_progress_sink("auto", stream, clock) as sink:
        for clock.now, event in events:
            sink(event)
        clock.now = clock.now if ends is None else ends
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue(), "redrawn, or steered"
    return stream.getvalue().splitlines()


def walk(seconds: float) -> list[tuple[float, ProgressEvent]]:
    """One phase of a hundred even steps."""
    times = [(done, seconds * done / 100) for done in range(101)]
    return [(time, ProgressEvent("analyze", done, 100, f"layer {done}", time)) for done, time in times]


def test_a_long_phase_adds_a_line_every_ten_seconds_with_the_time_left() -> None:
    assert plain(*walk(8.0)) == ["measuring drift: done in 8.0 s"]
    lines = plain(*walk(50.0))
    assert lines[0] == "measuring drift: 20 of 100, layer 20; 10 s so far, about 40 s left"
    counts = [f"measuring drift: {done} of 100" for done in (20, 40, 60, 80)]
    assert [line.split(",")[0] for line in lines[:-1]] == counts and lines[-1] == "measuring drift: done in 50 s"


def test_a_phase_that_has_just_begun_has_no_line_however_long_ago_the_last_was() -> None:
    later = [(30.0 + now, ProgressEvent("merge", done, 2, "weight", now)) for done, now in ((0, 0.0), (1, 0.1))]
    assert plain(*walk(8.0), *later, ends=30.2) == ["measuring drift: done in 8.0 s", "merging: done in 0.2 s"]


def test_a_name_does_not_steer_the_terminal() -> None:
    events = [(now, ProgressEvent("layout", 1, 3, "task \x1b[31mred", now)) for now in (0.0, 20.0)]
    assert "\ufffd[31mred" in plain(*events)[0]


def test_every_phase_is_finished_once_even_without_a_last_event() -> None:
    counted = [(3.0, ProgressEvent("walk", done, 2)) for done in (0, 2, 2)]
    events = [(0.0, ProgressEvent("load", 0, None)), *counted, (3.0, ProgressEvent("score", 0, None))]
    assert plain(*events, ends=5.0) == ["load: done in 3.0 s", "walk: done in 0.0 s", "score: done in 2.0 s"]


def test_an_interrupted_phase_is_not_called_done() -> None:
    stream = io.StringIO()
    with pytest.raises(Cancelled), open_progress_sink("auto", stream, Clock()) as sink:
        sink(ProgressEvent("walk", 1, 9))
        raise Cancelled("cancelled")
    assert stream.getvalue() == ""


def test_json_lines_hold_every_event_and_no_nan() -> None:
    stream = io.StringIO()
    with open_progress_sink("jsonl", stream) as sink:
        sink(ProgressEvent("walk", 1, 4, "手写", 2.0, {"drift": 0.5, "lost": float("nan")}))
        sink(ProgressEvent("walk", 2, None))
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == {
        "event": "progress",
        "phase": "walk",
        "done": 1,
        "total": 4,
        "label": "手写",
        "seconds": 2.0,
        "remaining": 6.0,
        "metrics": {"drift": 0.5, "lost": None},
    }
    assert (second["total"], second["remaining"]) == (None, None)


def test_a_terminal_gets_a_bar_that_says_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with open_progress_sink("auto", stream) as sink:
        sink(ProgressEvent("analyze", 1, 4, "[bold]layer[/bold] 1", 2.0))
    shown = stream.getvalue()
    assert "1/4" in shown and "about 6.0 s left" in shown
    assert "[bold]layer[/bold] 1" in shown  # a label is text, not markup


def test_a_terminal_that_is_gone_ends_no_work() -> None:
    """Between its end and the signal that tells of it, what is drawn finds no place."""

    class Terminal(io.StringIO):
        is_gone, refused = False, 0

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if self.is_gone:
                self.refused += 1
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    terminal = Terminal()
    with open_progress_sink("rich", terminal) as sink:
        sink(ProgressEvent("merge", 1, 2, "a", 0.1, {}))
        terminal.is_gone = True
        for phase in ("analyze", "explain"):
            sink(ProgressEvent(phase, 1, 2, "a", 0.2, {}))
        terminal.is_gone = False
    assert terminal.refused


def test_tracking_reports_before_each_item_and_at_the_end() -> None:
    events: list[ProgressEvent] = []
    seen = [(item, len(events)) for item in ProgressReporter(events.append).track(["a", "b"], "load", str.upper)]
    assert seen == [("a", 1), ("b", 2)]
    assert [(event.done, event.total, event.label) for event in events] == [
        (0, 2, "A"),
        (1, 2, "B"),
        (2, 2, ""),
    ]


def test_a_cancelled_token_stops_the_work_at_the_next_step() -> None:
    token, done = CancelToken(), []
    with pytest.raises(Cancelled):
        for item in ProgressReporter(cancel=token).track(range(5), "walk"):
            done.append(item)
            if item == 2:
                token.cancel()
    assert done == [0, 1, 2]


def test_time_left_follows_the_pace_so_far() -> None:
    assert ProgressEvent("walk", 3, 12, seconds=6.0).remaining == 18.0
    assert ProgressEvent("walk", 0, 12, seconds=6.0).remaining is None
    assert ProgressEvent("walk", 3, None, seconds=6.0).remaining is None
