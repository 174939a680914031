"""Results of sweeps: means over tasks, then over draws of the samples, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from driftlens.results.measures import main_metrics
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import SWEEPS
from driftlens.utils.files import parse_json
from driftlens.utils.intervals import mean_over_draws, mean_over_tasks, share_interval
from driftlens.utils.variants import METRICS

CONTROL = "control"
# Columns of varied settings; all others are in `settings`.
FACTORS = SWEEPS.names[len(SWEEPS.key) : SWEEPS.names.index("n") + 1]


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
