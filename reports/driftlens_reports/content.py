"""The content of a report in every format, as pydantic models; the JSON format is `ReportContent` itself."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BeforeValidator, Field

from driftlens.results.formatting import Kind, Part, Table
from driftlens.runs.tables import plain
from driftlens.utils.intervals import Interval

# Of the JSON format. Within a major version fields are only ever added.
VERSION = "3.0"


class Figure(Part):
    """One chart: the words that belong to it, and every number it plots."""

    name: str
    title: str
    caption: str
    hint: str = Field(description="How to read it, and its limits.")
    alt: str = Field(description="Alternative text with its main numbers.")
    notes: tuple[str, ...] = ()
    missing: str = Field(
        default="",
        description="Missing numbers and the command that adds them; may be empty.",
    )
    data: Table | None = Field(description="Every plotted number; null where it is missing.")


# JSON has no NaN, so an unknown end is null.
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
    n: int = Field(description="Number of samples; 0 if unknown.")


def _none_if_nan(value: Any) -> Any:
    return None if isinstance(value, Interval) and math.isnan(value.value) else value


class Change(Part):
    """The change of a measure's mean over tasks from before to after; null where it was not measured."""

    measure: str
    kind: Kind
    worse: Literal["higher", "lower"]
    num_tasks: int = Field(description="Tasks on which every compared variant was measured.")
    before: Estimate | None
    control: Estimate | None = Field(description="Of the calibration's anchor alone.")
    after: Estimate | None
    change: Estimate | None = Field(description="After minus before.")
    relative_change: float | None = Field(description="The change against the value before.")
    words: str = Field(default="", description="The change in words, with its interval.")


class Outcome(Part):
    """The number of checks by result."""

    passed: int
    warned: int
    failed: int
    skipped: int


class Gap(Part):
    """The difference between two models."""

    variant: str
    against: str
    change: Estimate = Field(description="The model's mean over tasks minus the other's.")
    side: Literal[1, 0, -1] = Field(
        description="1: significantly better; -1: significantly worse; 0: neither."
    )
    better: tuple[str, ...] = Field(description="Tasks on which the model is significantly better.")
    worse: tuple[str, ...]


class Headline(Part):
    """The first thing that a reader sees."""

    text: str
    tone: Literal["good", "mixed", "bad", "none"]
    so_far: str = Field(description="Number of measured tasks if some are missing; else empty.")
    tiles: dict[str, Estimate] = Field(description="Means by variant, base first and experts last.")
    kind: Kind
    measure: str
    closed: Annotated[Estimate | None, BeforeValidator(_none_if_nan)] = Field(
        description="Share of the gap to the experts that the repair closes; null without a clear gap."
    )


class Verdict(Part):
    """The verdict on a run."""

    measure: str = Field(description="The main measure.")
    tasks: tuple[str, ...] = Field(description="Tasks with every compared model.")
    means: dict[str, Estimate]
    gaps: tuple[Gap, ...]
    worst: str = Field(description="Task with the largest gap to its expert; empty if no gap is significant.")
    bad_experts: tuple[str, ...] = Field(description="Tasks whose expert is clearly worse than the base.")
    source: str = Field(
        description="Layer with the largest share of the merged model's drift; empty without."
    )
    source_share: Estimate | None
    command: str = Field(description="The recommended next command; empty if there is none.")

    before: str | None = Field(description="Variant compared with, usually `merged`.")
    control: str | None = Field(description="Variant of the anchor alone; null without.")
    after: str | None = Field(description="Calibrated variant; null where the run has none.")
    changes: tuple[Change, ...]
    worst_task: str | None = Field(description="Task with the largest relative final drift.")
    worst_drift: float | None = Field(description="Its drift, relative to the norm of the expert's feature.")
    self_checks: Outcome
    sentences: tuple[str, ...]
    headline: Headline


class RunInfo(Part):
    """The run that the report is about."""

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
    version: str = Field(default=VERSION, description="Format version; major versions only add fields.")
    driftlens: str = Field(description="Version of DriftLens that wrote it.")
    preset: str
    run: RunInfo
    stamps: tuple[str, ...] = Field(description="Notices that apply to every number.")
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


def frame_table(name: str, title: str, frame: pd.DataFrame) -> Table:
    """Convert a data frame to a table; the kind of each column follows from its type."""
    kinds = {str(head): _column_kind(frame[head]) for head in frame.columns}
    columns = (frame[head].tolist() for head in frame.columns)
    return Table.of(name, title, kinds, [*zip(*columns, strict=True)])


def _column_kind(values: pd.Series[Any]) -> Kind:
    # Booleans count as numeric in pandas, hence the test before.
    if pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values):
        return "text"
    return "count" if pd.api.types.is_integer_dtype(values) else "number"
