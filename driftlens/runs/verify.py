"""Whether files of a run are those that were written, how equal two runs are; other names and places for runs."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from driftlens.runs.layout import ENTRIES, MANIFEST, table_file
from driftlens.runs.manifest import manifest_is_intact, read_manifest
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES, Column
from driftlens.runs.tables import stored_columns
from driftlens.runs.writer import is_as_described, run_files, settled
from driftlens.utils.errors import counted


@dataclass(frozen=True)
class VerifyResult:
    """What comparing a run's files with its manifest showed: how many were compared, which are not as written.

    Paths are relative to the run. The unlisted are of another program, or of an unfinished job on a finished run.
    """

    checked: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every listed file is there, unchanged."""
        return not self.missing and not self.changed


def verify(path: str | pathlib.Path) -> VerifyResult:
    """Rehash a run's files and compare them with its manifest; status, events, lock and logs are left out."""
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    # A writer that died while replacing a file leaves the old one or the new one, both whole.
    listed = settled(folder, manifest).files
    there = set(run_files(folder))
    present = sorted(there.intersection(listed))
    changed = [name for name in present if not is_as_described(folder / name, listed[name])]
    if not manifest_is_intact(folder):
        changed.append(MANIFEST)
    # Files are listed when a run is finished: until then its own are not there by mistake.
    unlisted = [at for at in there - set(listed) if manifest.finished or at.split("/")[0] not in ENTRIES]
    return VerifyResult(
        checked=len(present) + 1,
        missing=tuple(sorted(set(listed) - there)),
        changed=tuple(changed),
        unlisted=tuple(sorted(unlisted)),
    )


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
        lacking: columns that the files of one run alone hold, as the other's were written by an older schema; they are
            not compared.
    """

    tables: list[str] = field(default_factory=list)
    num_values: int = 0
    bit_equal: bool = True
    largest: float = 0.0
    where: str = ""
    unequal: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

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
        files = [stored_columns(run.path / table_file(table.name)) for run in (a, b)]
        lacking = {*files[0]} ^ {*files[1]} if all(files) else set()
        found.lacking += [f"{table.name}.{column.name}" for column in table.columns if column.name in lacking]
        for column in table.columns:
            if column.name not in (*table.key, *_SKIPPED_COLUMNS, *lacking):
                label = f"{table.name}.{column.name}"
                _compare(found, label, column, first[column.name], second[column.name])
    found.bit_equal = found.bit_equal and not found.unequal
    return found


def _compare(equality: Equality, label: str, column: Column, a: pd.Series[Any], b: pd.Series[Any]) -> None:
    """Add to `equality` how equal one column is, in rows of the same keys."""
    equality.num_values += len(a)
    unequal = (a.isna() != b.isna()).to_numpy(dtype=bool, copy=True)
    both = (a.notna() & b.notna()).to_numpy(dtype=bool)
    if column.dtype != "float":
        unequal[both] = (a[both] != b[both]).to_numpy(dtype=bool)
    if unequal.any():
        place = _row(a.index[int(unequal.argmax())])
        num_unequal = int(unequal.sum())
        verb = "differs" if num_unequal == 1 else "differ"
        equality.unequal.append(f"{label}: {counted(num_unequal, 'row')} {verb} ({place})")
    if column.dtype != "float":
        return
    first, second = a[both].to_numpy(dtype=float), b[both].to_numpy(dtype=float)
    differing = first != second
    if not differing.any():
        return
    equality.bit_equal = False
    magnitudes = np.abs(np.concatenate([first, second]))
    scale = magnitudes[np.isfinite(magnitudes)].max(initial=1.0 if column.unit in _AROUND_ONE else 0.0)
    with np.errstate(invalid="ignore"):  # nothing finite in the column: any difference is infinite
        distance = np.where(differing, np.abs(first - second) / scale if scale else math.inf, 0.0)
    worst = int(distance.argmax())
    if distance[worst] > equality.largest:
        equality.largest, equality.where = float(distance[worst]), f"{label}, {_row(a.index[both][worst])}"


def _row(key: object) -> str:
    return ", ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
