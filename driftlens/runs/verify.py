"""Integrity of a run's files (`verify_files`) and equality of the tables of two runs (`compare_tables`)."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from driftlens.runs.manifest import ENTRIES, MANIFEST, manifest_is_intact, read_manifest, table_file
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES, ColumnSchema
from driftlens.runs.tables import stored_columns
from driftlens.runs.writer import is_unchanged_file, recover_manifest, run_files
from driftlens.utils.errors import pluralize


@dataclass(frozen=True)
class VerifyResult:
    """The files of a run that are missing, changed or unlisted compared with its manifest."""

    checked: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if all listed files exist and are unchanged."""
        return not self.missing and not self.changed


def verify_files(path: str | pathlib.Path) -> VerifyResult:
    """Compare the SHA-256 digests of a run's files with its manifest; logs and status are not checked."""
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    # A writer that died while replacing a file leaves either the old or the new one, complete.
    listed = recover_manifest(folder, manifest).files
    files = set(run_files(folder))
    present = sorted(files.intersection(listed))
    changed = [name for name in present if not is_unchanged_file(folder / name, listed[name])]
    if not manifest_is_intact(folder):
        changed.append(MANIFEST)
    # New files are listed when a run is finished; until then its own are expected.
    unlisted = [name for name in files - set(listed) if manifest.finished or name.split("/")[0] not in ENTRIES]
    return VerifyResult(
        checked=len(present) + 1,
        missing=tuple(sorted(set(listed) - files)),
        changed=tuple(changed),
        unlisted=tuple(sorted(unlisted)),
    )


# Relative difference that float32 may have on another processor.
TOLERANCE = 1e-5

_SKIPPED_TABLES = ("resources",)
# Measured time and memory, which differ between any two runs.
_SKIPPED_COLUMNS = ("seconds",)
# Units in which tiny numbers are rounding errors: 1e-9 and 2e-9 count as equal.
_AROUND_ONE = ("1", "nat", "of the target")


@dataclass
class TableDifference:
    """The differences between the tables of two runs.

    Attributes:
        tables: tables that were compared; those without rows in both runs are left out.
        largest: largest difference of a number, relative to the largest magnitude of its column, or to 1 if that is
            smaller and the column holds pure numbers or nats.
        where: column and row of that difference.
        unequal: differences that no tolerance covers: rows or values in one run only, different texts and counts.
        lacking: columns that only one run has, because an older schema wrote the other; they are not compared.
    """

    tables: list[str] = field(default_factory=list)
    num_values: int = 0
    bit_equal: bool = True
    largest: float = 0.0
    where: str = ""
    unequal: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def is_within(self, tolerance: float = TOLERANCE) -> bool:
        """Return True if the tables are equal up to a relative tolerance of numbers."""
        return not self.unequal and self.largest <= tolerance


def compare_tables(a: DriftRun, b: DriftRun) -> TableDifference:
    """Compare the tables of two runs; rows are matched by key."""
    result = TableDifference()
    for table in TABLES.values():
        if table.name in _SKIPPED_TABLES:
            continue
        # A run's tables are its methods.
        first, second = (getattr(run, table.name)().set_index(list(table.key)) for run in (a, b))
        if first.empty and second.empty:
            continue
        result.tables.append(table.name)
        for frame, other, which in ((first, second, "first"), (second, first, "second")):
            alone = frame.index.difference(other.index)
            if len(alone):
                rows = f"{pluralize(len(alone), 'row')} only in the {which} run ({_format_row_key(alone[0])})"
                result.unequal.append(f"{table.name}: {rows}")
        shared = first.index.intersection(second.index)
        first, second = first.reindex(shared), second.reindex(shared)
        files = [{*stored_columns(run.path / table_file(table.name), table)} for run in (a, b)]
        # A column that an older schema lacked is no difference between the results.
        lacking = {column.name for column in files[0] ^ files[1]} if all(files) else set()
        result.lacking += [f"{table.name}.{name}" for name in table.names if name in lacking]
        for column in table.columns:
            if column.name not in (*table.key, *_SKIPPED_COLUMNS, *lacking):
                label = f"{table.name}.{column.name}"
                _compare_columns(result, label, column, first[column.name], second[column.name])
    result.bit_equal = result.bit_equal and not result.unequal
    return result


def _compare_columns(
    equality: TableDifference, label: str, column: ColumnSchema, a: pd.Series[Any], b: pd.Series[Any]
) -> None:
    """Compare one column of two tables, and add the result to the difference."""
    equality.num_values += len(a)
    both = (a.notna() & b.notna()).to_numpy(dtype=bool)
    unequal = (a.isna() != b.isna()).to_numpy(dtype=bool, copy=True)
    if column.dtype != "float":
        unequal[both] = (a[both] != b[both]).to_numpy(dtype=bool)
    if num_unequal := int(unequal.sum()):
        place = _format_row_key(a.index[int(unequal.argmax())])
        verb = "differs" if num_unequal == 1 else "differ"
        equality.unequal.append(f"{label}: {pluralize(num_unequal, 'row')} {verb} ({place})")
    values_a, values_b = a[both].to_numpy(), b[both].to_numpy()
    differing = values_a != values_b
    if column.dtype != "float" or not differing.any():
        return
    equality.bit_equal = False
    magnitudes = np.abs(np.concatenate([values_a, values_b]))
    scale = magnitudes[np.isfinite(magnitudes)].max(initial=1.0 if column.unit in _AROUND_ONE else 0.0)
    # Nothing finite in the column: any difference is infinite.
    with np.errstate(invalid="ignore"):
        distance = np.where(differing, np.abs(values_a - values_b) / scale if scale else math.inf, 0.0)
    worst = int(distance.argmax())
    if distance[worst] > equality.largest:
        equality.largest = float(distance[worst])
        equality.where = f"{label}, {_format_row_key(a.index[both][worst])}"


def _format_row_key(key: object) -> str:
    return ", ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
