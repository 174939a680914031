"""What a chart draws: the tasks and variants that its options name, and the reason when a run lacks them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens.variants import control_of, part_of
from driftlens_reports.charts.chart import ChartOptions, Missing

ANALYZE = "driftlens analyze RUN/spec.yaml --out NEW"
"""The command that measures again; a `--set` behind it asks for more."""


def chosen_tasks(run: DriftRun, options: ChartOptions) -> list[str]:
    """The tasks that the options name, in the order of the run; all of them unless they name some.

    Raises:
        DataError: one that the run has not, or none at all; says which there are.
    """
    return _chosen("task", options.tasks, run.tasks)


def chosen_variants(run: DriftRun, options: ChartOptions, *, base: bool = False) -> list[str]:
    """The variants that the options name, in the order of the run; all but the base unless they name some.

    The anchor-only control of a calibrated variant always comes along: without it a reader would credit the
    calibration with what its anchor does.

    Args:
        run: the run.
        options: what the reader chose.
        base: whether the base is among them where none are named.

    Raises:
        DataError: one that the run has not, or none at all; says which there are.
    """
    everything = [name for name in run.variants if name != "expert"]
    if options.variants is None:
        return [name for name in everything if base or name != "base"]
    named = set(_chosen("variant", options.variants, everything))
    controls = {control_of(name.partition(":")[2]) for name in named if part_of(name) == "calibrated"}
    return [name for name in everything if name in named | controls]


def layer_rows(run: DriftRun, options: ChartOptions, *, base: bool = False) -> pd.DataFrame:
    """Rows of the layer table of the chosen tasks and variants, in that order, by layer.

    Raises:
        DataError: as `chosen_tasks` and `chosen_variants`.
        RunError: the table can't be read.
    """
    return ordered(run.layers(), chosen_tasks(run, options), chosen_variants(run, options, base=base))


def ordered(rows: pd.DataFrame, tasks: Sequence[str], variants: Sequence[str]) -> pd.DataFrame:
    """The rows of these tasks and variants, in the order given, and by layer where there are layers."""
    keep = rows["task"].isin(tasks) & rows["variant"].isin(variants)
    task_at = {task: at for at, task in enumerate(tasks)}
    variant_at = {variant: at for at, variant in enumerate(variants)}
    found = rows[keep]
    places = {"task": found["task"].map(task_at), "variant": found["variant"].map(variant_at)}
    if "layer" in found:
        places["layer"] = found["layer"]
    order = pd.DataFrame(places).sort_values([*places], kind="stable").index
    return found.loc[order].reset_index(drop=True)


def needs(table: str, columns: Sequence[str], command: str = ANALYZE) -> Missing:
    """A chart's `missing`: None where every column has a number among the chosen tasks and variants.

    Args:
        table: table of the run, as in the schema.
        columns: columns the chart can't do without.
        command: adds them.
    """

    def missing(run: DriftRun, options: ChartOptions) -> str | None:
        rows = getattr(run, table)()
        if "task" in rows:
            rows = rows[rows["task"].isin(chosen_tasks(run, options))]
        of_all = rows
        if "variant" in rows:
            rows = rows[rows["variant"].isin(chosen_variants(run, options))]
        lacking = [name for name in columns if not rows[name].notna().any()]
        if not lacking:
            return None
        nowhere = [name for name in lacking if not of_all[name].notna().any()]
        return absent(table, nowhere, command) if nowhere else not_of_these(run, options, table, lacking)

    return missing


def absent(table: str, columns: Sequence[str], command: str) -> str:
    """The sentence that says which columns have no numbers, and which command adds them."""
    what, these = ("column", "it") if len(columns) == 1 else ("columns", "them")
    return f"needs {what} {', '.join(columns)} of table {table}; `{command}` adds {these}."


def not_of_these(run: DriftRun, options: ChartOptions, table: str, columns: Sequence[str]) -> str:
    """The sentence that says which columns have numbers for other variants of the run, and none for those chosen.

    No command adds them: an analysis with the same settings leaves these variants out again.
    """
    what, has = ("column", "is") if len(columns) == 1 else ("columns", "are")
    whom = ", ".join(chosen_variants(run, options))
    return (
        f"{what} {', '.join(columns)} of table {table} {has} not measured for {whom}; choose another variant."
    )


def _chosen(kind: str, named: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    if named is None:
        return list(there)
    for name in named:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else ""
            raise DataError(f"the run has no {kind} {name!r}; it has {', '.join(there)}", hint=hint)
    if not named:
        raise DataError(f"no {kind} is chosen; the run has {', '.join(there)}")
    return [name for name in there if name in named]
