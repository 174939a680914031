"""The paper's rows as lines of our tables, and which runs belong beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from driftlens.errors import RunError
from driftlens.records import layout
from driftlens.records.run import DriftRun
from driftlens_reports.paper.grid import Block, Cell, Line, Role
from driftlens_reports.paper.published import AVERAGE, Part, PublishedRow, PublishedTable, notes_on

Family = Literal["image", "text", "language"]

_ROLES: Mapping[Part, Role] = MappingProxyType(
    {
        **dict.fromkeys(("base", "expert", "multitask", "single"), "reference"),
        **{"merged": "plain", "baseline": "other", "calibrated": "own"},
    }
)
_MERGERS = MappingProxyType(
    {
        "average": "Simple Averaging",
        "task_arithmetic": "Task Arithmetic",
        "adamerging": "AdaMerging",
        "wudi": "WUDI-Merging",
        "wudi_merging": "WUDI-Merging",
    }
)
"""Registered names of merge methods, as the paper calls them."""
_TASKS = MappingProxyType(
    {
        "stanfordcars": "cars",
        "oxfordflowers102": "flowers",
        "flowers102": "flowers",
        "fer2013": "fer",
        "oxfordiiitpet": "pets",
        "cifar100": "c100",
        "cifar10": "c10",
        "food101": "food",
        "fashionmnist": "fmnist",
        "emnistletters": "emnist",
        "renderedsst2": "rendered",
    }
)
"""Names of the data sets, letters and digits only, as the paper's column heads shorten them."""
_BACKBONE = re.compile(r"vit[-_ ]?(b|l|base|large)[-_ /]?(?:patch)?(16|32|14)", re.IGNORECASE)


def printed_blocks(
    table: PublishedTable, *, columns: Sequence[str] | None = None, model: str | None = None
) -> Mapping[str, Block]:
    """The paper's blocks by merger, in its order; references stand first, under the empty name.

    Args:
        table: which table.
        columns: only these; None is all. An average is left out unless all are shown.
        model: only rows of this model; None is all.
    """
    kept = [name for name in table.columns if columns is None or name in columns]
    if set(kept) | {AVERAGE} == set(table.columns):
        kept = list(table.columns)
    lines: dict[str, list[Line]] = {}
    for row in table.rows:
        if model in (None, row.model):
            lines.setdefault(row.merger, []).append(_line(table, row, kept))
    return {merger: Block(tuple(own)) for merger, own in lines.items()}


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
    return Line(label, cells, _ROLES[row.part], "paper", note=_told(row, "", whole))


def _told(row: PublishedRow, where: str, notes: Iterable[str]) -> str:
    """The notes after the place they are about."""
    name = row.name if row.name == row.merger or not row.merger else f"{row.merger} {row.name}"
    return " ".join(f"{name}{where}: {note}" for note in notes)


def family(run: DriftRun) -> Family:
    """Which kind of model the run is about: image classifiers, text to text, or language models."""
    adapter = str(run.manifest.architecture.get("adapter", ""))
    return "text" if adapter.startswith("t5") else "language" if adapter.startswith("llama") else "image"


def backbone(run: DriftRun) -> str:
    """The backbone as the paper writes it, for example "B/32"; empty where the run's source doesn't say."""
    found = _BACKBONE.search(str(run.manifest.architecture.get("source", "")))
    return f"{found[1][0].upper()}/{found[2]}" if found else ""


def merger(run: DriftRun) -> str:
    """What the merge is called, as the paper writes it; "Merged" where weights were given.

    Raises:
        RunError: the run's spec can't be read.
    """
    method = str(merge_spec(run).get("method", "merged"))
    return _MERGERS.get(method, method.replace("_", " ").title())


def merge_spec(run: DriftRun) -> Mapping[str, Any]:
    """The section `merge` of the run's resolved spec; empty where there is none.

    Raises:
        RunError: the spec is no YAML.
    """
    import yaml

    path = run.path / layout.SPEC
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(
            f"{path} can't be read: {error}", hint="`driftlens verify` lists damaged files."
        ) from error
    return (spec.get("merge") or {}) if isinstance(spec, dict) else {}


def canonical(task: str) -> str:
    """A task's name by which runs and the paper's columns can be matched."""
    plain = re.sub(r"[^a-z0-9]", "", task.lower())
    return _TASKS.get(plain, plain)


def titles_of(run: DriftRun, table: PublishedTable) -> Mapping[str, str]:
    """The table's column of each of the run's tasks; empty unless tasks and backbone are those of the table.

    A merge of fewer experts, or of another backbone, is another model: its numbers don't belong beside these.
    """
    columns = {canonical(name): name for name in table.columns if name != AVERAGE}
    tasks = {canonical(task): task for task in run.tasks}
    if set(columns) != set(tasks) or not backbone(run) or not table.model.endswith(backbone(run)):
        return {}
    return {task: columns[name] for name, task in tasks.items()}
