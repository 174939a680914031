"""How equal two runs are, number by number: what a repetition on the same or another machine must show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.records.schema import TABLES, Column, Table

TOLERANCE = 1e-5
"""What the same computation may differ by on another processor, in float32."""

_SKIPPED_TABLES = ("resources",)
_SKIPPED_COLUMNS = ("seconds",)
"""Measured time and memory: they differ between any two runs."""
_AROUND_ONE = ("1", "nat", "of the target")
"""Units in which a tiny number is rounding: 1e-9 against 2e-9 is no difference of a half."""


@dataclass(frozen=True)
class Equality:
    """How far the tables of two runs are from one another.

    Attributes:
        tables: those that were compared; a table that neither run has rows of is none of them.
        num_values: how many values were compared.
        bit_equal: whether every value of every row is the same, to the last bit.
        largest: the largest difference of a number, against the largest magnitude of its column; against 1 where
            that is smaller and the column holds pure numbers or nats, such as cosines, errors and losses.
        where: the column and row it is found at; empty where all numbers are equal.
        unequal: what no tolerance covers: rows only one run has, values only one has, texts and counts that differ.
    """

    tables: tuple[str, ...]
    num_values: int
    bit_equal: bool
    largest: float
    where: str
    unequal: tuple[str, ...]

    def within(self, tolerance: float = TOLERANCE) -> bool:
        """Whether the runs are equal, numbers up to `tolerance`."""
        return not self.unequal and self.largest <= tolerance


def equality(a: DriftRun, b: DriftRun) -> Equality:
    """How equal two runs are. Rows meet by key; their order in the files does not matter.

    Raises:
        RunError: a table can't be read.
    """
    findings = [_compared(table, a, b) for table in TABLES.values() if table.name not in _SKIPPED_TABLES]
    findings = [finding for finding in findings if finding.num_values or finding.unequal]
    worst = max(findings, key=lambda finding: finding.largest, default=_Finding(""))
    unequal = tuple(text for finding in findings for text in finding.unequal)
    return Equality(
        tables=tuple(finding.table for finding in findings),
        num_values=sum(finding.num_values for finding in findings),
        bit_equal=not unequal and all(finding.bit_equal for finding in findings),
        largest=worst.largest,
        where=worst.where,
        unequal=unequal,
    )


@dataclass
class _Finding:
    """What comparing one table showed."""

    table: str
    num_values: int = 0
    bit_equal: bool = True
    largest: float = 0.0
    where: str = ""
    unequal: list[str] = field(default_factory=list)


def _compared(table: Table, a: DriftRun, b: DriftRun) -> _Finding:
    finding = _Finding(table.name)
    # A run's tables are its methods.
    first, second = (getattr(run, table.name)().set_index(list(table.key)) for run in (a, b))
    if not first.index.equals(second.index):  # otherwise spare large tables the matching
        for frame, other, which in ((first, second, "first"), (second, first, "second")):
            alone = frame.index.difference(other.index)
            if len(alone):
                found = f"{len(alone)} rows only in the {which} run ({_row(alone[0])})"
                finding.unequal.append(f"{table.name}: {found}")
        shared = first.index.intersection(second.index)
        first, second = first.reindex(shared), second.reindex(shared)
    for column in _compared_columns(table):
        _compare_column(finding, column, first[column.name], second[column.name])
    return finding


def _compared_columns(table: Table) -> Iterator[Column]:
    for column in table.columns:
        if column.name not in table.key and column.name not in _SKIPPED_COLUMNS:
            yield column


def _compare_column(finding: _Finding, column: Column, a: pd.Series[Any], b: pd.Series[Any]) -> None:
    finding.num_values += len(a)
    one_sided = (a.isna() != b.isna()).to_numpy(dtype=bool)
    both = (a.notna() & b.notna()).to_numpy(dtype=bool)
    unequal = one_sided.copy()
    if column.dtype == "float":
        _compare_numbers(finding, column, a[both], b[both])
    else:
        unequal[both] = (a[both] != b[both]).to_numpy(dtype=bool)
    if unequal.any():
        place = _row(a.index[int(unequal.argmax())])
        finding.unequal.append(f"{finding.table}.{column.name}: {int(unequal.sum())} rows differ ({place})")


def _compare_numbers(finding: _Finding, column: Column, a: pd.Series[Any], b: pd.Series[Any]) -> None:
    first, second = a.to_numpy(dtype=float), b.to_numpy(dtype=float)
    differing = first != second
    if not differing.any():
        return
    finding.bit_equal = False
    magnitudes = np.abs(np.concatenate([first, second]))
    scale = magnitudes[np.isfinite(magnitudes)].max(initial=1.0 if column.unit in _AROUND_ONE else 0.0)
    with np.errstate(invalid="ignore"):  # nothing finite in the column: any difference is infinite
        distance = np.where(differing, np.abs(first - second) / scale if scale else math.inf, 0.0)
    at = int(distance.argmax())
    if distance[at] > finding.largest:
        finding.largest, finding.where = (
            float(distance[at]),
            f"{finding.table}.{column.name}, {_row(a.index[at])}",
        )


def _row(key: object) -> str:
    return ", ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
