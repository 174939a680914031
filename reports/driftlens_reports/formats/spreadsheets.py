"""The CSV format: a file per table with every digit, and beside it what its columns mean."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from driftlens.records import layout, schema
from driftlens.records.run import DriftRun
from driftlens_reports.content import ReportContent, Table
from driftlens_reports.paper.export import csv_text

_BY_SAMPLE = ("samples", "outputs", "adjoint")
"""Tables of the run with a row per sample: only in a report with raw data."""


def spreadsheets(run: DriftRun, content: ReportContent) -> dict[str, bytes]:
    """Files by name: the run's own tables, the report's, and the numbers behind its figures.

    `NAME.csv` has the rows, `NAME.units.csv` the unit of every column. Text that a spreadsheet would take for a
    formula is marked as text.

    Raises:
        RunError: a table can't be read.
    """
    files: dict[str, bytes] = {}
    for name, rows, units in (*_run_tables(run, content.raw), *_report_tables(content)):
        if len(rows):
            files[f"{layout.escape(name)}.csv"] = csv_text(rows).encode()
            files[f"{layout.escape(name)}.units.csv"] = csv_text(units).encode()
    return files


def _run_tables(run: DriftRun, raw: bool) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    for name in schema.TABLES:
        if raw or name not in _BY_SAMPLE:
            units = [(column.name, column.unit, column.meaning) for column in run.columns(name)]
            rows: pd.DataFrame = getattr(run, name)()  # a run's tables are its methods
            yield name, rows, pd.DataFrame(units, columns=["column", "unit", "meaning"])


def _report_tables(content: ReportContent) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    figures = [figure.data for figure in content.figures if figure.data is not None]
    for table in (*content.tables, *figures):
        prefix = "" if table.name.startswith("figure-") else "report-"
        units = [(column.name, column.unit) for column in table.columns]
        yield f"{prefix}{table.name}", _frame(table), pd.DataFrame(units, columns=["column", "unit"])


def _frame(table: Table) -> pd.DataFrame:
    """The rows as a frame whose whole numbers stay whole where some are missing."""
    columns = {}
    for at, column in enumerate(table.columns):
        values = [row[at] for row in table.rows]
        kind = {"text": "object", "count": "Int64"}.get(column.kind, "float64")
        columns[column.name] = pd.Series(values, dtype=kind)
    return pd.DataFrame(columns)
