"""Duration of a report: 8 tasks, 12 blocks, 256 samples."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

from benchmarks.figures import record
from benchmarks.timing import seconds_of
from tests.runs.full_run import Size, write_full_run

TASKS, SIZE = 8, Size(12, 256, 32)
WANTED = {"json": (2, 5), "html": (5, 8)}
"""Seconds for each format: in process after imports, and of the whole command."""

_INSIDE = """
import sys, time
import matplotlib.figure, plotly.graph_objects, plotly.subplots, pyarrow.parquet, scipy.special
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import charts
len(charts)
started = time.perf_counter()
Report(sys.argv[1]).files([sys.argv[2]])
print(time.perf_counter() - started)
"""


def run(device: str) -> None:
    """Record the seconds of a JSON and of an HTML report; `device` makes no difference."""
    del device
    with tempfile.TemporaryDirectory() as folder:
        tasks = [f"task {at}" for at in range(TASKS)]
        saved = write_full_run(pathlib.Path(folder) / "run", tasks=tasks, size=SIZE)
        for name in WANTED:
            _measure(saved, name)


def _measure(saved: pathlib.Path, name: str) -> None:
    inside = float(_output([sys.executable, "-c", _INSIDE, str(saved), name]))
    command = [sys.executable, "-m", "driftlens", "report", str(saved), "--format", name]
    whole = seconds_of(lambda: _output(command))
    figure = f"{name.upper()} report after imports; as a whole command"
    record("report", figure, f"{inside:.1f} s; {whole:.1f} s", "{} s; {} s".format(*WANTED[name]))


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
