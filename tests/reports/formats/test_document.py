"""The JSON format against its schema, and against what this major version promised."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import driftlens_reports
from driftlens.runs.run import DriftRun
from driftlens_reports.build import Report
from driftlens_reports.content import ReportContent
from driftlens_reports.formats.texts import json_schema

GOLDEN = pathlib.Path(__file__).with_name("report-2.0.json")
"""Fields of version 2.0: within a major version they only ever grow."""


def document(report: Report) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(report.files(["json"])["report.json"])
    return loaded


def shipped_schema() -> dict[str, Any]:
    """The schema as it is packaged."""
    path = pathlib.Path(driftlens_reports.__file__).with_name("report.schema.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def fields(schema: dict[str, Any]) -> dict[str, list[str]]:
    parts = {"ReportContent": schema, **schema["$defs"]}
    return {name: sorted(part["properties"]) for name, part in sorted(parts.items())}


def test_the_shipped_schema_is_that_of_the_model() -> None:
    assert shipped_schema() == json_schema()


def test_fields_are_only_ever_added() -> None:
    promised: dict[str, list[str]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    there = fields(shipped_schema())
    assert {
        name: [field for field in kept if field in there[name]] for name, kept in promised.items()
    } == promised


@pytest.mark.parametrize("which", ["full", "bare", "hostile"])
def test_documents_are_valid(which: str, request: pytest.FixtureRequest) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    run: DriftRun = request.getfixturevalue(which)
    validator = jsonschema.Draft202012Validator(shipped_schema())
    jsonschema.Draft202012Validator.check_schema(shipped_schema())
    assert [error.message for error in validator.iter_errors(document(Report(run, "summary")))] == []


def test_the_schema_refuses_what_is_no_report(full: DriftRun) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(shipped_schema())
    spoilt = document(Report(full, sections=["glossary"]))
    spoilt["sections"][0]["tables"][0]["columns"][0]["kind"] = "colour"
    assert not validator.is_valid(spoilt)


def test_reading_a_document_gives_the_content_back(standard: Report) -> None:
    assert ReportContent.model_validate(document(standard)) == standard.content


def test_rows_are_as_long_as_their_columns(everything: Report) -> None:
    def tables(content: ReportContent) -> Iterator[tuple[int, int]]:
        for table in (*content.tables, *(figure.data for figure in content.figures if figure.data)):
            yield from ((len(row), len(table.columns)) for row in table.rows)

    found = list(tables(everything.content))
    assert len(found) > 500 and all(cells == columns for cells, columns in found)


def test_what_was_not_measured_is_null(full: DriftRun, standard: Report) -> None:
    figures = {f["name"]: f for section in document(standard)["sections"] for f in section["figures"]}
    data = figures["amplification"]["data"]
    at = {column["name"]: place for place, column in enumerate(data["columns"])}
    stems = [row for row in data["rows"] if row[at["role"]] == "stem"]
    assert len(stems) == 9 and all(row[at["amplification"]] is None for row in stems)
