"""The numbers that the paper prints, uncorrected, what is known to be wrong with them, and whose runs are alike."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from driftlens.base.errors import RunError
from driftlens.runs import layout
from driftlens.runs.run import DriftRun
from driftlens_reports.paper.grid import AVERAGE, Block, Cell, Line, Role

ErratumKind = Literal["value", "average", "rounding", "columns", "suspect", "gain", "runs"]

Family = Literal["image", "text", "language"]

CORRUPTED: Mapping[str, str] = {
    "none": "Clean",
    "gaussian_noise:3": "Gauss.",
    "motion_blur:3": "Blur",
    "fog:3": "Fog",
}
"""What the sweep table calls the corruptions of the paper's table -> its columns."""

_METHODS = {"featcal": "FeatCal", "react": "ReACT", "svc": "SVC"}

_BACKBONE = re.compile(r"vit[-_ ]?(b|l|base|large)[-_ /]?(?:patch)?(16|32|14)", re.IGNORECASE)


@dataclass(frozen=True)
class PublishedRow:
    """One printed row by column: `values` (NaN: none printed), `gains` as printed (cut: "19."), and `spread`."""

    model: str
    merger: str
    name: str
    values: Mapping[str, float]
    gains: Mapping[str, str]
    spread: Mapping[str, float]

    @property
    def role(self) -> Role:
        """The part the row plays: a reference, the merged model, FeatCal, or another calibration."""
        if not self.merger:
            return "reference"
        if self.name == self.merger:
            return "plain"
        return "own" if self.name == "w/ FeatCal" else "other"


@dataclass(frozen=True)
class PublishedTable:
    """One table of the paper, columns and rows in the order printed; `model` is the backbone where rows share one."""

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

    `value`: a wrong cell; `average`: it carries one; `rounding`: it is not the mean of the printed cells; `columns`: of
    tasks, permuted; `suspect`: the row is like another one; `gain`: it is not the difference; `runs`: the quantity is
    printed differently elsewhere. Without `columns` it is about all but the average; `should_be` is NaN if unknown.
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


def method_title(name: str) -> str:
    """What tables call a method of calibration: ProbSurgery for `prob_surgery`."""
    return _METHODS.get(name, "".join(part[:1].upper() + part[1:] for part in name.split("_")))


def source() -> str:
    """Title and arXiv number of the paper."""
    return str(_contents()["source"])


@functools.cache
def published_tables() -> Mapping[str, PublishedTable]:
    """Every table of the paper by its LaTeX label, in the order of the paper."""
    return {
        label: PublishedTable(
            **{**entry, "label": label, "rows": [_row(entry, row) for row in entry["rows"]]}
        )
        for label, entry in _contents()["tables"].items()
    }


@functools.cache
def errata() -> tuple[Erratum, ...]:
    """What is known to be wrong with printed numbers, in the order of the tables."""
    entries = []
    for entry in _contents()["errata"]:
        usual = {"model": _contents()["tables"][entry["table"]]["model"], "should_be": math.nan}
        entries.append(Erratum(**{**usual, **entry, "merger": entry["merger"] or ""}))
    return tuple(entries)


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


def _row(table: Mapping[str, Any], entry: Mapping[str, Any]) -> PublishedRow:
    values, gains, spread = (
        dict(zip(table["columns"], entry[name], strict=True)) if name in entry else {}
        for name in ("values", "gains", "spread")
    )
    return PublishedRow(
        entry.get("model", table["model"]),
        entry["merger"] or "",
        entry["row"],
        {name: math.nan if value is None else value for name, value in values.items()},
        {name: gain for name, gain in gains.items() if gain is not None},
        spread,
    )


def printed_blocks(
    table: PublishedTable, *, columns: Sequence[str] | None = None, model: str | None = None
) -> Mapping[str, Block]:
    """The paper's blocks by merger, references first, under the empty name; an average only beside all columns."""
    shown = [name for name in table.columns if columns is None or name in columns]
    if set(shown) | {AVERAGE} == set(table.columns):
        shown = list(table.columns)
    lines: dict[str, list[Line]] = {}
    for row in table.rows:
        if model in (None, row.model):
            lines.setdefault(row.merger, []).append(_line(table, row, shown))
    return {merger: Block(tuple(block)) for merger, block in lines.items()}


def printed_cell(table: PublishedTable, row: PublishedRow, column: str) -> Cell:
    """One printed cell, with what is known to be wrong with it as its note."""
    notes = [
        entry.note if math.isnan(entry.should_be) else f"{entry.note} It should be {entry.should_be:g}."
        for entry in notes_on(table, row, column)
        if entry.columns
    ]
    return Cell(row.values[column], row.spread.get(column, math.nan), note=_told(row, f", {column}", notes))


def _line(table: PublishedTable, row: PublishedRow, columns: Sequence[str]) -> Line:
    """One printed row, with what is known to be wrong with all of it as its note."""
    cells = {column: printed_cell(table, row, column) for column in columns}
    is_headed = any(other.name == row.merger for other in table.rows)
    label = row.name if is_headed or not row.merger else f"{row.merger} {row.name}"
    whole = {entry.note: "" for name in columns for entry in notes_on(table, row, name) if not entry.columns}
    return Line(label, cells, row.role, "paper", note=_told(row, "", whole))


def _told(row: PublishedRow, where: str, notes: Iterable[str]) -> str:
    """The notes after the place they are about."""
    name = row.name if row.name == row.merger or not row.merger else f"{row.merger} {row.name}"
    return " ".join(f"{name}{where}: {note}" for note in notes)


def family(run: DriftRun) -> Family:
    """Which kind of model the run is about: of images, of texts (encoders, encoder-decoders), or decoders."""
    architecture = run.manifest.architecture
    by_loader: dict[str, Family] = {"hf-t5": "text", "hf-encoder": "text", "hf-decoder": "language"}
    usual: Family = "text" if architecture.get("reads") == "text" else "image"
    return by_loader.get(str(architecture.get("loader")), usual)


def backbone(run: DriftRun) -> str:
    """The backbone as the paper writes it, for example "B/32"; empty where the run's source doesn't say."""
    match = _BACKBONE.search(str(run.manifest.architecture.get("source", "")))
    return f"{match[1][0].upper()}/{match[2]}" if match else ""


def merger(run: DriftRun) -> str:
    """What the merge is called, as the paper writes it; "Merged" where weights were given."""
    return merger_title(str(spec_section(run, "merge").get("method", "merged")))


def merger_title(method: str) -> str:
    """What the paper calls a merge method."""
    return str(_contents()["mergers"].get(method, method.replace("_", " ").title()))


def spec_section(run: DriftRun, name: str) -> Mapping[str, Any]:
    """A section of the run's resolved spec; empty where there is none."""
    import yaml

    path = run.path / layout.SPEC
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(
            f"{path} can't be read: {error}", hint="`driftlens check` lists damaged files."
        ) from error
    return (spec.get(name) or {}) if isinstance(spec, dict) else {}


def canonical(task: str) -> str:
    """A task's name by which runs and the paper's columns can be matched."""
    plain = re.sub(r"[^a-z0-9]", "", task.lower())
    return str(_contents()["tasks"].get(plain, plain))


def titles_of(run: DriftRun, table: PublishedTable) -> Mapping[str, str]:
    """The table's column of each of the run's tasks; empty unless tasks and backbone are those of the table."""
    columns = {canonical(name): name for name in table.columns if name != AVERAGE}
    tasks = {canonical(task): task for task in run.tasks}
    if set(columns) != set(tasks) or not backbone(run) or not table.model.endswith(backbone(run)):
        return {}
    return {task: columns[name] for name, task in tasks.items()}
