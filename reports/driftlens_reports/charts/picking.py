"""What a reader may choose, the rows that a chart draws of it, and the reason and the command when a run lacks them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens.variants import control_of, part_of

ANALYZE = "driftlens analyze RUN/spec.yaml --out NEW"
"""The command that measures again; a `--set` behind it asks for more."""

_OPTIONS = {
    "final_share": "metrics.contributions",
    "prefix_share": "metrics.prefix",
    "cka": "metrics.cka",
    "spectral_norm_mean": "metrics.jacobian.spectral",
    "part": "metrics.adjoint",
}
"""What a spec must ask for, by the column that it fills."""
_OWN_COMMANDS = {
    "accuracy": "driftlens evaluate RUN",
    "calibration": "driftlens calibrate RUN --name NAME",
    "sweeps": "driftlens sweep RUN --param alpha=0,0.1,0.3,1",
}
"""What fills a table that no analysis does."""


@dataclass(frozen=True)
class ChartOptions:
    """What a reader may choose. Figures depend on these and on the run, never on a selection in the browser.

    Attributes:
        tasks: only these; None is all.
        variants: only these; None is all but the base.
        layer: layer index, "final" or module path, for charts of one layer.
        band: which dispersion the band shows: the 10-90 % or 25-75 % quantiles, one standard deviation, or none.
        log: a logarithmic value axis, where the chart has one.
        relative: drift against the expert's feature norm instead of in feature units.
        baseline: the variant that gains are counted from.
        colour: what colours the points of scatters.
        method: projection of the feature scatter.
        seed: of that projection's random numbers.
        classes: the feature scatter shows only samples of these classes; None is all.
        highlight: ids of samples whose way from expert to variant the feature scatter draws.
        max_points: more are thinned out, evenly and repeatably; the notes then say so.
        dark: the dark theme.
    """

    tasks: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    layer: int | str = "final"
    band: Literal["q10-q90", "q25-q75", "std", "none"] = "q10-q90"
    log: bool = False
    relative: bool = False
    baseline: str = "merged"
    colour: Literal["role", "class", "drift"] = "role"
    method: str = "pca"
    seed: int = 0
    classes: Sequence[str] | None = None
    highlight: Sequence[str] = ()
    max_points: int = 20_000
    dark: bool = False


Missing = Callable[[DriftRun, ChartOptions], str | None]


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


def rows_at(
    run: DriftRun, options: ChartOptions, table: Literal["layers", "samples"], *, baseline: bool = False
) -> pd.DataFrame:
    """Rows of the table at the options' layer, of the chosen tasks and variants and in their order.

    Args:
        run: the run.
        options: what the reader chose.
        table: which table.
        baseline: whether the options' baseline comes along, chosen or not.

    Raises:
        DataError: an unknown task or variant.
        LayerNotFoundError: an unknown layer.
        RunError: the table can't be read.
    """
    # A run that stopped early lists no layers; then none has rows, and none is wrong to ask for.
    layer = options.layer if run.manifest.layers else None
    rows = run.layers(layer=layer) if table == "layers" else run.samples(layer=layer)
    chosen = chosen_variants(run, options)
    if baseline and options.baseline not in chosen:
        chosen = [options.baseline, *chosen]
    return ordered(rows, chosen_tasks(run, options), chosen)


def layer_name(options: ChartOptions) -> str:
    """How a sentence calls the options' layer: "final feature", "feature leaving layer 3"."""
    return "final feature" if options.layer == "final" else f"feature leaving layer {options.layer}"


def scored_samples(run: DriftRun, options: ChartOptions, *columns: str) -> pd.DataFrame:
    """Rows of the output table of the chosen tasks and variants in which all these columns are known, in their order.

    Raises:
        DataError: an unknown task or variant.
        RunError: the table can't be read.
    """
    rows = run.outputs()
    known = rows[rows[list(columns)].notna().all(axis=1)]
    return ordered(known, chosen_tasks(run, options), chosen_variants(run, options))


def unmeasured(table: str, columns: Sequence[str]) -> Missing:
    """A chart's `missing`: None where every column has a number among the chosen tasks and variants.

    Args:
        table: table of the run, as in the schema.
        columns: columns the chart can't do without.
    """

    def missing(run: DriftRun, options: ChartOptions) -> str | None:
        rows = getattr(run, table)()
        if "task" in rows:
            rows = rows[rows["task"].isin(chosen_tasks(run, options))]
        of_all = rows
        if "variant" in rows:
            rows = rows[rows["variant"].isin(chosen_variants(run, options))]
        lacking = [name for name in columns if name not in rows or not rows[name].notna().any()]
        if not lacking:
            return None
        nowhere = [name for name in lacking if name not in of_all or not of_all[name].notna().any()]
        if nowhere:
            return absent(table, nowhere, command_for(table, columns))
        return not_of_these(run, options, table, lacking)

    return missing


def needs_at(table: Literal["layers", "samples"], column: str) -> Missing:
    """A chart's `missing`: None where the column has a number at the options' layer."""

    def missing(run: DriftRun, options: ChartOptions) -> str | None:
        is_there = rows_at(run, options, table)[column].notna().any()
        return None if is_there else absent(table, [column])

    return missing


def needs_scores(
    rows_of: Callable[[DriftRun, ChartOptions], pd.DataFrame], *columns: str, also: str = "heads"
) -> Missing:
    """A chart's `missing`: None where it finds rows to draw in the output table.

    Args:
        rows_of: the rows that it draws.
        columns: of the output table, named where there are none.
        also: what the spec must give besides.
    """

    def missing(run: DriftRun, options: ChartOptions) -> str | None:
        if len(rows_of(run, options)):
            return None
        return f"needs {', '.join(columns)} of table outputs; with {also} in the spec, `{ANALYZE}` adds them."

    return missing


def command_for(table: str, columns: Sequence[str]) -> str:
    """The command that fills these columns of a table."""
    asked = (f" --set {_OPTIONS[name]}=true" for name in columns if name in _OPTIONS)
    return _OWN_COMMANDS.get(table, f"{ANALYZE}{''.join(asked)}")


def absent(table: str, columns: Sequence[str], command: str = "") -> str:
    """The sentence that says which columns have no numbers, and which command adds them."""
    what, these = ("column", "it") if len(columns) == 1 else ("columns", "them")
    command = command or command_for(table, columns)
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
