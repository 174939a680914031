"""Wall time of short commands: `--help`, `show`, and a refusal of a path that doesn't exist."""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.figures import record
from tests.runs.full_run import Size, write_full_run

ROUNDS = 11
SIZE = Size(12, 256, 32)


def run(device: str) -> None:
    """Record the median of some runs, taken in turns; `device` makes no difference."""
    del device
    with tempfile.TemporaryDirectory() as folder:
        saved = write_full_run(pathlib.Path(folder) / "run", tasks=[f"task {at}" for at in range(8)], size=SIZE)
        commands = {
            "--help": (["--help"], 0, "at most 0.25 s"),
            "show": (["show", str(saved)], 0, "at most 0.9 s"),
            "refusal of a wrong path": (["analyze", f"{folder}/none.yaml"], 2, "at most 1.0 s"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(ROUNDS + 1):
            for name, (words, code, _) in commands.items():
                spent = _seconds(words, code)
                if turn:  # the first run reads files into memory
                    seconds[name].append(spent)
        for name, (_, _, target) in commands.items():
            record("commands", f"wall time of {name}", f"{statistics.median(seconds[name]):.2f} s", target)


def _seconds(words: list[str], code: int) -> float:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "driftlens", *words], capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return time.perf_counter() - started
