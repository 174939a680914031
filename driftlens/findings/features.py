"""How far final features of variants are from the expert's on each task, and how that changes, as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from driftlens.base.intervals import MeanChange, mean_change, mean_interval
from driftlens.findings.frame import Finding, Measure, finding
from driftlens.runs.run import DriftRun

DRIFT = Measure("final drift", "number", "higher", name="drift")
DRIFT_CHANGE = Measure("final drift against that before", "share", "higher", name="drift_change")
RELATIVE = Measure("relative drift", "share", "higher", name="relative")
COSINE = Measure("cosine to the expert", "number", "lower", name="cosine")

_COLUMNS = ["task", "variant", "drift_l2_mean", "drift_l2_std", "drift_rel", "cos_mean", "cos_std", "n"]


def feature_levels(run: DriftRun) -> Iterator[Finding]:
    """Means over diagnosis samples, with Student's interval; relative drift takes the expert's norm as known."""
    rows = run.layers(layer="final") if run.manifest.layers else run.layers()
    numbers = rows[_COLUMNS[2:]].astype(float).to_numpy().tolist()
    for task, variant, values in zip(rows["task"], rows["variant"], numbers, strict=True):
        mean, std, share, cosine, cosine_std = values[:-1]
        n = 0 if math.isnan(values[-1]) else int(values[-1])
        drift = mean_interval(mean, std, n)
        relative = replace(drift.scaled(share / mean) if mean else drift, value=share)
        by_measure = {DRIFT: drift, RELATIVE: relative, COSINE: mean_interval(cosine, cosine_std, n)}
        yield from (finding(about, at, str(task), str(variant)) for about, at in by_measure.items())


def feature_changes(
    before: DriftRun, after: DriftRun, task: str, pair: tuple[str, str], scale: float = math.nan
) -> Iterator[Finding]:
    """What changes from one variant to another, by Student's t; nothing where the samples of one are not stored.

    `scale` is relative drift by drift: the expert's norm, taken as known.
    """
    for about, column in ((DRIFT, "drift_l2"), (COSINE, "cos")) if after.manifest.layers else ():
        found = drift_changes(before, after, task, pair, column=column, layer="final")
        for change in found.values():
            rows = {about: change.difference}
            if about is DRIFT:
                rows |= {RELATIVE: change.difference.scaled(scale), DRIFT_CHANGE: change.relative}
            for of, numbers in rows.items():
                yield finding(of, numbers, task, pair[1], pair[0], paired=change.is_paired)


def same_samples(a: DriftRun, b: DriftRun, task: str, split: str = "diagnosis") -> bool | None:
    """Whether equal sample ids of two runs mean the same samples of a task; None where a run does not tell.

    Ids alone don't: two data sets may both count from 0. The runs have to say what theirs are ids of.
    """
    if a.id == b.id:
        return True
    origins = [run.manifest.sample_origins.get(split, {}).get(task) for run in (a, b)]
    return None if None in origins else origins[0] == origins[1]


def drift_changes(
    before: DriftRun,
    after: DriftRun,
    task: str,
    variants: tuple[str, str],
    *,
    column: str = "drift_l2",
    layer: int | str | None = None,
) -> dict[int, MeanChange]:
    """How the mean of a column of the sample table changes, by index of the layers that both have stored.

    Paired where both measured the very same samples, and nothing else is known to be common.
    """
    sides = [
        {at: rows.set_index("sample_id")[column] for at, rows in measured.groupby("layer")}
        for measured in (
            run.samples(task, variant, layer)[["layer", "sample_id", column]].dropna()
            for run, variant in zip((before, after), variants, strict=True)
        )
    ]
    is_same = same_samples(before, after, task)
    changes: dict[Any, MeanChange] = {}
    for index in sides[0].keys() & sides[1].keys():
        start, end = (side[index] for side in sides)
        is_paired = bool(is_same) and set(start.index) == set(end.index)
        values = (start, end.reindex(start.index) if is_paired else end)
        changes[index] = mean_change(*(each.to_numpy(dtype=float) for each in values), is_paired=is_paired)
    return changes
