"""Tables as frames and as Parquet files: rows are added, rows that are there keep their exact values."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pandas.api.extensions import ExtensionDtype

from driftlens.runs.schema import SCHEMA_VERSION, TABLES, Table, refuse_newer
from driftlens.utils.diagnostic import Column, Kind
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
_ADDED = b"driftlens.added"
"""Marks columns that a diagnostic added beyond the schema: a reader without that diagnostic knows them by the file."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
DAMAGED = "`driftlens check` on the run lists every file that is damaged."


def empty(table: Table) -> pd.DataFrame:
    """A frame without rows, with every column of `table` in its type."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in _frame_types(table).items()})


def conform(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """The rows of `frame` as `table` wants them: all columns, in order, in their types, missing values NaN or NA.

    What doesn't fit is a mistake of the calling code, not of a user: a ValueError.
    """
    unknown = [name for name in frame.columns if name not in table.names]
    if unknown:
        raise ValueError(
            f"table {table.name!r} has no column {unknown[0]!r}; it has {', '.join(table.names)}"
        )
    for name in table.key:
        if name not in frame.columns:
            raise ValueError(f"rows for table {table.name!r} lack the key column {name!r}")
        if frame[name].isna().any():
            raise ValueError(f"rows for table {table.name!r} have a null in the key column {name!r}")
    kinds = _frame_types(table)
    # Arrays: of series pandas would compare the index of every one with that of all others.
    columns = {column.name: _cast(frame, column, kinds[column.name]) for column in table.columns}
    rows = pd.DataFrame(columns, index=frame.index)
    twice = rows.duplicated(list(table.key))
    if twice.any():
        raise ValueError(f"rows for table {table.name!r} repeat the key {_first_key(rows[twice], table)}")
    return rows


def stored_table(path: pathlib.Path, table: Table) -> Table:
    """The declaration of `table` with the columns behind it that diagnostics added to the file, if there is one."""
    return table.extended(_added(_opened(path, lambda file: file.schema_arrow))) if path.exists() else table


def stored_columns(path: pathlib.Path) -> list[str]:
    """The columns that a table's file holds, in their order; none where there is no file."""
    return list(_opened(path, lambda file: file.schema_arrow.names)) if path.exists() else []


def read_table(path: pathlib.Path, table: Table) -> pd.DataFrame:
    """The rows of a Parquet file as a frame: columns that an older schema lacked null, those of diagnostics behind."""
    stored = _read(path, table)
    frame: pd.DataFrame = stored.to_pandas(types_mapper=_NULLABLE.get)
    kinds, is_already = _frame_types(table.extended(_added(stored.schema))), frame.dtypes
    return frame.astype({name: kind for name, kind in kinds.items() if is_already[name] != kind})


def append_rows(path: pathlib.Path, table: Table, frame: pd.DataFrame, *, replace: bool = False) -> None:
    """Write what `appended` gives to a Parquet file, which is replaced whole or not at all."""
    rows = appended(path, table, frame, replace=replace)
    with atomic_path(path) as written:
        write_rows(rows, written)


def appended(path: pathlib.Path, table: Table, frame: pd.DataFrame, *, replace: bool = False) -> pa.Table:
    """The rows of a Parquet file, which need not be there yet, and those of a frame; earlier rows keep their bits.

    With `replace` a new row takes the place of an earlier one with the same key.
    """
    if not path.exists():
        return _as_stored(frame, table)
    # Earlier rows never become a frame on their way, so nothing can round or retype them.
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


def filled(path: pathlib.Path, table: Table, frame: pd.DataFrame) -> pa.Table:
    """The rows of a Parquet file with values put into columns of some; all other columns and rows keep their bits.

    `frame` has the key and the columns to fill; a value that is missing leaves what is there.
    """
    earlier = _read(path, table)
    table = table.extended(_added(earlier.schema))
    rows = _as_stored(frame, table)
    places = _keys(rows, table).get_indexer(_keys(earlier, table))
    if (places >= 0).sum() != rows.num_rows:
        raise ValueError(f"table {table.name!r} lacks some of the {rows.num_rows} rows that are to be filled")
    there = pa.array(places, mask=places < 0)
    for name in (name for name in frame.columns if name not in table.key):
        position = earlier.schema.get_field_index(name)
        values = pc.coalesce(rows[name].combine_chunks().take(there), earlier[name].combine_chunks())
        earlier = earlier.set_column(position, earlier.schema.field(position), values)
    return earlier


def without(path: pathlib.Path, table: Table, column: str, values: Collection[str]) -> pa.Table | None:
    """The rows of a Parquet file whose text `column` holds none of `values`; None where that is all of them."""
    if not path.exists():
        return None
    rows = _read(path, table)
    left = rows.filter(pc.invert(pc.is_in(rows[column], pa.array(list(values), pa.string()))))
    return left if left.num_rows < rows.num_rows else None


def write_rows(rows: pa.Table, path: pathlib.Path) -> None:
    """Write rows as a Parquet file."""
    pq.write_table(rows, path)


def _as_stored(frame: pd.DataFrame, table: Table) -> pa.Table:
    """The rows of a frame as they are written to a file of their own."""
    schema, rows = _file_schema(table), conform(frame, table)
    columns = [pa.array(rows[field.name].array, field.type, from_pandas=True) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _frame_types(table: Table) -> dict[str, ExtensionDtype | np.dtype[Any]]:
    """Integers of a key are plain ones: they are never null."""
    return {
        column.name: np.dtype(np.int64)
        if column.dtype == "int" and column.name in table.key
        else _FRAME_TYPES[column.dtype]
        for column in table.columns
    }


def _cast(frame: pd.DataFrame, column: Column, kind: ExtensionDtype | np.dtype[Any]) -> Any:
    if column.name not in frame.columns:
        return pd.Series(None, index=frame.index, dtype=kind).array
    values = frame[column.name]
    if values.dtype == kind:
        return values.array
    what = f"column {column.name!r} holds {column.dtype}"
    if column.dtype == "str":
        # pandas would write a number as text here, and a sample would no longer be found under its own name.
        odd = [value for value in values.dropna() if not isinstance(value, str)]
        if odd:
            raise ValueError(f"{what}, got {odd[0]!r}")
    try:
        return values.astype(kind).array
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _file_schema(table: Table) -> pa.Schema:
    declared = TABLES.get(table.name, table).names
    fields = [
        pa.field(
            column.name,
            _FILE_TYPES[column.dtype],
            metadata={"unit": column.unit, "meaning": column.meaning}
            | ({} if column.name in declared else {_ADDED: json.dumps(_told(column))}),
        )
        for column in table.columns
    ]
    units = json.dumps({column.name: column.unit for column in table.columns})
    return pa.schema(
        fields,
        metadata={_VERSION_KEY: SCHEMA_VERSION, "driftlens.table": table.name, "driftlens.units": units},
    )


def _told(column: Column) -> dict[str, Any]:
    # A reader of schema 1.0 knows no option.
    return {name: value for name, value in dataclasses.asdict(column).items() if name != "option"}


def _added(schema: pa.Schema) -> list[Column]:
    """The columns of a file that a diagnostic added beyond the schema, in their order."""
    notes = [json.loads(field.metadata[_ADDED]) for field in schema if _ADDED in (field.metadata or {})]
    return [Column(**{**column, "range": tuple(column["range"])}) for column in notes]


def _opened(path: pathlib.Path, look: Callable[[pq.ParquetFile], Any]) -> Any:
    """What `look` finds in a Parquet file."""
    try:
        with pq.ParquetFile(plain_file(path)) as file:
            return look(file)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing", hint="Run the analysis again to write it.") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path} can't be read: {reason}", hint=DAMAGED) from error


def _read(path: pathlib.Path, table: Table) -> pa.Table:
    def look(file: pq.ParquetFile) -> pa.Table:
        content = file.read()
        content.validate(full=True)  # reading looks at no text: whether it is any would show later, anywhere
        return content

    stored = _opened(path, look)
    version = (stored.schema.metadata or {}).get(_VERSION_KEY, b"")
    refuse_newer(version.decode(errors="replace"), path)
    return _aligned(stored, table.extended(_added(stored.schema)), path)


def _aligned(stored: pa.Table, table: Table, path: pathlib.Path) -> pa.Table:
    """The columns of `table`: null where `stored` lacks one, without those of a newer minor version."""
    schema, names = _file_schema(table), {*stored.column_names}
    try:
        columns = [
            (found if (found := stored.column(field.name)).type == field.type else found.cast(field.type))
            if field.name in names or field.name in table.key
            else pa.nulls(stored.num_rows, field.type)
            for field in schema
        ]
    except (KeyError, pa.ArrowException) as error:
        raise RunError(f"{path} is not the table {table.name!r}: {error}", hint=DAMAGED) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _keys(rows: pa.Table, table: Table) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows.select(list(table.key)).to_pandas())


def _first_key(rows: pd.DataFrame, table: Table) -> str:
    return ", ".join(f"{name}={rows[name].tolist()[0]!r}" for name in table.key)


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One dict per row, of numbers, text, booleans and None; what was not measured is None, never NaN."""
    columns = {str(name): [plain(value) for value in frame[name]] for name in frame.columns}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def plain(value: Any) -> Any:
    """One value as JSON knows it; what is missing or not finite is None."""
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(data: pd.DataFrame) -> str:
    """The rows as CSV with every digit; text that a spreadsheet would take for a formula is marked as text."""
    shown = data.copy()
    for name in shown.columns:
        if not pd.api.types.is_numeric_dtype(shown[name]):
            shown[name] = shown[name].map(
                lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
            )
    return shown.to_csv(index=False, lineterminator="\n")
