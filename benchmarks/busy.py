"""What an analysis and a calibration of the embedded suite's models take beside a busy process, on two cores."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.timing import seconds_of
from driftlens.demo import spec_file

CORES = 2
WANTED = 2.5


def run(device: str) -> str:
    """Seconds of both commands idle and beside one busy process; both share the same two cores."""
    del device
    with tempfile.TemporaryDirectory() as scratch, _few_cores():
        folder = pathlib.Path(scratch)
        spec = spec_file("image")
        found = {}
        for name, busy in {"idle": 0, "busy": 1}.items():
            out = str(folder / name)
            with beside(busy):
                found[name] = [
                    seconds_of(lambda place=out: _driftlens("analyze", str(spec), "--out", place)),
                    seconds_of(lambda place=out: _driftlens("calibrate", place, "--name", "featcal")),
                ]
    ratios = [
        f"{what} {idle:.1f} s idle, {busy:.1f} s busy, ratio {busy / idle:.2f}"
        for what, idle, busy in zip(("analysis", "calibration"), found["idle"], found["busy"], strict=True)
    ]
    return f"beside one busy process on {CORES} cores: {'; '.join(ratios)} (wanted: at most {WANTED})"


@contextlib.contextmanager
def _few_cores() -> Iterator[None]:
    """This process and those it starts on two cores, where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def beside(busy: int) -> Iterator[None]:
    """A block beside so many processes that do nothing but compute."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def _driftlens(*arguments: str) -> None:
    """One command with the threads that it settles on by itself."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    command = [sys.executable, "-m", "driftlens", *arguments]
    subprocess.run(command, check=True, capture_output=True, env=variables)
