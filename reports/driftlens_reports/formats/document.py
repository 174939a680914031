"""The JSON format: the content itself, and the schema that describes it."""

from __future__ import annotations

import json
from typing import Any

from driftlens_reports.content import VERSION, ReportContent


def json_document(content: ReportContent) -> bytes:
    """The report as one JSON object; a number that was not measured is null, never NaN."""
    text = json.dumps(content.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the format, as the model declares it; `report.schema.json` ships the same."""
    schema = ReportContent.model_json_schema(mode="serialization")
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DriftLens report {VERSION.partition('.')[0]}",
    }
    return {**about, **{name: value for name, value in schema.items() if name != "title"}}
