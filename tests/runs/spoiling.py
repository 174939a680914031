"""Putting another value into a table of a finished run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def spoil(run: Path, table: str, row: int, column: str, value: object) -> None:
    """Put another value into one cell of a table."""
    path = run / "tables" / f"{table}.parquet"
    stored = pq.read_table(path)
    at = stored.schema.get_field_index(column)
    values = stored[column].to_pylist()
    values[row] = value
    field = stored.schema.field(at)
    pq.write_table(stored.set_column(at, field, pa.array(values, field.type)), path)
