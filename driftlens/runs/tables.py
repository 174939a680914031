"""Run tables in pandas and Parquet; existing rows of a file keep their exact values."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from driftlens.runs.schema import SCHEMA_VERSION, TABLES, TableSchema, refuse_newer_schema
from driftlens.utils.errors import RunError
from driftlens.utils.files import atomic_path, regular_file
from driftlens.utils.registry import ColumnSchema

_FILE_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_NULLABLE = {pa.string(): pd.StringDtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
_VERSION_KEY = b"driftlens.schema_version"
# Marks columns that a diagnostic added to the schema, so that a reader without that diagnostic knows them.
_ADDED = b"driftlens.added"
# Spreadsheets run cells that begin with such a character; the text may come from an untrusted run.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
DAMAGED = "`driftlens check` on the run lists every file that is damaged."


def empty_frame(table: TableSchema) -> pd.DataFrame:
    """Return a frame without rows that has all columns of the table schema."""
    return _arrow_to_frame(_parquet_schema(table).empty_table(), table)


def conform_to_schema(frame: pd.DataFrame, table: TableSchema) -> pd.DataFrame:
    """Return the rows with all columns of the table schema, in its order and types; gaps are NaN or NA.

    Raises:
        ValueError: the rows don't fit the table, a mistake of the calling code.
    """
    return _arrow_to_frame(_frame_to_arrow(frame, table), table).set_axis(frame.index)


def stored_columns(path: pathlib.Path, table: TableSchema) -> list[ColumnSchema]:
    """Read the column schemas from the Parquet file of a table; empty without a file."""
    if not path.exists():
        return []
    with _open_parquet(path) as file:
        known = table.with_columns(_diagnostic_columns(file.schema_arrow))
        return [column for column in known.columns if column.name in file.schema_arrow.names]


def read_table(path: pathlib.Path, table: TableSchema) -> pd.DataFrame:
    """Read the Parquet file of a table as a frame; columns that an older schema lacks are null."""
    return _arrow_to_frame(_read_parquet(path, table), table)


def append_rows(path: pathlib.Path, table: TableSchema, frame: pd.DataFrame, *, replace: bool = False) -> None:
    """Append rows to the Parquet file of a table, atomically."""
    rows = appended_table(path, table, frame, replace=replace)
    with atomic_path(path) as written:
        pq.write_table(rows, written)


def appended_table(path: pathlib.Path, table: TableSchema, frame: pd.DataFrame, *, replace: bool = False) -> pa.Table:
    """Return the rows of a Parquet file followed by those of a frame; stored rows stay bit-identical.

    Args:
        path: the file.
        table: its declaration.
        frame: the new rows.
        replace: replace earlier rows that have the same key; otherwise such rows are a ValueError.
    """
    if not path.exists():
        return _frame_to_arrow(frame, table)
    # Earlier rows never pass through pandas, which might round or retype them.
    earlier = _read_parquet(path, table)
    table = table.with_columns(_diagnostic_columns(earlier.schema))
    rows = _frame_to_arrow(frame, table)
    for name in (name for name in frame.columns if name not in earlier.schema.names):
        field = rows.schema.field(name)
        earlier = earlier.append_column(field, pa.nulls(len(earlier), field.type))
    both = pa.concat_tables([earlier, rows])
    keys = both.group_by(list(table.key), use_threads=False).aggregate([])
    if len(keys) == len(both):
        return both
    clash = _key_index(earlier, table).isin(_key_index(rows, table))
    if clash.any() and not replace:
        key = _describe_first_key(earlier.filter(clash).to_pandas(), table)
        raise ValueError(f"table {table.name!r} already has the row {key}")
    return pa.concat_tables([earlier.filter(~clash), rows])


def updated_table(path: pathlib.Path, table: TableSchema, frame: pd.DataFrame) -> pa.Table:
    """Return the rows of a Parquet file with some cells set to new values; other cells stay bit-identical.

    Args:
        path: the file.
        table: its declaration.
        frame: key columns and the columns to set; a missing value changes nothing.
    """
    earlier = _read_parquet(path, table)
    table = table.with_columns(_diagnostic_columns(earlier.schema))
    rows = _frame_to_arrow(frame, table)
    places = _key_index(rows, table).get_indexer(_key_index(earlier, table))
    if (places >= 0).sum() != rows.num_rows:
        raise ValueError(f"table {table.name!r} lacks some of the {rows.num_rows} rows to fill")
    there = pa.array(places, mask=places < 0)
    for name in (name for name in frame.columns if name not in table.key):
        position = earlier.schema.get_field_index(name)
        values = pc.coalesce(rows[name].combine_chunks().take(there), earlier[name].combine_chunks())
        earlier = earlier.set_column(position, earlier.schema.field(position), values)
    return earlier


def table_without_rows(
    path: pathlib.Path, table: TableSchema, column: str, values: Collection[str]
) -> pa.Table | None:
    """Return a Parquet table without the rows whose `column` is in `values`; None if no row is removed."""
    if not path.exists():
        return None
    rows = _read_parquet(path, table)
    left = rows.filter(pc.invert(pc.is_in(rows[column], pa.array(list(values), pa.string()))))
    return left if left.num_rows < rows.num_rows else None


def _arrow_to_frame(stored: pa.Table, table: TableSchema) -> pd.DataFrame:
    frame: pd.DataFrame = stored.to_pandas(types_mapper=_NULLABLE.get)
    # Integers of a key are never null, so they need no nullable type.
    return frame.astype({name: np.int64 for name in table.key if table.column(name).dtype == "int"})


def _frame_to_arrow(frame: pd.DataFrame, table: TableSchema) -> pa.Table:
    """Convert a frame to an Arrow table of the schema; raise a ValueError if it does not fit."""
    unknown = [name for name in frame.columns if name not in table.names]
    if unknown:
        raise ValueError(f"table {table.name!r} has no column {unknown[0]!r}")
    schema, columns = _parquet_schema(table), []
    for column, field in zip(table.columns, schema, strict=True):
        try:
            cells = frame[column.name] if column.name in frame.columns else pd.Series(None, index=frame.index)
            columns.append(pa.array(cells, field.type, from_pandas=True))
        except pa.ArrowException as error:
            raise ValueError(f"column {column.name!r} holds {column.dtype}: {error}") from error
    rows = pa.Table.from_arrays(columns, schema=schema)
    for name in table.key:
        if rows[name].null_count:
            raise ValueError(f"rows for table {table.name!r} have a null in the key column {name!r}")
    keys = rows.select(list(table.key)).to_pandas()
    if keys.duplicated().any():
        key = _describe_first_key(keys[keys.duplicated()], table)
        raise ValueError(f"rows for table {table.name!r} repeat the key {key}")
    return rows


def _parquet_schema(table: TableSchema) -> pa.Schema:
    declared = TABLES.get(table.name, table).names
    fields = [
        pa.field(
            column.name,
            _FILE_TYPES[column.dtype],
            metadata={"unit": column.unit, "meaning": column.meaning}
            | ({} if column.name in declared else {_ADDED: _column_as_json(column)}),
        )
        for column in table.columns
    ]
    units = json.dumps({column.name: column.unit for column in table.columns})
    return pa.schema(
        fields,
        metadata={_VERSION_KEY: SCHEMA_VERSION, "driftlens.table": table.name, "driftlens.units": units},
    )


def _column_as_json(column: ColumnSchema) -> str:
    # Without the option, which readers of schema 1.0 don't know.
    return json.dumps({name: value for name, value in dataclasses.asdict(column).items() if name != "option"})


def _diagnostic_columns(schema: pa.Schema) -> list[ColumnSchema]:
    notes = [json.loads(field.metadata[_ADDED]) for field in schema if _ADDED in (field.metadata or {})]
    return [ColumnSchema(**{**column, "range": tuple(column["range"])}) for column in notes]


@contextlib.contextmanager
def _open_parquet(path: pathlib.Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; raise a `RunError` if it cannot be read."""
    try:
        with pq.ParquetFile(regular_file(path)) as file:
            yield file
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing", hint="Run the analysis again to write it.") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path} can't be read: {reason}", hint=DAMAGED) from error


def _read_parquet(path: pathlib.Path, table: TableSchema) -> pa.Table:
    with _open_parquet(path) as file:
        stored = file.read()
        # Reading doesn't decode text, so invalid text would fail much later.
        stored.validate(full=True)
    version = (stored.schema.metadata or {}).get(_VERSION_KEY, b"")
    refuse_newer_schema(version.decode(errors="replace"), path)
    return _convert_to_schema(stored, table.with_columns(_diagnostic_columns(stored.schema)), path)


def _convert_to_schema(stored: pa.Table, table: TableSchema, path: pathlib.Path) -> pa.Table:
    """Convert a stored table to the current schema: missing columns become null, unknown ones are dropped."""
    schema, names = _parquet_schema(table), {*stored.column_names}
    try:
        columns = [
            stored.column(field.name).cast(field.type)
            if field.name in names or field.name in table.key
            else pa.nulls(stored.num_rows, field.type)
            for field in schema
        ]
    except (KeyError, pa.ArrowException) as error:
        raise RunError(f"{path} is not the table {table.name!r}: {error}", hint=DAMAGED) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _key_index(rows: pa.Table, table: TableSchema) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows.select(list(table.key)).to_pandas())


def _describe_first_key(rows: pd.DataFrame, table: TableSchema) -> str:
    return ", ".join(f"{name}={rows[name].tolist()[0]!r}" for name in table.key)


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert a frame to one dict of JSON values per row; missing values become None."""
    columns = {str(name): [json_value(value) for value in frame[name]] for name in frame.columns}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def json_value(value: Any) -> Any:
    """Convert a cell to a JSON value; missing values, NaN and infinity become None."""
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    # JSON has neither NaN nor infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(data: pd.DataFrame) -> str:
    """Convert a frame to CSV with full precision; text that a spreadsheet would run as a formula is escaped."""
    shown = data.copy()
    for name in shown.columns:
        if not pd.api.types.is_numeric_dtype(shown[name]):
            shown[name] = shown[name].map(
                lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
            )
    return shown.to_csv(index=False, lineterminator="\n")
