from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from driftlens.runs.schema import ACCURACY, LAYERS, RESOURCES, TABLES, ColumnSchema, TableSchema
from driftlens.runs.tables import append_rows, conform_to_schema, csv_text, empty_frame, read_table
from driftlens.utils.errors import RunError, SchemaTooNewError
from tests.quick import few

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(max_size=6),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
}


def rows_of(table: TableSchema) -> st.SearchStrategy[list[dict[str, Any]]]:
    def value(column: ColumnSchema) -> st.SearchStrategy[Any]:
        plain = VALUES[column.dtype]
        return plain if column.name in table.key else st.none() | plain

    row = st.fixed_dictionaries({column.name: value(column) for column in table.columns})
    return st.lists(row, max_size=3, unique_by=lambda row: tuple(row[name] for name in table.key))


def frame_of(rows: list[dict[str, Any]], table: TableSchema) -> pd.DataFrame:
    """Columns of Python objects, so that no value is changed before `conform` sees it."""
    return pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=object) for name in table.names})


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as Python values: None for a missing value, the eight bytes of a float."""

    def value(cell: Any) -> Any:
        if pd.isna(cell):
            return None
        return struct.pack("d", cell) if isinstance(cell, float) else cell

    return [{name: value(cell) for name, cell in row.items()} for row in frame.to_dict("records")]


@pytest.mark.parametrize("name", few(TABLES, ["layers", "outputs"]))
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_bit_for_bit(name: str, data: st.DataObject) -> None:
    table = TABLES[name]
    rows = data.draw(rows_of(table))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        append_rows(path, table, frame_of(rows, table))
        frame = read_table(path, table)
    assert plain(frame) == plain(frame_of(rows, table))
    assert frame.dtypes.to_dict() == empty_frame(table).dtypes.to_dict()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_earlier_rows_keep_their_bits_when_rows_are_added(data: st.DataObject) -> None:
    rows = data.draw(rows_of(ACCURACY))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        append_rows(path, ACCURACY, frame_of(rows, ACCURACY))
        append_rows(path, ACCURACY, pd.DataFrame([{"task": "a later task", "variant": "", "metric": ""}]))
        frame = read_table(path, ACCURACY)
    assert plain(frame)[: len(rows)] == plain(frame_of(rows, ACCURACY))
    assert len(frame) == len(rows) + 1


def test_a_repeated_key_is_refused_unless_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    append_rows(path, RESOURCES, pd.DataFrame({"phase": ["load", "walk"], "seconds": [1.0, 2.0]}))
    again = pd.DataFrame({"phase": ["load"], "seconds": [9.0]})
    with pytest.raises(ValueError, match="already has the row phase='load'"):
        append_rows(path, RESOURCES, again)
    assert read_table(path, RESOURCES)["seconds"].tolist() == [1.0, 2.0]
    append_rows(path, RESOURCES, again, replace=True)
    rows = read_table(path, RESOURCES)[["phase", "seconds"]].to_numpy().tolist()
    assert sorted(rows) == [["load", 9.0], ["walk", 2.0]]


def test_keys_of_several_columns_clash_only_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    first = pd.DataFrame([{"task": "a", "variant": "merged", "layer": 1}])
    append_rows(path, LAYERS, first)
    append_rows(path, LAYERS, first.assign(layer=2))
    append_rows(path, LAYERS, first.assign(task="b"))
    with pytest.raises(ValueError, match="task='a', variant='merged', layer=1"):
        append_rows(path, LAYERS, first)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ({"phase": ["load"], "speed": [1.0]}, "no column 'speed'"),
        ({"seconds": [1.0]}, "null in the key column 'phase'"),
        ({"phase": ["load", None]}, "null in the key column 'phase'"),
        ({"phase": ["load", "load"]}, "repeat the key phase='load'"),
        ({"phase": [17]}, "'phase' holds str"),
        ({"phase": ["load"], "peak_rss_bytes": [0.5]}, "'peak_rss_bytes' holds int"),
        ({"phase": ["load"], "seconds": ["long"]}, "'seconds' holds float"),
    ],
    ids=["unknown column", "no key", "null key", "same key twice", "number for text", "half a byte", "text"],
)
def test_rows_that_do_not_fit_are_refused(rows: dict[str, list[Any]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        conform_to_schema(pd.DataFrame(rows), RESOURCES)


def test_units_and_version_stand_in_the_file(tmp_path: Path) -> None:
    append_rows(tmp_path / "r.parquet", RESOURCES, pd.DataFrame({"phase": ["load"]}))
    schema = pq.read_schema(tmp_path / "r.parquet")
    assert schema.metadata[b"driftlens.schema_version"] == b"1.9"
    assert schema.field("seconds").metadata[b"unit"] == b"s"


def rewrite(path: Path, table: pa.Table, version: str) -> None:
    pq.write_table(table.replace_schema_metadata({"driftlens.schema_version": version}), path)


def test_a_column_that_an_older_version_lacked_is_null(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    rewrite(path, pa.table({"phase": ["load"], "seconds": [1.5]}), "1.0")
    frame = read_table(path, RESOURCES)
    assert frame["energy_wh"].isna().all() and frame["peak_rss_bytes"].isna().all()
    assert frame["seconds"].tolist() == [1.5]


def test_a_column_of_a_newer_minor_version_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    rewrite(path, pa.table({"phase": ["load"], "noise_db": [60.0]}), "1.10")
    assert tuple(read_table(path, RESOURCES).columns) == RESOURCES.names


def test_a_newer_major_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    rewrite(path, pa.table({"phase": ["load"]}), "2.0")
    with pytest.raises(SchemaTooNewError, match=r"r\.parquet has schema 2\.0"):
        read_table(path, RESOURCES)


@pytest.mark.parametrize("kept", [0, 3, 200, -1], ids=["empty", "magic only", "head only", "last byte gone"])
def test_a_truncated_table_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "r.parquet"
    append_rows(path, RESOURCES, pd.DataFrame({"phase": ["load"]}))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RunError, match=r"r\.parquet can't be read"):
        read_table(path, RESOURCES)


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    ends, letters = pa.py_buffer(struct.pack("ii", 0, 4)), pa.py_buffer(b"lo\x80d")
    rewrite(path, pa.table({"phase": pa.StringArray.from_buffers(1, ends, letters)}), "1.0")
    with pytest.raises(RunError, match=r"r\.parquet can't be read"):
        read_table(path, RESOURCES)


def test_a_table_without_its_key_is_another_table(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    rewrite(path, pa.table({"colour": ["red"]}), "1.0")
    with pytest.raises(RunError, match="is not the table 'resources'"):
        read_table(path, RESOURCES)


def test_a_folder_whose_name_looks_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    path = tmp_path / "phase=walk" / "r.parquet"
    append_rows(path, RESOURCES, pd.DataFrame({"phase": ["load"]}))
    assert read_table(path, RESOURCES)["phase"].tolist() == ["load"]


def test_text_that_a_spreadsheet_would_run_is_marked_as_text() -> None:
    text = csv_text(pd.DataFrame({"row": ["=cmd()", "+1", "-x", "@a", "plain"], "value": [-1.5, 0.1, 2, 3, 4]}))
    assert text.splitlines() == ["row,value", "'=cmd(),-1.5", "'+1,0.1", "'-x,2.0", "'@a,3.0", "plain,4.0"]
