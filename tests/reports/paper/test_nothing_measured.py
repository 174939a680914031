"""Exhibits of a run whose layer table holds no number: drawn without one, never invented, never a crash."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.paper.exhibit import ExhibitOptions, exhibits
from tests.records.full_run import Size, write_full_run


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    folder = tmp_path_factory.mktemp("unmeasured") / "run"
    write_full_run(folder, size=Size(2, 8, 4, 3, 50))
    file = folder / "tables" / "layers.parquet"
    table = pq.read_table(file)
    for at, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(at, field, pa.array([math.nan] * table.num_rows, field.type))
    pq.write_table(table, file)
    return open_run(folder)


@pytest.mark.parametrize("name", [name for name, entry in exhibits.items() if entry.kind == "figure"])
def test_a_figure_shows_no_number_that_was_not_measured(name: str, unmeasured: DriftRun) -> None:
    rows = exhibits[name].draw([unmeasured], ExhibitOptions()).data
    of_layers = rows[rows["quantity"].isin(list(unmeasured.layers().columns))]
    assert of_layers["value"].isna().all()


def test_a_panel_without_any_drift_is_a_note(unmeasured: DriftRun) -> None:
    missing = exhibits["intro"].draw([unmeasured], ExhibitOptions()).missing
    assert "(b) Drift by layer" in [panel.name for panel in missing]
