"""What a report says, whatever format it is written in: sections of sentences, tables and figures, built once per run.

Every format renders this and nothing else, so that no two of them can disagree. The JSON format is this model itself;
its schema ships as `report.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from driftlens.findings.reading import Kind, Sheet, written
from driftlens.runs.tables import plain

VERSION = "2.1"
"""Of the JSON format. Within a major version fields are only ever added."""

Cell = str | int | float | bool | None
"""One value at full precision; None where nothing was measured."""


class Part(BaseModel):
    """One part of a report: never changed, and without fields that its version does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


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


_End = Annotated[float | None, BeforeValidator(plain)]


class Section(Part):
    """One section, in the order in which a reader meets them."""

    name: str
    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


class Estimate(Part):
    """A number with its 95 % interval over samples, the tasks being as they are; null ends where it is not known."""

    value: float
    low: _End
    high: _End
    n: int = Field(description="Samples behind it; 0 where that is not known.")


class Change(Part):
    """How a measure's mean over tasks changes from before to after; null where it was not measured."""

    measure: str
    kind: Kind
    worse: Literal["higher", "lower"]
    num_tasks: int = Field(
        description="Tasks behind the means: those on which every compared variant was measured."
    )
    before: Estimate | None
    control: Estimate | None = Field(description="Of the calibration's anchor alone.")
    after: Estimate | None
    change: Estimate | None = Field(description="After minus before.")
    relative_change: float | None = Field(description="The change against the value before.")


class Outcome(Part):
    """How the checks ended."""

    passed: int
    warned: int
    failed: int
    skipped: int


class Gap(Part):
    """How one model differs from another."""

    variant: str
    against: str
    change: Estimate = Field(description="The model's mean over tasks minus the other's.")
    side: Literal[1, 0, -1] = Field(
        description="1: the interval says that the model is better; -1: worse; 0: it can't tell."
    )
    better: tuple[str, ...] = Field(description="Tasks on which their own interval says better.")
    worse: tuple[str, ...]


class Verdict(Part):
    """What a reader who reads nothing else should know."""

    measure: str = Field(description="What models are judged by.")
    tasks: tuple[str, ...] = Field(description="On which every compared model was measured.")
    means: dict[str, Estimate]
    gaps: tuple[Gap, ...]
    worst: str = Field(description="Task furthest behind its expert; empty where none clearly is.")
    bad_experts: tuple[str, ...] = Field(description="Tasks whose expert is clearly worse than the base.")
    source: str = Field(
        description="Layer with the largest share of the merged model's drift; empty without."
    )
    source_share: Estimate | None
    command: str = Field(description="What to do next; empty where no command can.")

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


_UNITS = {
    **dict.fromkeys(("L2 drift", "L2 drift +-", "mean drift", "10 % quantile", "90 % quantile"), "feature"),
    **dict.fromkeys(("mismatch", "propagation", "drift"), "feature"),
    **dict.fromkeys(("score drift", "secant", "directional", "spectral", "certified"), "score"),
    **dict.fromkeys(("relative drift", "of base distance", "drift / base distance", "amplification"), "1"),
    **dict.fromkeys(
        ("cosine", "cosine +-", "mean cosine", "cosine of task vectors", "cosine gain", "cka", "cross term"),
        "1",
    ),
    **dict.fromkeys(("accuracy", "score", "value", "share of final drift"), "1"),
    **dict.fromkeys(
        ("n", "test n", "samples", "test samples", "calibration", "diagnosis", "test"), "samples"
    ),
    **{"seconds": "s", "peak memory (GiB)": "GiB", "peak GPU memory (GiB)": "GiB", "energy (Wh)": "Wh"},
}
"""Units of columns by heading, in the words of the run's schema; a heading means the same in every table."""


def table(
    name: str, title: str, kinds: Mapping[str, Kind], rows: Sequence[Sequence[object]], note: str = ""
) -> Table:
    """A table of these rows; what is missing or not finite becomes None.

    Args:
        name: its name in files and anchors.
        title: its heading.
        kinds: headings and how their values are written, in order.
        rows: one value per column each.
        note: what a reader must know about the rows.
    """
    heads = tuple(
        Column(name=head, kind=kind, unit="1" if kind in ("share", "points") else _UNITS.get(head, ""))
        for head, kind in kinds.items()
    )
    cells = tuple(tuple(plain(value) for value in row) for row in rows)
    return Table(name=name, title=title, note=note, columns=heads, rows=cells)


def sheet_table(sheet: Sheet) -> Table:
    """A table that other places show too."""
    return table(sheet.name, sheet.title, sheet.kinds, sheet.rows, sheet.note)


def frame_table(name: str, title: str, frame: pd.DataFrame) -> Table:
    """Every row of a frame as a table, with the kind of each column read off its type."""
    columns = tuple(
        Column(name=str(head), kind=_kind(frame[head]), unit=_UNITS.get(str(head), ""))
        for head in frame.columns
    )
    values = [[plain(value) for value in frame[head].tolist()] for head in frame.columns]
    return Table(name=name, title=title, columns=columns, rows=tuple(zip(*values, strict=True)))


def _kind(values: pd.Series[Any]) -> Kind:
    if pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values):
        return "text"
    return "count" if pd.api.types.is_integer_dtype(values) else "number"
