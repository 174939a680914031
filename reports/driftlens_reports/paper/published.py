"""The numbers that the paper prints, as printed, and what is known to be wrong with some of them.

`published.json` beside this file holds every table of the paper, the numbers that its text states about figures, and
its settings. Nothing there is corrected: errata are entries of their own, and the cells they are about keep what was
printed.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

AVERAGE = "Avg."
"""Column of averages, as the paper calls it."""

Part = Literal["base", "expert", "multitask", "single", "merged", "baseline", "calibrated"]
ErratumKind = Literal["value", "average", "rounding", "columns", "suspect", "gain", "runs"]

_REFERENCES: Mapping[str, Part] = MappingProxyType(
    {"Pre-trained": "base", "Base": "base", "Fine-tuned (STL)": "expert", "Traditional MTL": "multitask"}
)


@dataclass(frozen=True)
class PublishedRow:
    """One printed row.

    Attributes:
        model: backbone or language model; empty where the columns name it.
        merger: of whose block it is; empty for references.
        name: as printed, for example "w/ Surgery".
        values: by column, in the table's unit; NaN where nothing is printed.
        gains: by column, as printed (two-digit gains are cut short there: "19."); empty without.
        spread: standard deviation by column; empty without.
    """

    model: str
    merger: str
    name: str
    values: Mapping[str, float]
    gains: Mapping[str, str]
    spread: Mapping[str, float]

    @property
    def part(self) -> Part:
        """The part the row plays: a reference, the merged model, FeatCal, or another calibration."""
        if self.name in _REFERENCES:
            return _REFERENCES[self.name]
        if not self.merger:
            return "single"
        if self.name == self.merger:
            return "merged"
        return "calibrated" if self.name == "w/ FeatCal" else "baseline"


@dataclass(frozen=True)
class PublishedTable:
    """One table of the paper.

    Attributes:
        label: its LaTeX label.
        number: for example "Table 1".
        title: what it shows, in a few words.
        suite: which tasks, for example "8 tasks".
        model: backbone, where all rows share one.
        columns: in the order printed.
        rows: in the order printed.
    """

    label: str
    number: str
    title: str
    suite: str
    model: str
    columns: Sequence[str]
    rows: Sequence[PublishedRow]


@dataclass(frozen=True)
class Erratum:
    """Something wrong with printed cells, or worth knowing before they are relied on.

    Attributes:
        kind: `value` a wrong cell; `average` it carries a wrong cell; `rounding` it is not the mean of the printed
            cells; `columns` task columns are permuted; `suspect` the row looks like another one; `gain` the printed
            gain is not the difference; `runs` the same quantity is printed differently elsewhere.
        table: label of the table.
        model: of the row.
        merger: of the row; empty for references.
        row: its printed name.
        columns: the cells; empty means all but the average.
        note: in a sentence.
        should_be: what ought to be printed; NaN where that is unknown.
    """

    kind: ErratumKind
    table: str
    model: str
    merger: str
    row: str
    columns: Sequence[str]
    note: str
    should_be: float

    def concerns(self, table: PublishedTable, row: PublishedRow, column: str) -> bool:
        """Whether the erratum is about this cell."""
        if (table.label, row.model, row.merger, row.name) != (self.table, self.model, self.merger, self.row):
            return False
        return column in self.columns if self.columns else column != AVERAGE


def source() -> str:
    """Title and arXiv number of the paper."""
    return str(_contents()["source"])


@functools.cache
def published_tables() -> Mapping[str, PublishedTable]:
    """Every table of the paper by its LaTeX label, in the order of the paper."""
    return MappingProxyType({label: _table(label, entry) for label, entry in _contents()["tables"].items()})


@functools.cache
def errata() -> tuple[Erratum, ...]:
    """What is known to be wrong with printed numbers, in the order of the tables."""
    return tuple(_erratum(entry) for entry in _contents()["errata"])


def notes_on(table: PublishedTable, row: PublishedRow, column: str) -> tuple[Erratum, ...]:
    """The errata about one cell."""
    return tuple(entry for entry in errata() if entry.concerns(table, row, column))


def settings() -> Sequence[Mapping[str, Any]]:
    """The settings of the paper's FeatCal rows: model, preset, lam, rho, alpha, update and n, samples per task."""
    return tuple(_contents()["settings"])


@functools.cache
def _contents() -> dict[str, Any]:
    path = pathlib.Path(__file__).with_name("published.json")
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return contents


def _table(label: str, entry: Mapping[str, Any]) -> PublishedTable:
    columns = tuple(entry["columns"])
    rows = tuple(_row(columns, entry["model"], row) for row in entry["rows"])
    return PublishedTable(
        label, entry["number"], entry["title"], entry["suite"], entry["model"], columns, rows
    )


def _row(columns: Sequence[str], model: str, entry: Mapping[str, Any]) -> PublishedRow:
    def by_column(name: str) -> dict[str, Any]:
        return dict(zip(columns, entry[name], strict=True)) if name in entry else {}

    values = {name: math.nan if value is None else value for name, value in by_column("values").items()}
    gains = {name: gain for name, gain in by_column("gains").items() if gain is not None}
    merger = entry["merger"] or ""
    return PublishedRow(entry.get("model", model), merger, entry["row"], values, gains, by_column("spread"))


def _erratum(entry: Mapping[str, Any]) -> Erratum:
    table = _contents()["tables"][entry["table"]]
    should_be = entry.get("should_be", math.nan)
    model, merger = entry.get("model", table["model"]), entry["merger"] or ""
    place = (entry["table"], model, merger, entry["row"], tuple(entry["columns"]))
    return Erratum(entry["kind"], *place, entry["note"], should_be)
