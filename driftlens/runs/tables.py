"""Conversion of run tables between pandas and Parquet; existing rows of a file keep their exact values."""

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
from pandas.api.extensions import ExtensionDtype

from driftlens.runs.schema import SCHEMA_VERSION, TABLES, TableSchema, refuse_newer
from driftlens.utils.diagnostic import ColumnSchema, Kind
from driftlens.utils.errors import RunError
from driftlens.utils.files import atomic_path, plain_file

_FRAME_TYPES: dict[Kind, ExtensionDtype | np.dtype[Any]] = {
    "str": pd.StringDtype(),
    "int": pd.Int64Dtype(),
    "float": np.dtype(np.float64),
    "bool": pd.BooleanDtype(),
}
_FILE_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_NULLABLE = {_FILE_TYPES[kind]: _FRAME_TYPES[kind] for kind in ("str", "int", "bool")}
_VERSION_KEY = b"driftlens.schema_version"
# Marks columns that a diagnostic added to the schema, so that a reader without that diagnostic knows them.
_ADDED = b"driftlens.added"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
DAMAGED = "`driftlens check` on the run lists every file that is damaged."


def empty(table: TableSchema) -> pd.DataFrame:
    """Return a frame without rows that has every column of `table` in its type."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in _frame_types(table).items()})


def conform(frame: pd.DataFrame, table: TableSchema) -> pd.DataFrame:
    """Return the rows of `frame` with all columns of `table`, in order and in their types; gaps are NaN or NA.

    Raises:
        ValueError: the rows don't fit the table, a mistake of the calling code.
    """
    unknown = [name for name in frame.columns if name not in table.names]
    if unknown:
        raise ValueError(f"table {table.name!r} has no column {unknown[0]!r}")
    for name in table.key:
        if name not in frame.columns:
            raise ValueError(f"rows for table {table.name!r} lack the key column {name!r}")
        if frame[name].isna().any():
            raise ValueError(f"rows for table {table.name!r} have a null in the key column {name!r}")
    kinds = _frame_types(table)
    # Arrays, because pandas would compare the indexes of series.
    columns = {column.name: _cast(frame, column, kinds[column.name]) for column in table.columns}
    rows = pd.DataFrame(columns, index=frame.index)
    twice = rows.duplicated(list(table.key))
    if twice.any():
        raise ValueError(f"rows for table {table.name!r} repeat the key {_first_key(rows[twice], table)}")
    return rows


def stored_table(path: pathlib.Path, table: TableSchema) -> TableSchema:
    """Return the declaration of `table`, extended by the columns that diagnostics added to the file."""
    if not path.exists():
        return table
    with _opened(path) as file:
        return table.extended(_added(file.schema_arrow))


def stored_columns(path: pathlib.Path) -> list[str]:
    """Return the columns of a table's file, in order; none without a file."""
    if not path.exists():
        return []
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def read_table(path: pathlib.Path, table: TableSchema) -> pd.DataFrame:
    """Return a Parquet file as a frame; columns that an older schema lacks are null, those of diagnostics come last."""
    stored = _read(path, table)
    frame: pd.DataFrame = stored.to_pandas(types_mapper=_NULLABLE.get)
    kinds, is_already = _frame_types(table.extended(_added(stored.schema))), frame.dtypes
    return frame.astype({name: kind for name, kind in kinds.items() if is_already[name] != kind})


def append_rows(
    path: pathlib.Path, table: TableSchema, frame: pd.DataFrame, *, replace: bool = False
) -> None:
    """Replace a Parquet file by the rows of `appended`, atomically."""
    rows = appended(path, table, frame, replace=replace)
    with atomic_path(path) as written:
        pq.write_table(rows, written)


def appended(
    path: pathlib.Path, table: TableSchema, frame: pd.DataFrame, *, replace: bool = False
) -> pa.Table:
    """Return the rows of a Parquet file, if it exists, and those of a frame; earlier rows stay bit-identical.

    Args:
        path: the file.
        table: its declaration.
        frame: the new rows.
        replace: replace earlier rows that have the same key; otherwise such rows are a ValueError.
    """
    if not path.exists():
        return _as_stored(frame, table)
    # Earlier rows never pass through pandas, which might round or retype them.
    earlier = _read(path, table)
    table = table.extended(_added(earlier.schema))
    rows = _as_stored(frame, table)
    for name in (name for name in frame.columns if name not in earlier.schema.names):
        field = rows.schema.field(name)
        earlier = earlier.append_column(field, pa.nulls(len(earlier), field.type))
    both = pa.concat_tables([earlier, rows])
    keys = both.group_by(list(table.key), use_threads=False).aggregate([])
    if len(keys) == len(both):
        return both
    clash = _keys(earlier, table).isin(_keys(rows, table))
    if clash.any() and not replace:
        key = _first_key(earlier.filter(clash).to_pandas(), table)
        raise ValueError(f"table {table.name!r} already has the row {key}")
    return pa.concat_tables([earlier.filter(~clash), rows])


def filled(path: pathlib.Path, table: TableSchema, frame: pd.DataFrame) -> pa.Table:
    """Return the rows of a Parquet file with new values in some cells; all others stay bit-identical.

    Args:
        path: the file.
        table: its declaration.
        frame: key columns and the columns to set; a missing value changes nothing.
    """
    earlier = _read(path, table)
    table = table.extended(_added(earlier.schema))
    rows = _as_stored(frame, table)
    places = _keys(rows, table).get_indexer(_keys(earlier, table))
    if (places >= 0).sum() != rows.num_rows:
        raise ValueError(f"table {table.name!r} lacks some of the {rows.num_rows} rows to fill")
    there = pa.array(places, mask=places < 0)
    for name in (name for name in frame.columns if name not in table.key):
        position = earlier.schema.get_field_index(name)
        values = pc.coalesce(rows[name].combine_chunks().take(there), earlier[name].combine_chunks())
        earlier = earlier.set_column(position, earlier.schema.field(position), values)
    return earlier


def without(path: pathlib.Path, table: TableSchema, column: str, values: Collection[str]) -> pa.Table | None:
    """Return the rows of a Parquet file whose text `column` has none of `values`; None if that is all of them."""
    if not path.exists():
        return None
    rows = _read(path, table)
    left = rows.filter(pc.invert(pc.is_in(rows[column], pa.array(list(values), pa.string()))))
    return left if left.num_rows < rows.num_rows else None


def _as_stored(frame: pd.DataFrame, table: TableSchema) -> pa.Table:
    schema, rows = _file_schema(table), conform(frame, table)
    columns = [pa.array(rows[field.name].array, field.type, from_pandas=True) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _frame_types(table: TableSchema) -> dict[str, ExtensionDtype | np.dtype[Any]]:
    # Integers of a key are never null, so they need no nullable type.
    return {
        column.name: np.dtype(np.int64)
        if column.dtype == "int" and column.name in table.key
        else _FRAME_TYPES[column.dtype]
        for column in table.columns
    }


def _cast(frame: pd.DataFrame, column: ColumnSchema, kind: ExtensionDtype | np.dtype[Any]) -> Any:
    if column.name not in frame.columns:
        return pd.Series(None, index=frame.index, dtype=kind).array
    values = frame[column.name]
    if values.dtype == kind:
        return values.array
    expected = f"column {column.name!r} holds {column.dtype}"
    if column.dtype == "str":
        # Pandas would convert a number to text here, and the row could not be found by its key any more.
        odd = [value for value in values.dropna() if not isinstance(value, str)]
        if odd:
            raise ValueError(f"{expected}, got {odd[0]!r}")
    try:
        return values.astype(kind).array
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}: {error}") from error


def _file_schema(table: TableSchema) -> pa.Schema:
    declared = TABLES.get(table.name, table).names
    fields = [
        pa.field(
            column.name,
            _FILE_TYPES[column.dtype],
            metadata={"unit": column.unit, "meaning": column.meaning}
            | ({} if column.name in declared else {_ADDED: _declaration(column)}),
        )
        for column in table.columns
    ]
    units = json.dumps({column.name: column.unit for column in table.columns})
    return pa.schema(
        fields,
        metadata={_VERSION_KEY: SCHEMA_VERSION, "driftlens.table": table.name, "driftlens.units": units},
    )


def _declaration(column: ColumnSchema) -> str:
    """Return a column's declaration as JSON."""
    # Without the option, which readers of schema 1.0 don't know.
    return json.dumps({name: value for name, value in dataclasses.asdict(column).items() if name != "option"})


def _added(schema: pa.Schema) -> list[ColumnSchema]:
    """Return the columns that diagnostics added to a file, in order."""
    notes = [json.loads(field.metadata[_ADDED]) for field in schema if _ADDED in (field.metadata or {})]
    return [ColumnSchema(**{**column, "range": tuple(column["range"])}) for column in notes]


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; raise a RunError if it can't be read."""
    try:
        with pq.ParquetFile(plain_file(path)) as file:
            yield file
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing", hint="Run the analysis again to write it.") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path} can't be read: {reason}", hint=DAMAGED) from error


def _read(path: pathlib.Path, table: TableSchema) -> pa.Table:
    with _opened(path) as file:
        stored = file.read()
        # Reading doesn't decode text, so invalid text would fail much later.
        stored.validate(full=True)
    version = (stored.schema.metadata or {}).get(_VERSION_KEY, b"")
    refuse_newer(version.decode(errors="replace"), path)
    return _in_schema(stored, table.extended(_added(stored.schema)), path)


def _in_schema(stored: pa.Table, table: TableSchema, path: pathlib.Path) -> pa.Table:
    """Return the columns of `table`; those that `stored` lacks are null, those of a newer minor version are dropped."""
    schema, names = _file_schema(table), {*stored.column_names}
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


def _keys(rows: pa.Table, table: TableSchema) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows.select(list(table.key)).to_pandas())


def _first_key(rows: pd.DataFrame, table: TableSchema) -> str:
    return ", ".join(f"{name}={rows[name].tolist()[0]!r}" for name in table.key)


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one dict per row with numbers, text, booleans and None; missing values are None, never NaN."""
    columns = {str(name): [plain(value) for value in frame[name]] for name in frame.columns}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def plain(value: Any) -> Any:
    """Return a value as JSON represents it; missing values and numbers that are not finite are None."""
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    # JSON has neither NaN nor infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(data: pd.DataFrame) -> str:
    """Return the rows as CSV with every digit; text that a spreadsheet would run as a formula is quoted."""
    # Cells that begin with such a character are run as formulas, and may come from an untrusted run.
    shown = data.copy()
    for name in shown.columns:
        if not pd.api.types.is_numeric_dtype(shown[name]):
            shown[name] = shown[name].map(
                lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
            )
    return shown.to_csv(index=False, lineterminator="\n")
