"""The rows that a check is about, in groups, and what of them is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from driftlens.errors import LayerNotFoundError
from driftlens.records.compare import drift_changes
from driftlens.records.run import DriftRun
from driftlens.records.schema import TABLES
from driftlens.variants import calibrated

CHECKED_TABLES = ("layers", "outputs", "accuracy", "params", "calibration")

_GAPS_BY = {"layers": "layer", "calibration": "kind"}
"""A column that is empty for a whole layer (amplification at the stem) or kind of solve does not exist there."""


@dataclass(frozen=True)
class Selection:
    """One group of rows.

    Attributes:
        group: what they share, by the columns a check groups by.
        rows: one row each, the metric in the column `value`, NaN where it was not measured; of a change of mean drift,
            `low` and `high` are the ends of its 95 % interval.
        shown: columns that tell the rows apart.
        lacking: what is missing of the group, in words; empty where all is there.
    """

    group: Mapping[str, str | int]
    rows: pd.DataFrame
    shown: Sequence[str]
    lacking: str

    def row_name(self, position: int) -> str:
        """A name for the row at `position`."""
        return row_name(self.rows.iloc[position], self.shown)


@dataclass(frozen=True)
class Absent:
    """There are no such rows, and why."""

    reason: str


def select(
    run: DriftRun,
    table: str,
    metric: str,
    where: Mapping[str, str | int],
    per: Sequence[str],
    change: tuple[str, str] | None,
) -> list[Selection] | Absent:
    """The groups of rows that a check is about. Arguments as the attributes of `Check`.

    Raises:
        RunError: the table can't be read.
    """
    rows = _table(run, table)
    if rows.empty:
        return Absent(f"the run has no rows in its table {table!r}")
    rows = rows.assign(value=rows[metric].astype("Float64").astype("float64"))
    if rows["value"].isna().all():
        return Absent(f"{metric} was not measured")
    if table in _GAPS_BY:
        rows = rows[rows["value"].groupby(rows[_GAPS_BY[table]]).transform("count") > 0]
    wanted = dict(where)
    if table == "params" and not {"scope", "path"} & set(wanted):
        wanted["scope"] = "backbone"  # modules, layers and the whole would otherwise be one heap
    try:
        if "layer" in wanted:
            wanted["layer"] = run.layer_index(wanted["layer"])
    except LayerNotFoundError as error:
        return Absent(error.message)
    for column, value in wanted.items():
        rows = rows[(rows[column] == value).fillna(False).to_numpy(dtype=bool)]
        if rows.empty:
            return Absent(_no_row(run, table, metric, column, value))
    key = [column for column in TABLES[table].key if column in rows]
    if change is not None:
        for variant in change:
            if not (rows["variant"] == variant).any():
                return Absent(_no_row(run, table, metric, "variant", variant))
        key = [column for column in key if column not in ("variant", "name")]
        rows = _changes(rows, key, *change)
        if table == "layers" and metric == "drift_l2_mean":
            rows = _with_intervals(rows, run, change)
    shown = [column for column in key if column not in wanted and column not in per]
    tasks = [task for task in run.tasks if wanted.get("task", task) == task] if "task" in key else []
    return list(_groups(rows, per, shown, tasks))


def _table(run: DriftRun, table: str) -> pd.DataFrame:
    rows: pd.DataFrame = getattr(run, table)()  # a run's tables are its methods
    return rows.assign(variant=rows["name"].map(calibrated)) if table == "calibration" else rows


def _no_row(run: DriftRun, table: str, metric: str, column: str, value: object) -> str:
    known = {"task": run.tasks, "variant": run.variants}.get(column, ())
    if known and value not in known and value != "expert":
        return f"the run has no {column} {value!r}; it has {', '.join(known)}"
    return f"{metric} was not measured where {column} is {value}"


def _changes(rows: pd.DataFrame, key: list[str], start: str, end: str) -> pd.DataFrame:
    """Relative change of each row from one variant to another; NaN where one lacks the row, or starts from 0."""
    sides = [rows[rows["variant"] == variant].set_index(key)["value"] for variant in (start, end)]
    both = pd.concat(sides, axis=1, keys=["start", "end"])
    size = both["start"].abs()
    change = (both["end"] - both["start"]) / size.where(size > 0)
    return change.rename("value").reset_index()


def _with_intervals(rows: pd.DataFrame, run: DriftRun, change: tuple[str, str]) -> pd.DataFrame:
    found = {task: drift_changes(run, run, task, change) for task in rows["task"].unique()}
    changes = [found[task].get(layer) for task, layer in zip(rows["task"], rows["layer"], strict=True)]
    ends = [(at.relative.low, at.relative.high) if at else (np.nan, np.nan) for at in changes]
    return rows.assign(low=[low for low, _ in ends], high=[high for _, high in ends])


def _groups(
    rows: pd.DataFrame, per: Sequence[str], shown: Sequence[str], tasks: Sequence[str]
) -> Iterator[Selection]:
    absent = [task for task in tasks if not (rows["task"] == task).any()]
    for group, part in _parts(rows, per):
        yield Selection(group, part, shown, _lacking(part, shown, [] if "task" in group else absent))
    for task in absent if "task" in per else ():
        yield Selection({"task": task}, rows.iloc[:0], shown, "not measured on this task")


def _parts(rows: pd.DataFrame, per: Sequence[str]) -> Iterator[tuple[dict[str, str | int], pd.DataFrame]]:
    if not per:
        yield {}, rows
        return
    for values, part in rows.groupby(list(per), sort=False):
        yield {column: _plain(value) for column, value in zip(per, values, strict=True)}, part


def _plain(value: object) -> str | int:
    return value if isinstance(value, str) else int(value)  # type: ignore[call-overload]


def _lacking(rows: pd.DataFrame, shown: Sequence[str], absent_tasks: Sequence[str]) -> str:
    if absent_tasks:
        return f"not measured on {', '.join(absent_tasks)}"
    missing = rows[rows["value"].isna()]
    if missing.empty:
        return ""
    first = row_name(missing.iloc[0], shown)
    return f"{len(missing)} of {len(rows)} rows were not measured" + (f", first {first}" if first else "")


def row_name(row: pd.Series[Any], columns: Sequence[str]) -> str:
    """A row in words, by what tells it apart."""
    return ", ".join(f"{column} {row[column]}" for column in columns if row[column] != "")
