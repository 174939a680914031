"""The formats that are data: JSON, which is the content itself, and CSV, a file per table with every digit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from driftlens.runs import layout, schema
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import csv_text
from driftlens_reports.content import VERSION, ReportContent

_BY_SAMPLE = ("samples", "outputs", "adjoint")
"""Tables of the run with a row per sample: only in a report with raw data."""


def json_document(content: ReportContent) -> bytes:
    """The report as one JSON object; a number that was not measured is null, never NaN."""
    text = json.dumps(content.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the format, as the model declares it; `report.schema.json` ships the same."""
    return {
        **ReportContent.model_json_schema(mode="serialization"),
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DriftLens report {VERSION.partition('.')[0]}",
    }


def spreadsheets(run: DriftRun, content: ReportContent) -> dict[str, bytes]:
    """Files by name: the run's own tables, the report's, and the numbers behind its figures.

    `NAME.csv` has the rows, `NAME.units.csv` the unit of every column. Text that a spreadsheet would take for a
    formula is marked as text.
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
        yield f"{prefix}{table.name}", table.frame(), pd.DataFrame(units, columns=["column", "unit"])
