"""Runs to draw: whole, hostile, tiny, without calibration, without measurements."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from tests.runs.full_run import Size, write_full_run

HOSTILE = ("<script>alert(1)</script>", r"$\input{x}$ <b>bold</b>", "%{hostile} &amp; more")
"""Names that plotly would take for markup, a formula, a placeholder and an entity."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chart-runs")


@pytest.fixture(scope="session")
def full(folder: Path) -> DriftRun:
    return open_run(write_full_run(folder / "full"))


@pytest.fixture(scope="session")
def hostile(folder: Path) -> DriftRun:
    variants = [
        *("base", "merged", "baseline:<i>other</i>"),
        *("baseline:<i>x</i>-anchor", "calibrated:<i>x</i>"),
    ]
    path = write_full_run(folder / "hostile", name=HOSTILE[0], tasks=HOSTILE, variants=variants, class_names=HOSTILE)
    return open_run(path)


@pytest.fixture(scope="session")
def single(folder: Path) -> DriftRun:
    """One task, one block, and rows of the last layer only."""
    path = write_full_run(folder / "single", tasks=["cars"], size=Size(blocks=1))
    for name in ("layers", "samples", "adjoint", "calibration"):
        file = path / "tables" / f"{name}.parquet"
        rows = pq.read_table(file)
        pq.write_table(rows.filter(pc.equal(rows["layer"], pc.max(rows["layer"]))), file)
    return open_run(path)


@pytest.fixture(scope="session")
def uncalibrated(folder: Path) -> DriftRun:
    return open_run(write_full_run(folder / "uncalibrated", variants=["base", "merged"]))


@pytest.fixture(scope="session")
def bare(folder: Path) -> DriftRun:
    """A run without labels."""
    return open_run(write_full_run(folder / "bare", has_labels=False))


@pytest.fixture(scope="session")
def crowded(folder: Path) -> DriftRun:
    """Several baselines and calibrations."""
    names = ["one", "two", "three"]
    variants = ["base", "merged", "baseline:surgery"]
    variants += [name for at in names for name in (f"baseline:{at}-anchor", f"calibrated:{at}")]
    return open_run(write_full_run(folder / "crowded", variants=variants, tasks=["cars"]))


@pytest.fixture(scope="session")
def unmeasured(folder: Path) -> DriftRun:
    """Rows are there; every number in them is null."""
    path = write_full_run(folder / "unmeasured")
    for name, table in TABLES.items():
        file = path / "tables" / f"{name}.parquet"
        if not file.exists():
            continue
        rows = pq.read_table(file)
        for column in table.columns[len(table.key) :]:
            if column.dtype in ("float", "bool"):
                at = rows.schema.get_field_index(column.name)
                field = rows.schema.field(at)
                rows = rows.set_column(at, field, pa.nulls(len(rows), field.type))
        pq.write_table(rows, file)
    return open_run(path)
