"""Mean cosine to the expert's feature, task by task, with the mean over tasks at the end."""

from __future__ import annotations

from driftlens.records.run import DriftRun
from driftlens_reports.charts.at_layer import layer_name, needs_at, rows_at
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.per_task import Marks, averages_in_words, task_figure, with_average
from driftlens_reports.charts.picking import chosen_tasks
from driftlens_reports.charts.spread import spread, spread_name, spread_notes
from driftlens_reports.charts.theme import NUMBER, TICK_NUMBER
from driftlens_reports.charts.words import counted, data_key, sample_notes


@chart(
    "task-cosine",
    title="Cosine to the expert, by task",
    section="features",
    caption="Mean cosine of each variant's feature to the same task's expert's over the diagnosis samples of every "
    "task, with the whiskers over samples that the notes name, and the mean over tasks at the end.",
    hint="Higher is closer to the expert; 1 is the same direction. From merged to the anchor-only control is "
    "rescaling, the rest is calibration. Cosine ignores length: drift can shrink while the cosine stays.",
    missing=needs_at("layers", "cos_mean"),
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Mean cosine per task and variant, and the mean over tasks."""
    tasks = chosen_tasks(run, options)
    means = rows_at(run, options, "layers")[["task", "variant", "n", "cos_mean"]]
    bands = spread(rows_at(run, options, "samples"), "cos", ["task", "variant"], options)
    rows = means.merge(bands.drop(columns="mean"), on=["task", "variant"], how="left")
    rows = with_average(rows.rename(columns={"cos_mean": "mean cosine"}), "mean cosine", tasks)
    marks = Marks(
        column="mean cosine",
        title="mean cosine to the expert (1: same direction)",
        number=NUMBER,
        tick=TICK_NUMBER,
        interval=spread_name(options),
    )
    return Drawn(
        task_figure(run, rows, marks, dark=options.dark, key=data_key(run, "task-cosine", options)),
        alt=f"Mean cosine of the {layer_name(options)} to the expert's over {counted(len(tasks), 'task')}: "
        f"{averages_in_words(rows, 'mean cosine')}.",
        data=rows,
        notes=(*sample_notes(run, rows), *spread_notes(options)),
    )
