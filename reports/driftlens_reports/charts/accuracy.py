"""Test accuracy of every variant on every task with intervals, and the mean over tasks at the end."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.per_task import Marks, averages_in_words, task_figure, with_average
from driftlens_reports.charts.picking import absent, chosen_tasks, chosen_variants, ordered
from driftlens_reports.charts.theme import SHARE, TICK_SHARE
from driftlens_reports.charts.words import counted, data_key, ranged

_NAMES = {"value": "accuracy", "ci_low": "low", "ci_high": "high"}
_MARKS = Marks(
    column="accuracy",
    title="accuracy (% of test samples)",
    number=SHARE,
    tick=TICK_SHARE,
    interval="95 &#37; Wilson interval",
    as_bars=True,
)


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.accuracy()
    # Base first and expert last: the two ends between which merges lie.
    variants = [*chosen_variants(run, options, base=True), "expert"]
    return ordered(rows[rows["metric"] == "accuracy"], chosen_tasks(run, options), variants)


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if _rows(run, options)["value"].notna().any():
        return None
    return absent("accuracy", ["value"], "driftlens evaluate RUN")


@chart(
    "accuracy",
    title="Accuracy by task",
    section="outputs",
    caption="Accuracy on the test samples of every task with 95 % Wilson intervals, from base to expert, and the mean "
    "over tasks at the end.",
    hint="Where intervals overlap widely there may be no difference. The anchor-only control shows what rescaling the "
    "merge does by itself; only what a calibration gains over it is the calibration's own. The mean over tasks hides "
    "the worst one.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Accuracy per task and variant with its interval, and the mean over tasks."""
    tasks = chosen_tasks(run, options)
    rows = _rows(run, options)[["task", "variant", "n", "seed", *_NAMES]].rename(columns=_NAMES)
    rows = with_average(rows, "accuracy", tasks, has_intervals=True)
    return Drawn(
        task_figure(run, rows, _MARKS, dark=options.dark, key=data_key(run, "accuracy", options)),
        alt=f"Accuracy over {counted(len(tasks), 'task')}: {averages_in_words(rows, 'accuracy')}.",
        data=rows,
        notes=(
            f"{ranged(rows['n'], 'test sample')} per task.",
            "Whiskers: 95 % Wilson intervals; that of the mean over tasks is over samples, of these very tasks.",
        ),
    )
