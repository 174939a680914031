"""What a report says, whatever format it is written in: sections of sentences, tables and figures, built once per run.

Every format renders this and nothing else, so that no two of them can disagree. The JSON format is this model itself;
its schema ships as `report.schema.json`.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from driftlens_reports import wording

VERSION = "1.0"
"""Of the JSON format. Within a major version fields are only ever added."""

Kind = Literal["text", "count", "number", "share", "error"]
"""How a column's values are written: as they are, whole, with four digits, as a percentage, with an exponent."""

Cell = str | int | float | bool | None
"""One value at full precision; None where nothing was measured."""

NO_VALUE = "–"
"""Stands in a table where nothing was measured; a line below the table says so."""


class Part(BaseModel):
    """One part of a report: never changed, and without fields that its version does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(Part):
    """One column of a table."""

    name: str = Field(description="Heading, unique within the table.")
    kind: Kind = Field(description="How its values are written where they are rounded for reading.")
    unit: str = Field(
        default="", description="Unit of its values as the run's tables have it; empty without."
    )


class Table(Part):
    """Rows of values, unrounded."""

    name: str = Field(description="Name of its own, for file names, anchors and labels.")
    title: str
    note: str = Field(default="", description="What a reader must know about the rows.")
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...] = Field(description="One value per column; null: not measured.")

    @property
    def has_gaps(self) -> bool:
        """Whether any value was not measured."""
        return any(cell is None for row in self.rows for cell in row)

    def texts(self) -> list[list[str]]:
        """The rows as a reader sees them, rounded as the columns' kinds say."""
        return [
            [written(cell, column.kind) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]


class Figure(Part):
    """One chart: the words that belong to it, and every number it plots."""

    name: str
    title: str
    caption: str
    hint: str = Field(description="How to read it, and what it can't tell.")
    alt: str = Field(description="What it shows, in a sentence or two made from its numbers.")
    notes: tuple[str, ...] = ()
    missing: str = Field(
        default="",
        description="What the run lacks for it, and the command that adds it; empty where it is drawn.",
    )
    data: Table | None = Field(description="Every plotted number; null where it is missing.")


class Section(Part):
    """One section, in the order in which a reader meets them."""

    name: str
    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


class Change(Part):
    """How a measure's mean over tasks changes from before to after; null where it was not measured."""

    measure: str
    kind: Kind
    worse: Literal["higher", "lower"]
    num_tasks: int = Field(
        description="Tasks behind the means: those on which every compared variant was measured."
    )
    before: float | None
    control: float | None = Field(description="With the calibration's anchor alone.")
    after: float | None
    change: float | None = Field(description="After minus before.")
    change_low: float | None = Field(
        default=None, description="Lower end of its 95 % interval over samples, the tasks being as they are."
    )
    change_high: float | None = Field(default=None, description="Its upper end.")
    relative_change: float | None = Field(description="The change against the value before.")
    rescaling: float | None = Field(description="Control minus before: what the anchor alone changes.")
    calibration: float | None = Field(description="After minus control: what calibration changes beyond it.")


class Outcome(Part):
    """How the checks ended."""

    passed: int
    warned: int
    failed: int
    skipped: int


class Verdict(Part):
    """What a reader who reads nothing else should know."""

    before: str | None = Field(description="Variant compared with, usually `merged`.")
    control: str | None = Field(description="Variant of the anchor alone; null without.")
    after: str | None = Field(description="Calibrated variant; null where the run has none.")
    changes: tuple[Change, ...]
    worst_task: str | None = Field(
        description="Task with the largest relative final drift, after if there is one."
    )
    worst_drift: float | None = Field(description="That drift, against the norm of the expert's feature.")
    self_checks: Outcome
    sentences: tuple[str, ...]


class RunInfo(Part):
    """Which run the report is about."""

    id: str
    name: str
    state: str
    created: str
    synthetic: bool
    spec_digest: str
    schema_version: str
    tasks: tuple[str, ...]
    variants: tuple[str, ...]


class ReportContent(Part):
    """A whole report."""

    format: Literal["driftlens-report"] = "driftlens-report"
    version: str = Field(
        default=VERSION, description="Of this format; fields are only ever added within a major one."
    )
    driftlens: str = Field(description="Version of DriftLens that wrote it.")
    preset: str
    raw: bool = Field(description="Whether charts of single samples are included.")
    run: RunInfo
    stamps: tuple[str, ...] = Field(description="What a reader must know before any number.")
    verdict: Verdict
    sections: tuple[Section, ...]

    @property
    def tables(self) -> list[Table]:
        """The tables of all sections, without those of figures."""
        return [table for section in self.sections for table in section.tables]

    @property
    def figures(self) -> list[Figure]:
        """The figures of all sections."""
        return [figure for section in self.sections for figure in section.figures]


def written(value: Cell, kind: Kind) -> str:
    """One value as a reader sees it; a dash where nothing was measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or kind in ("text", "count"):
        return str(value)
    return {"number": wording.number, "share": wording.percent, "error": wording.error}[kind](value)
