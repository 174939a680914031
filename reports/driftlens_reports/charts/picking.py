"""Selection of rows for charts: tasks, variants and layer of `ChartOptions`, and the reason if numbers are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from driftlens.results.projection import stratified_subset
from driftlens.runs.run import DriftRun, has_live_modules
from driftlens.runs.schema import EXPLAIN, TABLES
from driftlens.utils.errors import DataError, did_you_mean, pluralize
from driftlens.utils.variants import has_attribution, is_control


@dataclass(frozen=True)
class ChartOptions:
    """Options of a chart: tasks, variants, layer, scale and theme. A figure depends on these and the run only.

    Attributes:
        tasks: tasks to show; None is all.
        variants: variants to show; None is all but the base and anchor-only controls.
        layer: layer index, "final" or module path, for charts of one layer.
        relative: drift divided by the norm of the expert's feature.
        log: a logarithmic value axis, if the chart has one.
        max_points: upper limit of points; samples are thinned evenly and reproducibly.
        dark: the dark theme.
    """

    tasks: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    layer: int | str = "final"
    relative: bool = False
    log: bool = False
    max_points: int = 20_000
    dark: bool = False


def chosen_tasks(run: DriftRun, options: ChartOptions) -> list[str]:
    """Return the selected tasks in the order of the run.

    Raises:
        DataError: the run lacks one of them.
    """
    return _select_names("task", options.tasks, run.tasks)


def chosen_variants(run: DriftRun, options: ChartOptions, *, base: bool = False) -> list[str]:
    """Return the selected variants in the order of the run; by default all but the base and anchor-only controls."""
    everything = [name for name in run.variants if name != "expert"]
    if options.variants is None:
        return [name for name in everything if (base or name != "base") and not is_control(name)]
    return _select_names("variant", options.variants, everything)


def layer_rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    """Return the layer table of the selected tasks and variants; its column `where` has layer names."""
    return add_layer_names(run, select_rows(run, options, run.layers()))


def add_layer_names(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    """Add a column `where` with the layer name, such as `block 5 (layer 7 of 8)`."""
    return rows.assign(where=rows["layer"].map({layer: run.layer_name(layer) for layer in rows["layer"].unique()}))


def filter_and_sort(rows: pd.DataFrame, tasks: Sequence[str], variants: Sequence[str]) -> pd.DataFrame:
    """Return the rows of the given tasks and variants, sorted in that order and by layer."""
    places = [pd.Index(tasks).get_indexer(rows["task"]), pd.Index(variants).get_indexer(rows["variant"])]
    by = [*places, rows["layer"].to_numpy()] if "layer" in rows else places
    # Reversed, as the last key of lexsort is the primary one.
    order = np.lexsort(by[::-1])
    # -1 marks names that are not chosen.
    return rows.take(order[(places[0] >= 0)[order] & (places[1] >= 0)[order]]).reset_index(drop=True)


def rows_at_layer(
    run: DriftRun, options: ChartOptions, table: Literal["layers", "samples"], *extra: str
) -> pd.DataFrame:
    """Return table rows of the selected layer, tasks and variants, in order.

    Args:
        run: the run.
        options: the user's options.
        table: which table to read.
        extra: variants to include in addition to the chosen ones.
    """
    # A run that stopped early lists no layers; then none has rows, and none is wrong to ask for.
    layer = options.layer if run.manifest.layers else None
    rows = run.layers(layer=layer) if table == "layers" else run.samples(layer=layer)
    variants = dict.fromkeys([*extra, *chosen_variants(run, options)])
    return filter_and_sort(rows, chosen_tasks(run, options), [*variants])


def worst_task(run: DriftRun, tasks: Sequence[str], variant: str, layer: int | str = "final") -> str:
    """Return the task on which the variant has the largest mean drift; the first task if none was measured."""
    rows = run.layers(layer=layer) if run.manifest.layers else run.layers()
    rows = rows[(rows["variant"] == variant) & rows["task"].isin(tasks) & rows["drift_l2_mean"].notna()]
    return str(rows.loc[rows["drift_l2_mean"].astype(float).idxmax(), "task"]) if len(rows) else tasks[0]


def select_rows(run: DriftRun, options: ChartOptions, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the selected tasks and variants, in order."""
    return filter_and_sort(rows, chosen_tasks(run, options), chosen_variants(run, options))


def feature_name(run: DriftRun, options: ChartOptions) -> str:
    """Return the name of the selected layer's feature for use in a sentence, such as "final feature"."""
    if options.layer == "final":
        return "final feature"
    return f"feature leaving {run.layer_name(run.layer_index(options.layer))}"


def measured_outputs(run: DriftRun, options: ChartOptions, *columns: str) -> pd.DataFrame:
    """Return rows of the per-sample output table in which all `columns` are measured."""
    rows = run.outputs()
    return select_rows(run, options, rows[rows[list(columns)].notna().all(axis=1)])


def missing_data_message(
    run: DriftRun, options: ChartOptions, table: str, columns: Sequence[str], also: str = ""
) -> str | None:
    """Return None if all columns have numbers for the selection, else a message with the command that adds them.

    Args:
        run: the run.
        options: the user's options.
        table: name of the table.
        columns: required columns.
        also: a requirement on the spec, for the message.
    """
    rows, chosen = getattr(run, table)(), chosen_variants(run, options)
    if "task" in rows:
        rows = rows[rows["task"].isin(chosen_tasks(run, options))]
    # Before variants are chosen: columns that no variant has need a command, not another choice.
    nowhere = _unmeasured_columns(rows, columns)
    if "variant" in rows:
        rows = rows[rows["variant"].isin(chosen)]
    empty = _unmeasured_columns(rows, columns)
    if not empty:
        return None
    layers = run.layers()
    unexplained = {*filter(has_attribution, layers.loc[layers["jacobian_samples"].isna(), "variant"])}
    are_all = unexplained.isdisjoint(run.variants if nowhere else chosen)
    command = TABLES[table].command_to_fill(columns, is_explained=are_all)
    # An analysis with the same settings leaves out the same variants again.
    if nowhere or (command.split(" --add ")[0] == EXPLAIN and any(map(has_attribution, chosen))):
        if has_live_modules(run.manifest):
            command = "dl.analyze(...)"  # no command can open live modules
        return missing_columns_message(table, nowhere or empty, command, also)
    names = f"{', '.join(empty)} of table {table}"
    return f"{names} not measured for {', '.join(chosen)}; choose another variant."


def missing_columns_message(table: str, columns: Sequence[str], command: str = "", also: str = "") -> str:
    """Return the message that columns have no numbers, with the command that adds them.

    Args:
        table: name of the table.
        columns: columns without numbers.
        command: the command that adds them; that of the schema if empty.
        also: a requirement on the spec.
    """
    noun, these = ("column", "it") if len(columns) == 1 else ("columns", "them")
    besides = f"with {also} in the spec, " if also else ""
    command = command or TABLES[table].command_to_fill(columns)
    return f"needs {noun} {', '.join(columns)} of table {table}; {besides}`{command}` adds {these}."


def _unmeasured_columns(rows: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    return [name for name in columns if name not in rows or not rows[name].notna().any()]


def _select_names(kind: str, named: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    if named is None:
        return list(there)
    for name in named:
        require_known_name(kind, name, there)
    if not named:
        raise DataError(f"no {kind} is chosen; the run has {', '.join(there)}")
    return [name for name in there if name in named]


def require_known_name(kind: str, name: str, there: Sequence[str]) -> str:
    """Return `name`, or raise DataError with the known names of this kind."""
    if name not in there:
        problem = f"the run has no {kind} {name!r}; it has {', '.join(there) or 'none'}"
        raise DataError(problem, hint=did_you_mean(name, there))
    return name


def subsample_rows(rows: pd.DataFrame, options: ChartOptions, panels: int) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Subsample the samples so that at most `max_points` points are plotted; a sample keeps all of its rows.

    Args:
        rows: a row per plotted point.
        options: the user's options.
        panels: how many points each sample has.

    Returns:
        The rows that remain, and a note if some were dropped.
    """
    key = ["task", "sample_id"]
    samples = rows[[*key, "label"]].drop_duplicates(key)
    chosen = stratified_subset(samples, max(1, options.max_points // max(1, panels)), ["task", "label"])
    if len(chosen) == len(samples):
        return rows, ()
    present, kept = (pd.MultiIndex.from_frame(table[key]) for table in (rows, chosen))
    note = f"{len(chosen)} of {pluralize(len(samples), 'sample')} shown, of every class alike."
    return rows[present.isin(kept)].reset_index(drop=True), (note,)
