"""The moments of a command, and what goes wrong at one of them; for a process that ends with the command.

A moment is whatever opens a file for writing, renames, removes or makes one, below the folder that is watched, and
every step of progress: between two of them nothing changes that a later command could see.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import psutil

import driftlens.runs.manifest as lock
from driftlens.utils.distributed import ProgressReporter

WRITING = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"})
"""Events of `sys.addaudithook` that change files; `open` only for writing."""

Act = Callable[["Moments", int, str], None]


class Moments:
    """Counts what happens below a folder, and lets `act` know of everything before it does.

    Args:
        folder: the folder that is watched, absolute.
        act: called with this, the number of the moment and its event; what it raises the event raises.
    """

    def __init__(self, folder: str, act: Act) -> None:
        self.count = 0
        self.folder = folder
        self._act = act
        self._is_busy = False

    def watch(self) -> None:
        """From now on; there is no way back."""
        sys.addaudithook(self._heard)
        step = ProgressReporter.step

        def stepping(*arguments: Any, **named: Any) -> None:
            self._pass("step")
            step(*arguments, **named)

        ProgressReporter.step = stepping  # type: ignore[method-assign]

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in WRITING and self._is_watched(event, arguments):
            self._pass(event)

    def _is_watched(self, event: str, arguments: tuple[Any, ...]) -> bool:
        path = arguments[0]
        if event == "open":
            flags = arguments[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return False
        elif event in ("os.remove", "os.rmdir") and arguments[1] != -1:
            return True  # inside a folder that is being removed
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    def _pass(self, event: str) -> None:
        if self._is_busy or threading.current_thread() is not threading.main_thread():
            return
        self._is_busy = True
        try:
            self.count += 1
            self._act(self, self.count - 1, event)
        finally:
            self._is_busy = False


def signals(at: int, second: int, *numbers: str, storm: bool = False) -> Act:
    """The first signal at the moment `at`, the next so many moments later; a storm goes on until the end."""
    sent = [getattr(signal, number) for number in numbers]

    def act(moments: Moments, now: int, event: str) -> None:
        if now == at:
            os.kill(os.getpid(), sent[0])
        if len(sent) > 1 and (now == at + second or (storm and now > at + second)):
            os.kill(os.getpid(), sent[1 + (now - at - second) % (len(sent) - 1)])

    return act


def failing(at: int, number: int, events: frozenset[str]) -> Act:
    """From the moment `at` on the system refuses all of these events."""

    def act(moments: Moments, now: int, event: str) -> None:
        if now >= at and event in events:
            raise OSError(number, os.strerror(number), moments.folder)

    return act


def vanishing(at: int) -> Act:
    """At the moment `at` somebody removes the folder."""

    def act(moments: Moments, now: int, event: str) -> None:
        if now == at:
            shutil.rmtree(moments.folder, ignore_errors=True)  # it may not be there yet

    return act


def jumping(at: int, days: int) -> Act:
    """At the moment `at` the system's clock is set."""

    def act(moments: Moments, now: int, event: str) -> None:
        if now != at:
            return
        seconds, booted = days * 86_400, psutil.boot_time()
        clock, fine = time.time, time.time_ns

        class Shifted(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + timedelta(days=days)

        time.time, time.time_ns = lambda: clock() + seconds, lambda: fine() + seconds * 10**9
        lock.datetime = Shifted  # type: ignore[misc]
        sys.modules[psutil._psplatform.__name__].boot_time = lambda: booted + seconds  # type: ignore[attr-defined]

    return act


FAULTS: dict[str, Callable[[int, int], Act]] = {
    "nothing": lambda at, other: signals(-1, 0, "SIGTERM"),
    "kill": lambda at, other: signals(at, 0, "SIGKILL"),
    "twice": lambda at, other: signals(at, other % 5, *[["SIGTERM", "SIGTERM"], ["SIGHUP", "SIGTERM"]][other % 2]),
    "storm": lambda at, other: signals(at, other % 5, "SIGTERM", "SIGHUP", "SIGINT", "SIGTERM", storm=True),
    "hangup": lambda at, other: signals(at, 0, "SIGHUP"),
    "full": lambda at, other: failing(at, errno.ENOSPC, frozenset({"open", "os.mkdir"})),
    "readonly": lambda at, other: failing(at, errno.EROFS, WRITING),
    "vanished": lambda at, other: vanishing(at),
    "clock": lambda at, other: jumping(at, [-4000, -1, 1, 4000][other % 4]),
}
"""What goes wrong, by name: from the number of the moment, and another that the case has drawn."""


def play(arguments: list[str], folder: str, fault: str, at: int, other: int, told: Path) -> None:
    """Run one command line with a fault, and end with its code. How many moments it had is written to `told`."""
    import driftlens.cli

    moments = Moments(folder, FAULTS[fault](at, other))
    sys.argv = ["driftlens", *arguments]
    moments.watch()
    atexit.register(lambda: told.write_text(str(moments.count)))
    driftlens.cli.main()
