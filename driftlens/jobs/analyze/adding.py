"""Optional diagnostics that a finished run lacks, measured for the variants that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.base.diagnostic import Diagnostic, chosen, diagnostics
from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.progress import Reporter
from driftlens.jobs.analyze.causes import adjoint_columns, group_rows
from driftlens.jobs.analyze.diagnosis import TaskDiagnosis, diagnosis_of, stacked, walked
from driftlens.jobs.study.reopening import Phase
from driftlens.jobs.study.study import Study
from driftlens.runs.run import open_run
from driftlens.runs.schema import LAYERS, TABLES
from driftlens.runs.writer import RunWriter

_FOLLOWED = {"adjoint": "adjoint", "groups": "group_contributions"}
"""Options with a table of their own, which the way back through known quadratures fills."""

Drifts = Mapping[int, NDArray[np.float64]]
"""Drift norms [n] by layer."""


def addable() -> tuple[str, ...]:
    """Options of all diagnostics that can be left out of an analysis."""
    declared = [column.option for table in TABLES.values() for column in table.columns]
    return tuple(sorted({*declared, *(entry.option for entry in diagnostics.values())} - {""}))


def asking(study: Study, add: Collection[str]) -> Study:
    """The study that measures these options too; its attribution is on."""
    for name in add:
        if name not in addable():
            raise SpecError(
                f"there is no diagnostic {name!r} to add; there are {', '.join(addable())}",
                hint=did_you_mean(name, addable()),
            )
    settings = study.settings
    jacobian = settings.jacobian
    if jacobian is not None:
        named = {field: field in add for field in ("contributions", "prefix")}
        named["spectral"] = "jacobian.spectral" in add
        jacobian = dataclasses.replace(jacobian, **{name: True for name, is_on in named.items() if is_on})
    return dataclasses.replace(
        study, settings=dataclasses.replace(settings, options=settings.options | {*add}, jacobian=jacobian)
    )


def columns_of_attribution(add: Collection[str]) -> list[str]:
    """Columns of the layer table without which a variant's attribution lacks some of these options."""
    first = {column.option: column.name for column in reversed(LAYERS.columns)}
    parts = [name for name in add if name in ("contributions", "prefix", "jacobian.spectral")]
    return ["jacobian_samples", *(first[name] for name in parts)]


@dataclass(frozen=True)
class Additions:
    """The phases that measure options for variants that lack them."""

    writer: RunWriter
    study: Study
    reporter: Reporter
    add: tuple[str, ...]

    def phases(self) -> Iterator[Phase]:
        """One per option, or all of the walk and task; none where every variant has it."""
        team, tasks = self.study.team, self.study.tasks
        for option in (name for name in _FOLLOWED if name in self.add):
            table = _FOLLOWED[option]
            present = team.once(partial(self._present, table, ()))
            for task in tasks:
                lacking = [name for name in self.study.explained_variants if (task, name) not in present]
                if lacking:
                    work = partial(self._follow, option, task, lacking)
                    yield Phase(f"explain:{option}:{task}", work, self.study, again=True)
        entries = [entry for entry in chosen(self.add) if entry.option]
        for task in tasks:
            lacking = [
                name
                for name in self.study.variants
                if any((task, name) not in team.once(partial(self._has, entry)) for entry in entries)
            ]
            if lacking:
                work = partial(self._walk, task, lacking, entries)
                named = "+".join(dict.fromkeys(entry.option for entry in entries))
                yield Phase(f"explain:{named}:{task}", work, self.study, again=True)

    def _has(self, entry: Diagnostic) -> set[tuple[str, str]]:
        return self._present(entry.table, [column.name for column in entry.columns])

    def _present(self, table: str, columns: Sequence[str]) -> set[tuple[str, str]]:
        """Tasks and variants with rows in a table, and a number in one of these columns where any are named."""
        rows = getattr(open_run(self.writer.folder), table)()
        if columns:
            present = [name for name in columns if name in rows]
            rows = rows[rows[present].notna().any(axis=1)] if present else rows[:0]
        return set(zip(rows["task"], rows["variant"], strict=True))

    def _follow(self, option: str, task: str, variants: Sequence[str]) -> None:
        study, layers = self.study, open_run(self.writer.folder).layers(task)
        follow: Callable[..., Iterator[dict[str, Any]]] = (
            adjoint_columns if option == "adjoint" else group_rows
        )

        def rows_of(variant: str) -> list[dict[str, Any]]:
            rows = layers[(layers["variant"] == variant) & layers["nodes"].notna()]
            nodes = dict(zip(rows["layer"], rows["nodes"].astype(int), strict=True))
            return list(follow(study, task, variant, nodes))

        for variant in self.reporter.track(
            variants, "explain", lambda variant: f"{option} of task {task}, {variant}"
        ):
            rows = study.of_task(task, partial(rows_of, variant))
            if rows:
                frame = stacked(rows) if option == "adjoint" else pd.DataFrame(rows)
                self.writer.append(_FOLLOWED[option], frame, replace=True)

    def _walk(self, task: str, variants: Sequence[str], entries: Sequence[Diagnostic]) -> None:
        study = dataclasses.replace(self.study, variants=tuple(variants))

        def measured() -> TaskDiagnosis:
            base = None if "base" in variants else measured_drifts(self.writer, study, task)
            return diagnosis_of(study, task, walked(study, task, self.reporter), base)

        tables = study.of_task(task, measured)
        if tables is None:
            return
        frames = {"layers": pd.DataFrame(tables.layers)}
        frames |= {name: stacked(rows) for name in ("samples", "outputs") if (rows := getattr(tables, name))}
        for table, frame in frames.items():
            columns = [column for entry in entries if entry.table == table for column in entry.columns]
            if columns:
                names = [*TABLES[table].key, *(column.name for column in columns)]
                self.writer.fill(table, frame[names], columns)


def measured_drifts(writer: RunWriter, study: Study, task: str) -> Drifts | None:
    """The base's drift on a task, as the run has it; None without a base."""
    if "base" not in study.pool:
        return None
    rows = open_run(writer.folder).samples(task, "base")
    return {layer: rows["drift_l2"][rows["layer"] == layer].to_numpy() for layer in rows["layer"].unique()}
