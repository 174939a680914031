"""What the tables say in sentences, and what their numbers can't tell; the charts come from the registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from driftlens.base.intervals import mean_over_tasks
from driftlens.base.metrics import ACCURACY, metric_called
from driftlens.base.variants import part_of, title
from driftlens.base.words import counted
from driftlens.findings import before_after
from driftlens.findings.arena import arena_sheet
from driftlens.findings.features import COSINE
from driftlens.findings.measures import level
from driftlens.findings.reading import Kind, brief, estimate, percent, setting_text
from driftlens.findings.swept import ABLATION, ablation_sheets
from driftlens.findings.table import Table
from driftlens.runs.run import DriftRun
from driftlens_reports import facts
from driftlens_reports.content import Figure
from driftlens_reports.facts import origin_sentence

_ALWAYS = (
    "Means hide the worst case; the tables name every task.",
    "Drift and cosine compare features with the expert's. A gain in cosine is a diagnostic, not an explanation of "
    "a gain in accuracy.",
)
_FEW = 30


def origin_sentences(run: DriftRun) -> list[str]:
    """Which layers each task's final drift comes from."""
    return [f"{origin_sentence(entry)}." for entry in facts.origins(run)]


def cosine_sentences(run: DriftRun) -> Iterator[str]:
    """The mean cosine of each variant over tasks, and the task where it is lowest."""
    for variant in run.variants:
        rows = [row for task in run.tasks if (row := level(run, COSINE, task, variant)).is_measured]
        if rows:
            mean, lowest = mean_over_tasks(rows), min(rows, key=lambda row: row.value)
            yield (
                f"{title(variant)}: mean cosine {estimate(mean, 'number', counted=True)} over "
                f"{counted(len(rows), 'task')}, lowest on {lowest.task}, {estimate(lowest, 'number')}."
            )


def accuracy_table(run: DriftRun) -> Table:
    """Scores of every variant on every task, with intervals; below them those that another tool has measured."""
    names = ("task", "variant", "metric", "value", "ci_low", "ci_high", "n")
    columns = run.accuracy()[[*names]]
    metrics = {name: metric_called(name) for name in columns["metric"].unique()}
    is_attached = [metrics[name].is_attached for name in columns["metric"]]
    columns = columns.iloc[np.argsort(is_attached, kind="stable")]
    kind: Kind = "share" if all(metric.kind == "share" for metric in metrics.values()) else "number"
    kinds: dict[str, Kind] = {
        **dict.fromkeys(("task", "model", "metric"), "text"),
        **dict.fromkeys(("value", "95 % low", "95 % high"), kind),
        "samples": "count",
    }
    rows = [columns[name] if name != "variant" else columns[name].map(title) for name in names]
    others = {name: metric for name, metric in metrics.items() if metric != ACCURACY}
    intervals = "95 % intervals" if others else "Wilson intervals"
    notes = [f"{intervals}. Each expert is scored on its own task."]
    notes += [f"{name}: {metric.described}" for name, metric in others.items()]
    heading = f"{'Scores' if others else 'Accuracy'} on test samples"
    return Table.of("accuracy", heading, kinds, [*zip(*rows, strict=True)], " ".join(notes))


def calibration_sentences(run: DriftRun) -> list[str]:
    """What each calibration was and what it changes; that there is none is said."""
    found = run.manifest.calibrations
    if not found and not any(part_of(name) == "calibrated" for name in run.variants):
        return ["The run has no calibrated variant; `driftlens calibrate RUN --name NAME` adds one."]
    return [f"{name}: {sentence}" for name in found for sentence in _of_calibration(run, name)]


def _of_calibration(run: DriftRun, name: str) -> Iterator[str]:
    info = run.manifest.calibrations[name]
    yield (
        f"{info.method} on {counted(sum(info.samples.values()), 'sample')} of {counted(len(info.samples), 'task')}, "
        f"{counted(len(info.layers), 'layer')} calibrated in {brief(info.seconds)} s."
    )
    yield from before_after.selection_sentences(run, name)
    yield from (f"{notice}." for notice in info.notices)


def calibration_tables(run: DriftRun) -> list[Table]:
    """Settings of every calibration, and its tables; methods that were taken apart."""
    found = run.manifest.calibrations
    rows = [
        (name, key, setting_text(value))
        for name, info in found.items()
        for key, value in info.settings.items()
    ]
    kinds: dict[str, Kind] = {"calibration": "text", "setting": "text", "value": "text"}
    sheets = [arena_sheet(run)] if len(found) > 1 else []
    sheets += [sheet for name in found for sheet in before_after.calibration_sheets(run, name)]
    for sweep in run.sweeps()["sweep"].unique():
        sheets += ablation_sheets(run, sweep) if sweep.endswith(ABLATION) else []
    return [Table.of("calibration-settings", "Settings", kinds, rows), *sheets]


def caveat_sentences(run: DriftRun, figures: Sequence[Figure]) -> list[str]:
    """The run's own warnings and notices, what its numbers leave open, and which of the figures are missing."""
    manifest = run.manifest
    own = [f"Warning: {text}." for text in manifest.warnings] + [
        f"Notice: {text}." for text in manifest.notices
    ]
    missing = [figure.title for figure in figures if figure.missing]
    unmeasured = [f"Not measured, so not shown: {'; '.join(missing)}."] if missing else []
    return [_ended(text) for text in (*own, *_measured(run), *_ALWAYS, *unmeasured)]


def _ended(sentence: str) -> str:
    return f"{sentence.rstrip('.')}."


def _measured(run: DriftRun) -> Iterator[str]:
    rows = run.layers()
    counts = rows["n"].dropna()
    if len(counts) and counts.min() < _FEW:
        yield f"Some rows rest on {counted(int(counts.min()), 'sample')} only"
    jacobian = rows[rows["jacobian_samples"].notna() & rows["n"].notna()]
    if len(jacobian) and (jacobian["jacobian_samples"] < jacobian["n"]).any():
        low, high = int(jacobian["jacobian_samples"].min()), int(jacobian["n"].max())
        yield f"What needs the Jacobian rests on as few as {low} of up to {counted(high, 'sample')}"
    remainder = rows["remainder_share"].astype(float).abs()
    if remainder.notna().any():
        worst = rows.iloc[int(remainder.fillna(0).to_numpy().argmax())]
        yield (
            f"Up to {percent(float(remainder.max()))} of a final drift belongs to no layer "
            f"({worst['task']}, {worst['variant']}): the remainder of the quadrature"
        )
    references = rows["reference"].dropna().unique()
    if len(references):
        yield (
            f"Local mismatch is taken on the features of: {', '.join(references)}. The other split of the drift has "
            "other parts with the same sum"
        )
    if not run.accuracy()["value"].notna().any():
        yield "No accuracy was measured, so nothing here says what the drift costs on the task"
    if len(run.tasks) == 1:
        yield "There is one task, so nothing here says how the model does on others"
