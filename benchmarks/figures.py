"""Figures of benchmarks. Entry points: `record` for one measured figure, `read_figures` for all stored ones.

The stored figures are in `figures.csv`, one row each; `python -m benchmarks.table` writes docs/benchmarks.md from them.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from driftlens.utils.devices import device_name, resolve_device
from driftlens.utils.files import atomic_path

FILE = Path(__file__).with_name("figures.csv")


@dataclass(frozen=True)
class Figure:
    """One measured figure and the circumstances of its measurement.

    Attributes:
        benchmark: module that measures it, such as `memory`.
        figure: name of the figure, with the size of the case; unique within the benchmark.
        value: the number with its unit and, where there is one, its interval.
        target: required value, such as "at most 15"; empty without one.
        date: day of the measurement; for rows without `torch`, day of the commit that first stated the value.
        commit: the measured version; for rows without `torch`, the commit that first stated the value.
        machine: processor and number of cores, or name of the accelerator.
        torch: version of torch; empty where it was not noted.
    """

    benchmark: str
    figure: str
    value: str
    target: str
    date: str
    commit: str
    machine: str
    torch: str


def record(benchmark: str, figure: str, value: str, target: str = "", *, device: str = "cpu") -> None:
    """Print a measured figure, and with DRIFTLENS_RECORD=1 store it in place of the earlier one of this name.

    Args:
        benchmark: module that measures it, such as `memory`.
        figure: name of the figure, with the size of the case; unique within the benchmark.
        value: the number with its unit and, where there is one, its interval.
        target: required value, such as "at most 15".
        device: where it was measured.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=FILE.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    new = Figure(benchmark, figure, value, target, today, commit, machine(device), torch.__version__)
    wanted = f" (target: {target})" if target else ""
    print(f"{benchmark}: {figure}: {value}{wanted} [{new.machine}, torch {new.torch}]", flush=True)
    if os.environ.get("DRIFTLENS_RECORD") == "1":
        rows = {(old.benchmark, old.figure): old for old in read_figures()}
        rows[benchmark, figure] = new
        write_figures(list(rows.values()))


def machine(device: str) -> str:
    """Return the name of an accelerator, or the processor's name and the number of its cores."""
    resolved = resolve_device(device)
    if resolved.type != "cpu":
        return device_name(resolved)
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return f"{named[1].strip() if named else platform.machine()}, {os.cpu_count()} cores"


def read_figures() -> list[Figure]:
    """Read the stored figures, in their order in the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Figure(**row) for row in csv.DictReader(file)]


def write_figures(figures: list[Figure]) -> None:
    """Replace the stored figures, with the rows of each benchmark together."""
    with atomic_path(FILE) as written, written.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Figure)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(figure) for figure in sorted(figures, key=lambda figure: figure.benchmark))
