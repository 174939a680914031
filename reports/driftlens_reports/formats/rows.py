"""The numbers of a figure by column, as drawings need them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from driftlens_reports.content import Cell, Table


@dataclass(frozen=True)
class Rows:
    """Rows of a table with their values by column name."""

    entries: tuple[dict[str, Cell], ...]

    def distinct(self, column: str) -> list[str]:
        """The texts of a column, each once, in order."""
        return list(
            dict.fromkeys(str(entry[column]) for entry in self.entries if entry.get(column) is not None)
        )

    def where(self, column: str, value: str) -> Rows:
        """The rows whose column says `value`."""
        return Rows(tuple(entry for entry in self.entries if str(entry.get(column)) == value))

    def extremes(self, columns: Sequence[str]) -> tuple[float, float]:
        """Lowest and highest number of some columns; (0, 0) without any."""
        found = [
            value for entry in self.entries for name in columns if (value := number(entry, name)) is not None
        ]
        return (min(found), max(found)) if found else (0.0, 0.0)


def rows_of(table: Table) -> Rows:
    """The rows of a table."""
    names = [column.name for column in table.columns]
    return Rows(tuple(dict(zip(names, row, strict=True)) for row in table.rows))


def number(entry: dict[str, Cell], column: str) -> float | None:
    """A number of a row; None where there is none."""
    value = entry.get(column)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def layers_of(rows: Rows) -> list[int]:
    """The layers of the rows, in forward order."""
    return sorted({int(value) for entry in rows.entries if (value := number(entry, "layer")) is not None})
