"""What the points of a sweep reached: means over tasks, then over draws of the samples, with 95 % intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from driftlens.metrics import ACCURACY
from driftlens.records.intervals import over_draws
from driftlens.records.reading import Kind, Sheet
from driftlens.records.run import DriftRun
from driftlens.variants import title

ABLATION = "ablation"
"""The sweep that takes a method apart; its first point is the method as it is."""
LEVELS = ("merged", "base", "expert")
MEASURES: dict[str, tuple[str, Kind, Kind]] = {
    "accuracy": ("accuracy", "share", "points"),
    "kl": ("KL (nat)", "number", "number"),
    "drift_rel": ("relative drift", "number", "number"),
}
"""Column -> heading, and how values and changes of it are written."""


def settings_of(row: Any) -> dict[str, Any]:
    """All settings of a row of the sweep table, by name; runs before schema 1.4 tell three."""
    if isinstance(row["settings"], str):
        found: dict[str, Any] = json.loads(row["settings"])
        return found
    return {name: row[name] for name in ("lam", "rho", "alpha")}


def level(run: DriftRun, variant: str, measure: str, tasks: Sequence[str] = ()) -> float:
    """A model of the run beside which a sweep's points stand, mean of these or all tasks; NaN where one lacks it."""
    tasks = tasks or run.tasks
    if measure == "accuracy":
        rows = run.accuracy()
        rows = rows[(rows["variant"] == variant) & (rows["metric"] == ACCURACY.name)]
        values = rows.set_index("task")["value"]
    elif variant == "expert":
        return 0.0
    elif measure == "kl":
        rows = run.outputs()
        values = rows[rows["variant"] == variant].groupby("task")["kl"].mean()
    else:
        rows = run.layers(variant=variant, layer="final")
        values = rows.set_index("task")["drift_rel"]
    return float(values.reindex([*tasks]).mean(skipna=False))


def ablation_sheet(run: DriftRun, name: str) -> Sheet:
    """The run's models, the method as it is, and the method with each of its parts taken away."""
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    measures = [measure for measure in MEASURES if rows[measure].notna().any()]
    drawn = rows.groupby(["point", "seed"])[[*measures, "seconds"]].mean()
    first = rows["point"].min()
    kinds: dict[str, Kind] = {"model": "text"}
    for heading, kind, change in (MEASURES[measure] for measure in measures):
        for head, how in ((heading, kind), (f"{heading} against it", change)):
            kinds |= {head: how, f"{head} low": how, f"{head} high": how}
    found: list[list[Any]] = []
    for variant in LEVELS:
        values = ((level(run, variant, measure), *[math.nan] * 5) for measure in measures)
        found.append([title(variant), *(value for cells in values for value in cells), math.nan])
    settings = {point: settings_of(own.iloc[0]) for point, own in rows.groupby("point")}
    for point, its in settings.items():
        changed = [f"{key}={value}" for key, value in its.items() if value != settings[first][key]]
        cells: list[Any] = [", ".join(changed) or str(rows["method"].iloc[0])]
        mine, gaps = drawn.loc[point], drawn.loc[point] - drawn.loc[first]
        for measure in measures:
            for at in (mine, gaps if changed else gaps[:0]):
                one = over_draws(at[measure].to_numpy())
                cells += [one.value, one.low, one.high]
        found.append([*cells, mine["seconds"].mean()])
    note = f"{rows['seed'].nunique()} draws; intervals over draws (Student's t), against it draw by draw."
    return Sheet(ABLATION, f"{name}, part by part", {**kinds, "s": "number"}, found, note)
