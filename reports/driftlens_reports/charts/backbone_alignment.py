"""How each variant's task vector lies to the same task's expert's, over the whole backbone."""

from __future__ import annotations

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.per_task import Marks, averages_in_words, task_figure, with_average
from driftlens_reports.charts.picking import ANALYZE, absent, chosen_tasks, chosen_variants, needs, ordered
from driftlens_reports.charts.theme import NUMBER, TICK_NUMBER
from driftlens_reports.charts.words import counted, data_key

_NAMES = {
    "cos": "cosine of task vectors",
    "norm_ratio": "norm against the expert's",
    "sign_agreement": "share of equal signs",
}
_MARKS = Marks(
    column="cosine of task vectors",
    title="cosine of task vectors (1: same direction)",
    number=NUMBER,
    tick=TICK_NUMBER,
)


def _rows(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.params()
    rows = rows[rows["scope"] == "backbone"]
    return ordered(rows, chosen_tasks(run, options), chosen_variants(run, options))


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if _rows(run, options)["cos"].notna().any():
        return None
    return needs("params", ["cos"])(run, options) or absent("params", ["cos"], ANALYZE)


@chart(
    "backbone-alignment",
    title="Task vectors of the whole backbone",
    section="parameters",
    caption="Cosine of each variant's task vector to the same task's expert's over all parameters of the backbone at "
    "once, one number per task and variant without samples, and the mean over tasks at the end.",
    hint="A task vector is a model's weights minus the base's. Read it beside the feature cosine: features can come "
    "closer to the expert while weights do not, because calibration repairs what the merged model computes, not how "
    "its weights look.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Whole-backbone cosine per task and variant, and the mean over tasks."""
    tasks = chosen_tasks(run, options)
    rows = _rows(run, options)[["task", "variant", *_NAMES]].rename(columns=_NAMES)
    rows = with_average(rows, _MARKS.column, tasks)
    return Drawn(
        task_figure(run, rows, _MARKS, dark=options.dark, key=data_key(run, "backbone-alignment", options)),
        alt=f"Cosine of task vectors to the expert's over the whole backbone and {counted(len(tasks), 'task')}: "
        f"{averages_in_words(rows, _MARKS.column)}.",
        data=rows,
        notes=("One number per model and task; no samples are involved.",),
    )
