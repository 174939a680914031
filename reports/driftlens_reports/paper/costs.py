"""Time, energy and memory in tables: the same columns, units and protocols wherever they are shown."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from driftlens_reports.paper.grid import Cell

TIME, ENERGY, MEMORY = "Time (s)", "GPU energy (Wh)", "CPU RSS (GiB)"

PAPER_PROTOCOL = (
    "Paper: one A800-80GB GPU, batch size 16, 8 workers, 1000 steps of the iterative methods, final evaluation "
    "excluded, resident memory of the process tree. Other hardware, so times must not be compared across sources."
)

_GIB = 2.0**30


def cost_cells(seconds: Any, energy_wh: Any, peak_rss_bytes: Any) -> dict[str, Cell]:
    """The three cells of a line, by column; null becomes NaN, never 0."""
    return {
        TIME: Cell(_number(seconds)),
        ENERGY: Cell(_number(energy_wh)),
        MEMORY: Cell(_number(peak_rss_bytes) / _GIB),
    }


def _number(value: Any) -> float:
    return math.nan if pd.isna(value) else float(value)
