"""Tables of a run for every surface: tasks, other models, scores, final drift, routes of mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from driftlens.results.formatting import Kind, Table
from driftlens.results.measures import (
    COSINE,
    DRIFT,
    RELATIVE,
    SCORE,
    Measure,
    change,
    common,
    level,
    main_metrics,
    mean,
    paired_by_task,
    pairing,
)
from driftlens.results.verdict import Gap, Verdict, shares
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import plain
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens.utils.metrics import ACCURACY
from driftlens.utils.variants import is_control, part_of, title


def task_sheet(run: DriftRun, judgement: Verdict) -> Table:
    """Return a row per task and one for their mean: every model, a change, the remaining drift, the main source."""
    if not judgement.means:
        return Table.of("tasks", "Task by task", {"task": "text"}, [])
    heads = {variant: title(variant) for variant in judgement.means}
    heads |= {variant: variant for variant in heads if [*heads.values()].count(heads[variant]) > 1}
    gap = next(
        (gap for gap in judgement.gaps if gap.against == judgement.merged), next(iter(judgement.gaps), None)
    )
    last = judgement.after if judgement.after in heads else judgement.merged
    what = f"{heads[gap.variant]} - {heads[gap.against]}" if gap else ""
    unit: Kind = "points" if judgement.measure.kind == "share" else "number"
    kinds: dict[str, Kind] = {"task": "text", **dict.fromkeys(heads.values(), judgement.measure.kind)}
    kinds |= dict.fromkeys((what, "95 % low", "95 % high"), unit) if gap else {}
    kinds |= {} if judgement.measure.role == RELATIVE.role else {"relative drift": "share"}
    sources = {task: next(iter(shares(run, judgement.merged, task).items()), None) for task in run.tasks}
    # Where all tasks have the same one, the verdict's own sentence says it.
    kinds |= {"main source": "text"} if len({source[0] for source in sources.values() if source}) > 1 else {}

    def row_of(task: str, values: Mapping[str, Interval], change: Interval | None) -> dict[str, Any]:
        row = {"task": task, **{heads[variant]: interval.value for variant, interval in values.items()}}
        ends = {what: change.value, "95 % low": change.low, "95 % high": change.high} if change else {}
        return row | ends

    rows = []
    for task in run.tasks:
        is_common = task in judgement.tasks  # elsewhere its score may be of another metric
        values = {variant: level(run, judgement.measure, task, variant) for variant in heads if is_common}
        row = row_of(task, values, gap.by_task.get(task) if gap else None)
        row["relative drift"] = level(run, RELATIVE, task, last).value
        if (largest := sources[task]) is not None:
            row["main source"] = f"{run.layer_name(largest[0])} {100 * largest[1][0].value:.0f} %"
        rows.append(row)
    if len(judgement.tasks) > 1:
        rows.append(row_of(f"mean of {len(judgement.tasks)}", judgement.means, gap.change if gap else None))
    table = [[row.get(head) for head in kinds] for row in rows]
    heading, note = (
        f"Task by task: {judgement.measure.title}",
        _note_on_tasks(run, judgement, gap, last, "main source" in kinds),
    )
    return Table.of("tasks", heading, kinds, table, note)


def _note_on_tasks(run: DriftRun, judgement: Verdict, gap: Gap | None, last: str, has_source: bool) -> str:
    """Return the note on the columns of `task_sheet` and on its intervals."""
    note = f"Relative drift is that of {title(last)} (pooled feature)"
    if judgement.source and has_source:
        num_tasks, n = len(shares(run, judgement.merged)[judgement.source.layer][1]), judgement.source.share.n
        share_n = f", n = {n // num_tasks} a task" if n else ""
        note += (
            f"; main source is the largest share of {title(judgement.merged)}'s drift (full state{share_n})"
        )
    rows = (
        [change(run, judgement.measure, task, (gap.against, gap.variant)) for task in gap.by_task]
        if gap
        else []
    )
    by_task = paired_by_task(rows)
    if judgement.measure.role == RELATIVE.role and not all(by_task.values()):
        return f"{note}."  # whose samples differ, which no single answers would mend
    return f"{note}. {pairing(by_task)}".rstrip()


def others_sheet(
    run: DriftRun, judgement: Verdict, *, controls: bool = True, everyone: bool = False
) -> Table:
    """Return means over tasks of models that the verdict leaves out: other calibrations and baselines.

    Args:
        run: the run.
        judgement: its verdict.
        controls: include anchors of calibrations.
        everyone: include all models, experts last.
    """
    is_drift = judgement.measure.role == RELATIVE.role
    rows = []
    names = [name for name in run.variants if everyone or name not in judgement.means]
    names += ["expert"] * (everyone and "expert" in judgement.means)
    for variant in (name for name in names if controls or not is_control(name)):
        means = {about.title: mean(run, about, tasks, variant) for about, tasks in common(run, [variant])}
        average, drift = (
            means.get(name, Interval(math.nan)) for name in (judgement.measure.title, RELATIVE.title)
        )
        rows.append((title(variant), *average.ends, drift.value))
    what = "mean" if is_drift else f"mean {judgement.measure.title}"
    kind = judgement.measure.kind
    kinds = {"model": "text", what: kind, "95 % low": kind, "95 % high": kind, "relative drift": "share"}
    which = "All" if everyone else "Other"
    return Table.of("others", f"{which} models, means over tasks", kinds, rows)


def summary_sheet(run: DriftRun) -> Table:
    """Return a row per task, then their mean: scores of all models, and their final drift.

    Scores have 95 % intervals; a model that was not measured has no columns.
    """
    listed = dict.fromkeys(("base", "expert", *run.variants))
    named = {name: title(name) for name in listed if part_of(name) != "baseline"}
    heads = {name: name if [*named.values()].count(head) > 1 else head for name, head in named.items()}
    metrics = [main_metrics(run).get(task, ACCURACY) for task in run.tasks]
    names = [*run.tasks]
    has_mean = len(names) > 1 and len(set(metrics)) == 1
    if has_mean:
        names.append(f"mean of {len(names)}")

    def measured(of: Measure) -> dict[str, list[Interval]]:
        """Return the values of every model on the tasks, and its mean, by heading."""
        columns = dict[str, list[Interval]]()
        for variant, head in heads.items():
            cells = [level(run, of, task, variant) for task in run.tasks]
            if any(cell.is_measured for cell in cells):
                columns[head] = [*cells, *([mean_over_tasks(cells)] if has_mean else [])]
        return columns

    scores, drifts = measured(SCORE), measured(RELATIVE)
    kind: Kind = "share" if all(metric.kind == "share" for metric in metrics) else "number"
    kinds: dict[str, Kind] = {"task": "text", "metric": "text", "test samples": "count"}
    kinds |= {f"{head}{end}": kind for head in scores for end in ("", " low", " high")}
    kinds |= {f"drift of {head}": "share" for head in drifts}
    rows: list[list[Any]] = []
    for place, (name, metric) in enumerate(zip(names, [*metrics, *metrics[:1]], strict=False)):
        cells = [column[place] for column in scores.values()]
        ends = [end for cell in cells for end in cell.ends]
        n = max((cell.n for cell in cells), default=0) or None
        rows.append([name, metric.title, n, *ends, *(column[place].value for column in drifts.values())])
    note = "95 % intervals over samples. Drift is that of the final feature, against the expert's norm."
    return Table.of("summary", f"{run.name} ({run.id})", kinds, rows, note)


def final_sheet(run: DriftRun) -> Table:
    """Return how far each variant's final features are from each task's expert, with intervals."""
    final = run.layers(layer="final") if run.manifest.layers else run.layers()
    to_base = final.set_index(["task", "variant"])["drift_vs_base"].to_dict()
    rows = []
    for task in run.tasks:
        for variant in (variant for variant in run.variants if (task, variant) in to_base):
            drift, relative, cosine = (
                level(run, about, task, variant) for about in (DRIFT, RELATIVE, COSINE)
            )
            distance = plain(to_base[task, variant])
            halves = [*_with_half(drift), *_with_half(relative), distance, *_with_half(cosine)]
            rows.append((task, title(variant), *halves, drift.n))
    return Table.of(
        "final-drift",
        "Final feature against each task's expert",
        {
            **{"task": "text", "model": "text", "L2 drift": "number", "L2 drift +-": "number"},
            **{"relative drift": "share", "relative drift +-": "share", "of base distance": "share"},
            **{"cosine": "number", "cosine +-": "number", "samples": "count"},
        },
        rows,
        "Means over diagnosis samples, with half their 95 % interval. Relative: against the norm of the expert's "
        "feature, taken as known. Of base distance: against the distance from base to expert.",
    )


def routing_sheet(run: DriftRun) -> Table:
    """Return how many tokens go to other experts of a mixture than in the expert model, and what that changes."""
    layers = run.layers()
    rows = [
        (
            row["task"],
            title(row["variant"]),
            run.layer_name(row["layer"]),
            row["rerouted"],
            row["rerouted_share"],
            row["n"],
        )
        for row in layers[layers["rerouted"].notna()].to_dict("records")
    ]
    return Table.of(
        "routing",
        "Tokens that go to other experts than in the expert model",
        {
            **{"task": "text", "model": "text", "layer": "text", "tokens sent elsewhere": "share"},
            **{"share of the drift behind it": "share", "samples": "count"},
        },
        rows,
        "The share of drift is what sending them elsewhere changes in the layer's features, projected on their drift; "
        "the rest has the same routes. Table `routing` counts the tokens of every expert.",
    )


def _with_half(row: Interval) -> tuple[float, float]:
    return row.value, row.high - row.value
