"""How equal two runs are: to the last bit, within a tolerance, or where not."""

from __future__ import annotations

import math
import pathlib

import pyarrow.parquet as pq
import pytest

from driftlens.runs.equality import equality
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from tests.records.full_run import write_full_run
from tests.records.judged import SIZE
from tests.records.spoiling import spoil


def test_a_repetition_is_equal_to_the_last_bit(full: DriftRun, tmp_path: pathlib.Path) -> None:
    twin = open_run(write_full_run(tmp_path / "twin", size=SIZE))
    found = equality(full, twin)
    assert found.bit_equal and found.within(0.0) and found.largest == 0
    assert set(found.tables) == set(TABLES) - {"resources", "sweeps", "scores", "excess"}
    assert found.num_values > 1000


@pytest.mark.parametrize(
    "table", ["layers", "samples", "outputs", "params", "adjoint", "group_contributions"]
)
def test_one_changed_number_anywhere_is_found(full: DriftRun, copied: pathlib.Path, table: str) -> None:
    column = {
        "layers": "drift_l2_mean",
        "samples": "cos",
        "outputs": "kl",
        "params": "cos",
        "adjoint": "part",
        "group_contributions": "final_share",
    }[table]
    value = pq.read_table(copied / "tables" / f"{table}.parquet")[column][3].as_py()
    spoil(copied, table, 3, column, value + 1e-3)
    found = equality(full, open_run(copied))
    assert not found.bit_equal and not found.within(1e-6) and found.within(1e-2)
    assert found.where.startswith(f"{table}.{column}, ") and not found.unequal


def test_the_last_bit_counts_for_bits_and_not_for_a_tolerance(full: DriftRun, copied: pathlib.Path) -> None:
    value = full.layers()["drift_l2_mean"].iloc[0]
    spoil(copied, "layers", 0, "drift_l2_mean", math.nextafter(value, math.inf))
    found = equality(full, open_run(copied))
    assert not found.bit_equal and 0 < found.largest < 1e-15 and found.within(1e-12)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("outputs", "pred", "other"),
        ("outputs", "flipped", None),
        ("layers", "nodes", 5),
        ("layers", "cka", None),
    ],
    ids=["text", "missing truth", "count", "missing number"],
)
def test_no_tolerance_covers_text_counts_and_gaps(
    full: DriftRun, copied: pathlib.Path, table: str, column: str, value: object
) -> None:
    spoil(copied, table, 5, column, value)
    found = equality(full, open_run(copied))
    assert not found.within(math.inf) and not found.bit_equal
    (only,) = found.unequal
    assert only.startswith(f"{table}.{column}: 1 row differs (")


def test_rows_of_one_run_alone_are_counted(full: DriftRun, tmp_path: pathlib.Path) -> None:
    other = open_run(write_full_run(tmp_path / "b", size=SIZE, tasks=("cars",)))
    found = equality(full, other)
    num_rows = 2 * len(full.variants) * len(full.manifest.layers)
    assert any(text.startswith(f"layers: {num_rows} rows only in the first run") for text in found.unequal)
    assert not found.within(math.inf)


def test_order_of_rows_does_not_matter(full: DriftRun, copied: pathlib.Path) -> None:
    path = copied / "tables" / "samples.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.take(list(range(rows.num_rows))[::-1]), path)
    assert equality(full, open_run(copied)).bit_equal
