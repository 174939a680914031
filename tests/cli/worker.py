"""A real `driftlens analyze` in a process of its own, stopped where a test wants it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.forked import Forked

Event = dict[str, Any]
COMMAND = (sys.executable, "-m", "driftlens")


@contextmanager
def frozen(stops: Callable[[Event], bool], *arguments: str) -> Iterator[Forked]:
    """A process that tells its progress as lines of JSON on stderr, stopped by SIGSTOP where an event says so."""
    with Forked(*arguments, "--progress", "jsonl") as process:
        assert any(stops(json.loads(line)) for line in process.stderr), "the process ended before that"
        process.send_signal(signal.SIGSTOP)
        yield process


def analyzing(spec: Path, out: Path) -> AbstractContextManager[Forked]:
    """A process that analyzes, frozen in the middle of the second task."""
    return frozen(
        lambda event: event["phase"] == "analyze" and event["done"] > event["total"] / 2,
        *("analyze", str(spec), "--out", str(out)),
    )
