"""Runs that are stopped while they are written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd


def stopping(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, with Ctrl-C instead of one of its calls."""
    calls = iter(range(1000))

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return wrapped


@contextmanager
def process(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has said "ready" and waits for its input to close."""
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "ready\n"
            yield running
        finally:
            running.kill()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def accuracy_of(task: str, value: float) -> pd.DataFrame:
    return pd.DataFrame([{"task": task, "variant": "merged", "metric": "accuracy", "value": value}])
