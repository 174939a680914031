"""How long a report takes: 8 tasks, 12 blocks, 256 samples, a fresh process per format, imports left out.

`python -m benchmarks.report` prints, for each format, the process's own seconds from opening the run to the last byte,
and those of the whole command.
"""

from __future__ import annotations

import pathlib
import resource
import subprocess
import sys
import tempfile

from tests.records.full_run import Size, write_full_run

FORMATS = ("json", "html", "html-light", "md", "csv", "latex")

_CHILD = """
import sys, time
import matplotlib.figure, plotly.graph_objects, plotly.subplots, pyarrow.parquet
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import charts
len(charts)
started = time.process_time()
Report(sys.argv[1]).files([sys.argv[2]])
print(time.process_time() - started)
"""


def main() -> None:
    """One line per format."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_full_run(
            pathlib.Path(folder) / "run", tasks=[f"task {at}" for at in range(8)], size=Size(12, 256, 32)
        )
        print("format      after imports   whole command   (seconds of processor time)")
        for name in FORMATS:
            command = [sys.executable, "-c", _CHILD, str(run), name]
            before = _spent()
            inside = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{name:12}{inside:13.2f}{_spent() - before:16.2f}", flush=True)


def _spent() -> float:
    """Processor seconds of all children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
