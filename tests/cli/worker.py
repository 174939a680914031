"""A real `driftlens analyze` in a process of its own, stopped where a test wants it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = (sys.executable, "-m", "driftlens")


@contextmanager
def analyzing(spec: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that analyzes, frozen (SIGSTOP) in the middle of the second task; killed at the end of the block."""
    with started("analyze", str(spec), "--out", str(out)) as process:
        _freeze_in_second_task(process)
        yield process


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that tells its progress as lines of JSON on stderr; killed at the end of the block."""
    command = [*COMMAND, *arguments, "--progress", "jsonl"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _freeze_in_second_task(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line)
        if event["phase"] == "analyze" and event["done"] > event["total"] / 2:
            os.kill(process.pid, signal.SIGSTOP)
            return
    raise AssertionError("the process ended before its second task")
