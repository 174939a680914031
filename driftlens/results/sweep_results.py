"""Results of sweeps: means over tasks, then over draws of the samples, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from driftlens.results.formatting import Kind, Table, format_setting
from driftlens.results.measures import main_metrics
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import SWEEPS
from driftlens.utils.errors import pluralize
from driftlens.utils.files import parse_json
from driftlens.utils.intervals import mean_over_draws, mean_over_tasks, share_interval
from driftlens.utils.variants import METRICS, display_name

# Name of the sweep that removes one part of a method at a time; its first point is the whole method.
ABLATION = "ablation"
CONTROL = "control"
# Columns of varied settings; all others are in `settings`.
FACTORS = SWEEPS.names[len(SWEEPS.key) : SWEEPS.names.index("n") + 1]
_LEVELS = ("merged", "base", "expert")
# Column -> heading, and how values and changes of it are written.
MEASURES: dict[str, tuple[str, Kind, Kind]] = {
    "accuracy": ("accuracy", "share", "points"),
    "kl": ("KL (nat)", "number", "number"),
    "drift_rel": ("relative drift", "number", "number"),
}


def sweep_row_settings(row: Any) -> dict[str, Any]:
    """Return the calibration settings of a row of the sweep table, by name."""
    if isinstance(row["settings"], str):
        settings: dict[str, Any] = parse_json(row["settings"])
        return settings
    return {name: row[name] for name in FACTORS[:-1]}


def one_factor_sweep_name(factor: str, method: str) -> str:
    """Return the name of the sweep over one factor; prefixed by the method unless it is FeatCal."""
    return factor if method == "featcal" else f"{method}:{factor}"


def swept_methods(run: DriftRun, factor: str) -> list[str]:
    """Return the calibration methods for which a factor was swept, in the order of the sweeps."""
    names = map(str, run.sweeps()["sweep"].unique())
    return [head or "featcal" for head, _, varied in (name.rpartition(":") for name in names) if varied == factor]


def add_mean_scores(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the sweep table that have an averageable score, as a column `score`."""
    metrics = {task: metric.name for task, metric in main_metrics(run).items() if metric.is_averaged}
    scores = [row[metrics[row["task"]]] if row["task"] in metrics else math.nan for _, row in rows.iterrows()]
    rows = rows.assign(score=pd.Series(scores, rows.index, dtype=float))
    return rows[rows["score"].notna()]


def reference_mean(run: DriftRun, variant: str, measure: str, tasks: Sequence[str] = ()) -> float:
    """Return the mean of a model without sweep, as a reference line; NaN if a task is missing.

    Args:
        run: the run.
        variant: the model.
        measure: column of the sweep table.
        tasks: the tasks; all if empty.
    """
    if variant not in (*run.variants, "expert"):
        return math.nan
    if measure in METRICS:
        rows = run.accuracy(variant=variant)
        values = rows[rows["metric"] == measure].set_index("task")["value"]
    # KL and drift are distances to the expert.
    elif variant == "expert":
        return 0.0
    elif measure == "kl":
        values = run.outputs(variant=variant).groupby("task")["kl"].mean()
    else:
        values = run.layers(variant=variant, layer="final").set_index("task")[measure]
    # A mean over fewer tasks is not comparable with the sweep.
    return float(values.reindex([*(tasks or run.tasks)]).mean(skipna=False))


def mean_over_seeds(rows: pd.DataFrame, by: str, measure: str, tasks: int = 1) -> pd.DataFrame:
    """Return sweep results for every value of `by`: means over tasks, then over seeds.

    A seed that lacks one of the tasks is left out. `low` and `high` are over seeds. `tested_low` and `tested_high` of
    accuracies are over test samples: seeds share these, so their ends are averaged.

    Args:
        rows: rows of the sweep table.
        by: column that is varied.
        measure: column that is averaged.
        tasks: number of tasks.
    """
    rows = rows.astype({measure: float, "n_test": float})
    by_seed = rows.groupby([by, "seed"])
    # A mean over fewer tasks is not comparable with the others.
    is_whole = by_seed[measure].count() == tasks
    seeds = by_seed[measure].mean().where(is_whole).groupby(level=0)
    points = pd.DataFrame({"mean": seeds.mean(), "std over seeds": seeds.std(), "seeds": seeds.count()})
    ends = [mean_over_draws(values.to_numpy()).ends[1:] for _, values in seeds]
    points = points.join(pd.DataFrame(ends, points.index, columns=["low", "high"]))
    points["n_test"] = by_seed["n_test"].min().where(is_whole).groupby(level=0).min()
    points = points.assign(tested_low=math.nan, tested_high=math.nan)
    if measure in ("accuracy", "score") and rows["accuracy"].notna().all():
        shares = [share_interval(share, int(n)) for share, n in zip(rows[measure], rows["n_test"], strict=True)]
        means = pd.Series(shares, rows.index).groupby([rows[by], rows["seed"]]).agg(list).map(mean_over_tasks)
        for end in ("low", "high"):
            tested = means.map(lambda mean, end=end: getattr(mean, end)).where(is_whole)
            points[f"tested_{end}"] = tested.groupby(level=0).mean()
    return points.reset_index()


def ablation_tables(run: DriftRun, name: str) -> list[Table]:
    """Return a table per measure: the run's models, the method, and the method without each of its parts."""
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    method, settings = str(rows["method"].iloc[0]), rows.drop_duplicates("point").set_index("point")
    its: dict[Any, dict[str, Any]] = {point: sweep_row_settings(row) for point, row in settings.iterrows()}
    # The first point is the method with all of its parts.
    start = min(its)
    drawn = rows.groupby(["point", "seed"])[[*MEASURES, "seconds"]].mean()
    draws = pluralize(rows["seed"].nunique(), "draw")
    note = f"{draws}; intervals over draws (Student's t), against {method} draw by draw."
    sheets = []
    for measure, (heading, kind, change) in MEASURES.items():
        kinds: dict[str, Kind] = {"model": "text"}
        for head, how in ((heading, kind), (f"against {method}", change)):
            kinds |= {head: how, f"{head} low": how, f"{head} high": how}
        # Models without calibration have no draws, so no intervals and no seconds.
        table: list[list[Any]] = [
            [display_name(variant), reference_mean(run, variant, measure), *[math.nan] * 6] for variant in _LEVELS
        ]
        for point, settings_here in its.items():
            changed = [
                f"{key}={format_setting(value)}" for key, value in settings_here.items() if value != its[start][key]
            ]
            # Draw by draw: both points share their samples, which narrows the interval.
            reached, gaps = drawn.loc[point], drawn.loc[point] - drawn.loc[start]
            both = [mean_over_draws(values[measure].to_numpy()) for values in (reached, gaps if changed else gaps[:0])]
            ends = [end for one in both for end in one.ends]
            table.append([", ".join(changed) or method, *ends, reached["seconds"].mean()])
        if rows[measure].notna().any():
            file = f"ablation-{method}-{measure}".replace("_", "-")
            called = f"{method}, part by part: {heading}"
            sheets.append(Table.of(file, called, {**kinds, "s": "number"}, table, note))
    return sheets
