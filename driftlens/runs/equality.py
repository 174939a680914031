"""How equal two runs are, number by number: what a repetition on the same or another machine must show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from driftlens.base.words import counted
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES, Column

TOLERANCE = 1e-5
"""What the same computation may differ by on another processor, in float32."""

_SKIPPED_TABLES = ("resources",)
_SKIPPED_COLUMNS = ("seconds",)
"""Measured time and memory: they differ between any two runs."""
_AROUND_ONE = ("1", "nat", "of the target")
"""Units in which a tiny number is rounding: 1e-9 against 2e-9 is no difference of a half."""


@dataclass
class Equality:
    """How far the tables of two runs are from one another.

    Attributes:
        tables: those that were compared; a table that neither run has rows of is none of them.
        largest: the largest difference of a number, against the largest magnitude of its column; against 1 where
            that is smaller and the column holds pure numbers or nats, such as cosines, errors and losses.
        where: the column and row it is found at.
        unequal: what no tolerance covers: rows only one run has, values only one has, texts and counts that differ.
    """

    tables: list[str] = field(default_factory=list)
    num_values: int = 0
    bit_equal: bool = True
    largest: float = 0.0
    where: str = ""
    unequal: list[str] = field(default_factory=list)

    def within(self, tolerance: float = TOLERANCE) -> bool:
        """Whether the runs are equal, numbers up to `tolerance`."""
        return not self.unequal and self.largest <= tolerance


def equality(a: DriftRun, b: DriftRun) -> Equality:
    """How equal two runs are. Rows meet by key; their order in the files does not matter."""
    found = Equality()
    for table in TABLES.values():
        if table.name in _SKIPPED_TABLES:
            continue
        # A run's tables are its methods.
        first, second = (getattr(run, table.name)().set_index(list(table.key)) for run in (a, b))
        if first.empty and second.empty:
            continue
        found.tables.append(table.name)
        if not first.index.equals(second.index):  # otherwise spare large tables the matching
            for frame, other, which in ((first, second, "first"), (second, first, "second")):
                alone = frame.index.difference(other.index)
                if len(alone):
                    what = f"{counted(len(alone), 'row')} only in the {which} run ({_row(alone[0])})"
                    found.unequal.append(f"{table.name}: {what}")
            shared = first.index.intersection(second.index)
            first, second = first.reindex(shared), second.reindex(shared)
        for column in table.columns:
            if column.name not in (*table.key, *_SKIPPED_COLUMNS):
                label = f"{table.name}.{column.name}"
                _compare(found, label, column, first[column.name], second[column.name])
    found.bit_equal = found.bit_equal and not found.unequal
    return found


def _compare(found: Equality, label: str, column: Column, a: pd.Series[Any], b: pd.Series[Any]) -> None:
    """Add to `found` how equal one column is, in rows of the same keys."""
    found.num_values += len(a)
    unequal = (a.isna() != b.isna()).to_numpy(dtype=bool, copy=True)
    both = (a.notna() & b.notna()).to_numpy(dtype=bool)
    if column.dtype != "float":
        unequal[both] = (a[both] != b[both]).to_numpy(dtype=bool)
    if unequal.any():
        place = _row(a.index[int(unequal.argmax())])
        num_unequal = int(unequal.sum())
        verb = "differs" if num_unequal == 1 else "differ"
        found.unequal.append(f"{label}: {counted(num_unequal, 'row')} {verb} ({place})")
    if column.dtype != "float":
        return
    first, second = a[both].to_numpy(dtype=float), b[both].to_numpy(dtype=float)
    differing = first != second
    if not differing.any():
        return
    found.bit_equal = False
    magnitudes = np.abs(np.concatenate([first, second]))
    scale = magnitudes[np.isfinite(magnitudes)].max(initial=1.0 if column.unit in _AROUND_ONE else 0.0)
    with np.errstate(invalid="ignore"):  # nothing finite in the column: any difference is infinite
        distance = np.where(differing, np.abs(first - second) / scale if scale else math.inf, 0.0)
    at = int(distance.argmax())
    if distance[at] > found.largest:
        found.largest, found.where = float(distance[at]), f"{label}, {_row(a.index[both][at])}"


def _row(key: object) -> str:
    return ", ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
