"""The content of a report in every format, as pydantic models; the JSON format is `ReportContent` itself."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BeforeValidator, Field

from driftlens.results.formatting import Kind, ReportPart, Table
from driftlens.runs.tables import json_value
from driftlens.utils.intervals import Interval

# Of the JSON format. Within a major version fields are only ever added.
VERSION = "3.0"


class Figure(ReportPart):
    """One chart of a report: title, caption, hint, alt text, notes and every plotted number."""

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
_End = Annotated[float | None, BeforeValidator(json_value)]


class Section(ReportPart):
    """One section of a report: sentences, tables and figures."""

    name: str
    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


class Estimate(ReportPart):
    """A number with its 95 % interval over samples (tasks fixed); null ends where it is unknown."""

    value: float
    low: _End
    high: _End
    n: int = Field(description="Number of samples; 0 if unknown.")


def _none_if_nan(value: Any) -> Any:
    return None if isinstance(value, Interval) and math.isnan(value.value) else value


class MeasureChange(ReportPart):
    """The change of a measure's mean over tasks by a calibration; null where it was not measured."""

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


class CheckCounts(ReportPart):
    """The number of passed, warned, failed and skipped checks."""

    passed: int
    warned: int
    failed: int
    skipped: int


class ScoreGap(ReportPart):
    """The difference in mean score between two models, with significance by task."""

    variant: str
    against: str
    change: Estimate = Field(description="The model's mean over tasks minus the other's.")
    side: Literal[1, 0, -1] = Field(description="1: significantly better; -1: significantly worse; 0: neither.")
    better: tuple[str, ...] = Field(description="Tasks on which the model is significantly better.")
    worse: tuple[str, ...]


class ReportHeadline(ReportPart):
    """The headline of a run: verdict sentence, mean score of every model, share of the gap closed."""

    text: str
    tone: Literal["good", "mixed", "bad", "none"]
    so_far: str = Field(description="Number of measured tasks if some are missing; else empty.")
    tiles: dict[str, Estimate] = Field(description="Means by variant, base first and experts last.")
    roles: dict[str, str] = Field(description="Method of a calibrated model, kind of another one, by variant.")
    kind: Kind
    measure: str
    closed: Annotated[Estimate | None, BeforeValidator(_none_if_nan)] = Field(
        description="Share of the gap to the experts that the repair closes; null without a clear gap."
    )


class ReportVerdict(ReportPart):
    """The verdict on a run: means, gaps to the experts, changes by calibration, recommended command."""

    measure: str = Field(description="The main measure.")
    tasks: tuple[str, ...] = Field(description="Tasks with every compared model.")
    means: dict[str, Estimate]
    gaps: tuple[ScoreGap, ...]
    worst: str = Field(description="Task with the largest gap to its expert; empty if no gap is significant.")
    bad_experts: tuple[str, ...] = Field(
        description="Tasks whose expert is below the base, near chance, or far below its features."
    )
    source: str = Field(description="Layer with the largest share of the merged model's drift; empty without.")
    source_share: Estimate | None
    command: str = Field(description="The recommended next command; empty if there is none.")

    before: str | None = Field(description="Variant compared with, usually `merged`.")
    control: str | None = Field(description="Variant of the anchor alone; null without.")
    after: str | None = Field(description="Calibrated variant; null where the run has none.")
    changes: tuple[MeasureChange, ...]
    worst_task: str | None = Field(description="Task with the largest relative final drift.")
    worst_drift: float | None = Field(description="Its drift, relative to the norm of the expert's feature.")
    self_checks: CheckCounts
    sentences: tuple[str, ...]
    headline: ReportHeadline


class RunInfo(ReportPart):
    """Identity of the reported run: id, name, state, date, spec digest, tasks and variants."""

    id: str
    name: str
    state: str
    created: str
    synthetic: bool
    spec_digest: str
    schema_version: str
    tasks: tuple[str, ...]
    variants: tuple[str, ...]


class ReportContent(ReportPart):
    """The content of a report: run, verdict and sections, the same for every output format."""

    format: Literal["driftlens-report"] = "driftlens-report"
    version: str = Field(default=VERSION, description="Format version; major versions only add fields.")
    driftlens: str = Field(description="Version of DriftLens that wrote it.")
    preset: str
    run: RunInfo
    stamps: tuple[str, ...] = Field(description="Notices that apply to every number.")
    verdict: ReportVerdict
    sections: tuple[Section, ...]

    @property
    def tables(self) -> list[Table]:
        """All tables of the report, without the data tables of figures."""
        return [table for section in self.sections for table in section.tables]

    @property
    def figure_tables(self) -> dict[str, Table]:
        """The tables of plotted numbers, by figure."""
        return {figure.name: figure.data for figure in self.figures if figure.data is not None}

    @property
    def figures(self) -> list[Figure]:
        """All figures of the report, in order of sections."""
        return [figure for section in self.sections for figure in section.figures]


def table_from_frame(name: str, title: str, frame: pd.DataFrame) -> Table:
    """Convert a data frame to a report table; the kind of each column follows from its dtype."""
    kinds = {str(head): _column_kind(frame[head]) for head in frame.columns}
    columns = (frame[head].tolist() for head in frame.columns)
    return Table.of(name, title, kinds, [*zip(*columns, strict=True)])


def _column_kind(values: pd.Series[Any]) -> Kind:
    # Booleans count as numeric in pandas, hence the test before.
    if pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values):
        return "text"
    return "count" if pd.api.types.is_integer_dtype(values) else "number"
