"""The tables of a run by task: all models beside each other, and how far their final features are from the experts'."""

from __future__ import annotations

from typing import Any

from driftlens.base.intervals import Interval, mean_over_tasks
from driftlens.base.metrics import ACCURACY
from driftlens.base.variants import part_of, title
from driftlens.findings.features import COSINE, DRIFT, RELATIVE
from driftlens.findings.frame import Measure
from driftlens.findings.measures import SCORE, level
from driftlens.findings.reading import Kind
from driftlens.findings.scores import main_metrics
from driftlens.findings.table import Table
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import plain


def summary_sheet(run: DriftRun) -> Table:
    """A row per task, then their mean: what base, experts, merged and calibrated models score, and their final drift.

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
        """By heading, what was measured of every model on the tasks, and its mean."""
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
    for at, (name, metric) in enumerate(zip(names, [*metrics, *metrics[:1]], strict=False)):
        cells = [column[at] for column in scores.values()]
        ends = [end for cell in cells for end in cell.ends]
        n = max((cell.n for cell in cells), default=0) or None
        rows.append([name, metric.title, n, *ends, *(column[at].value for column in drifts.values())])
    note = "95 % intervals over samples. Drift is that of the final feature, against the expert's norm."
    return Table.of("summary", f"{run.name} ({run.id})", kinds, rows, note)


def final_sheet(run: DriftRun) -> Table:
    """How far each variant's final features are from each task's expert, with intervals; the base's distance beside."""
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


def _with_half(row: Interval) -> tuple[float, float]:
    return row.value, row.high - row.value
