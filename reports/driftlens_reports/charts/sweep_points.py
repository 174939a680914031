"""What a sweep found, seeds and tasks taken together: the numbers behind the curves."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun

AVERAGE = "mean of tasks"


def over_seeds(rows: pd.DataFrame, setting: str, measure: str) -> pd.DataFrame:
    """Mean and standard deviation over seeds of a measure at every value of the setting, by task.

    With more than one task, the mean of tasks is a task of its own: averaged for each seed first, then over seeds. It
    is null where a task has no number: a mean of those that happen to be there would jump.

    Args:
        rows: rows of the sweep table, of one sweep.
        setting: the column that was varied.
        measure: the column that is averaged.
    """
    rows = rows.astype({setting: float, measure: float})
    parts = rows[["task", setting, "seed", measure]]
    tasks = rows["task"].nunique()
    if tasks > 1:
        by_seed = rows.groupby([setting, "seed"])[measure].agg(["mean", "count"])
        whole = by_seed["mean"].where(by_seed["count"] == tasks).rename(measure).reset_index()
        parts = pd.concat([parts, whole.assign(task=AVERAGE)])
    groups = parts.groupby(["task", setting], sort=False)[measure]
    found = pd.DataFrame({"mean": groups.mean(), "std over seeds": groups.std(), "seeds": groups.count()})
    ordered = found.reset_index().sort_values(["task", setting], kind="stable")
    return ordered.assign(sweep=setting, measure=measure)


def main_task(points: pd.DataFrame) -> str:
    """What stands for all tasks: their mean, or the only one."""
    return AVERAGE if (points["task"] == AVERAGE).any() else str(points["task"].iloc[0])


def default_of(run: DriftRun, setting: str) -> float | None:
    """The setting's value wherever others were swept, or in the run's calibrations; None if not just one."""
    rows = run.sweeps()
    is_varied = rows["sweep"].astype(str).str.split("+").map(lambda names: setting in names).astype(bool)
    values = set(rows.loc[~is_varied, setting].dropna().astype(float))
    if not values:
        infos = run.manifest.calibrations.values()
        told = [count for info in infos for count in info.samples.values()] if setting == "n" else []
        told = told or [info.settings.get(setting) for info in infos]
        values = {float(value) for value in told if isinstance(value, int | float)}
    return values.pop() if len(values) == 1 else None
