"""Two runs, or two variants of one run, side by side: changes of drift, cosine, flips and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from driftlens.base.errors import DataError
from driftlens.base.files import PathLike
from driftlens.base.intervals import (
    Interval,
    MeanChange,
    Paired,
    mcnemar,
    mean_change,
    mean_over_tasks,
    unpaired_difference,
)
from driftlens.base.metrics import ACCURACY, Metric
from driftlens.base.variants import expert_of, part_of
from driftlens.findings.reading import is_measured
from driftlens.findings.scores import change_of, main_metrics, results
from driftlens.runs.run import DriftRun, open_run, remembered

_UNMEASURED = MeanChange(Interval(math.nan), Interval(math.nan), is_paired=False)


@dataclass(frozen=True)
class Comparison:
    """What changed from `before` to `after`; a change is after minus before, NaN where either was not measured.

    Attributes:
        before: the run that the first variant of each pair is taken from.
        after: the run of the second ones; the same one when two variants of one run are compared.
        pairs: the variants compared, (before, after) each.
        layers: one row per task, pair and layer: mean drift and cosine, before, after and their change. The change of
            drift has a 95 % interval, `drift_ci_*` and, against the drift before, `drift_relative_ci_*`, over
            `drift_n` samples after; it is paired by sample where `drift_paired` says that both measured the same ones.
        tasks: one row per task and pair: final drift and cosine, flips, the `metric` that the task is judged by and its
            `score_*`, which stand as `accuracy_*` too where it is accuracy. Its interval is paired by test sample where
            `score_paired` says that both sides' single results are stored, else from the counts alone (too wide then);
            `paired_*`, `gained`, `lost` and `p_value` come from samples answered by both, of which there are `paired_n`
            in the split `paired_split`.
        mismatches: in what the runs differ that makes changes mean something else; empty unless allowed.
        notes: what a reader must know about the intervals.
    """

    before: DriftRun
    after: DriftRun
    pairs: tuple[tuple[str, str], ...]
    layers: pd.DataFrame
    tasks: pd.DataFrame
    mismatches: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """What changes on every task, for notebooks."""
        names = ["task", "before", "after", "metric", "score_before", "score_after", "score_change"]
        names += ["score_ci_low", "score_ci_high", "drift_before", "drift_after"]
        return self.tasks[names].to_html(index=False, float_format="{:.3g}".format)


@dataclass(frozen=True)
class ScoreChange:
    """How the score on one task changes; NaN where not measured.

    Attributes:
        task: the task.
        change: after minus before on test samples, of shares a fraction.
        low: lower end of its 95 % interval.
        high: upper end of its 95 % interval.
        n: test samples behind it; 0 without.
        is_paired: whether the interval rests on single results of the same samples. Without them a share's comes from
            the two shares alone, as if of different samples, and is wider than it need be.
        paired: the change of a share on samples whose answers are stored; None where none is.
        split: which samples those are, "test" or "diagnosis"; empty without.
        metric: name of what changes.
        before: the score before.
        after: the score after.
    """

    task: str
    change: float
    low: float
    high: float
    n: int
    is_paired: bool
    paired: Paired | None
    split: str
    metric: str
    before: Interval
    after: Interval


def compare(
    a: DriftRun | PathLike,
    b: DriftRun | PathLike | None = None,
    *,
    before: str | None = None,
    after: str | None = None,
    allow_mismatch: bool = False,
) -> Comparison:
    """What changes from run `a` to run `b`, or from one variant of `a` to another.

    Args:
        a: the run before, or its folder.
        b: the run after; None compares two variants of `a`.
        before: variant of `a`. Left out: every variant the two runs share, or "merged" within one run.
        after: variant of the run after. Left out: the one called like `before`, or within one run the calibration
            added last.
        allow_mismatch: whether to go on where tasks, samples, classes or experts differ; what both have is compared.

    Raises:
        DataError: a variant is not there; nothing is shared; or something differs and that is not allowed.
        RunError: a run can't be read.
    """
    first = a if isinstance(a, DriftRun) else open_run(a)
    second = first if b is None else b if isinstance(b, DriftRun) else open_run(b)
    found = mismatches(first, second)
    if found and not allow_mismatch:
        raise DataError(
            f"the runs differ in {'; '.join(found)}",
            hint="Such numbers are no before and after. --allow-mismatch compares what both have.",
            mismatches=found,
        )
    pairs = _pairs(first, second, before, after, within=b is None)
    tasks = [task for task in first.tasks if task in second.tasks]
    if not tasks:
        raise DataError("the runs have no task in common", hint="Compare runs of the same tasks.")
    return Comparison(
        first,
        second,
        pairs,
        layers=pd.concat(
            [_layer_rows(first, second, task, pair) for task in tasks for pair in pairs], ignore_index=True
        ),
        tasks=pd.DataFrame([_task_row(first, second, task, pair) for task in tasks for pair in pairs]),
        mismatches=found,
        notes=tuple(_unverified(first, second, tasks)),
    )


def mean_score_change(rows: pd.DataFrame) -> Interval:
    """The mean over the tasks of one pair, each with its own interval; NaN where metrics differ, or one is missing."""
    ends = rows[["score_change", "score_ci_low", "score_ci_high"]].astype(float).to_numpy()
    return mean_over_tasks([Interval(*at) for at in ends] if rows["metric"].nunique() == 1 else [])


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
    """How the mean drift changes, by index of the layer; layers that one of them did not store are left out.

    Paired where both measured the very same samples, and nothing else is known to be common.

    Args:
        before: the run measured first.
        after: the run measured second, often the same one.
        task: the task.
        variants: the variant of each.
        column: of the sample table; "cos" for the mean cosine instead.
        layer: only this one, as `DriftRun.samples` takes it.

    Raises:
        DataError: no such task or variant.
        RunError: the sample table can't be read.
    """
    sides = [
        {at: rows.set_index("sample_id")[column] for at, rows in found.groupby("layer")}
        for found in (
            run.samples(task, variant, layer)[["layer", "sample_id", column]].dropna()
            for run, variant in zip((before, after), variants, strict=True)
        )
    ]
    is_same = same_samples(before, after, task)
    changes: dict[Any, MeanChange] = {}
    for at in sides[0].keys() & sides[1].keys():
        start, end = (side[at] for side in sides)
        is_paired = bool(is_same) and set(start.index) == set(end.index)
        values = (start, end.reindex(start.index) if is_paired else end)
        changes[at] = mean_change(*(v.to_numpy(dtype=float) for v in values), is_paired=is_paired)
    return changes


def paired_answers(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str], metric: Metric = ACCURACY
) -> tuple[Paired, str] | None:
    """The change of a share of right answers on the samples that both stored, and which split these are.

    Args:
        before: the run that answered first.
        after: the run that answered second, often the same one.
        task: the task.
        variants: the variant of each; "expert" is the task's own.
        metric: what is asked.

    Returns:
        None where the metric is no share, no sample has both answers, or the runs are not known to have the same
        samples. The split reads "test" where single results of test samples are stored, or, by runs older than these,
        where the labelled diagnosis samples are exactly the test samples; else "diagnosis".

    Raises:
        DataError: no such task or variant.
        RunError: a table can't be read.
    """
    splits = ("test", "diagnosis") if metric == ACCURACY else ("test",)
    for split in splits if metric.kind == "share" else ():
        if not same_samples(before, after, task, split):
            continue
        sides = zip((before, after), variants, strict=True)
        start, end = (_right(run, task, variant, metric, split) for run, variant in sides)
        answers = start.to_frame("before").join(end.rename("after"), how="inner")
        if len(answers):
            origins = [before.manifest.sample_origins.get(at, {}).get(task) for at in ("test", "diagnosis")]
            tested = set(before.manifest.sample_ids.get("test", {}).get(task, ()))
            is_test = origins[0] == origins[1] and tested == set(answers.index)
            found = mcnemar(*(answers[side].to_numpy(dtype=bool) for side in answers))
            return found, "test" if is_test else split
    return None


def changed_score(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str], metric: Metric
) -> ScoreChange:
    """How a score changes: by the single results of the same test samples where they are stored, else by the counts.

    Arguments and errors as for `paired_answers`.
    """
    sides = list(zip((before, after), variants, strict=True))
    start, end = (score_of(run, task, variant, metric) for run, variant in sides)
    paired, split = paired_answers(before, after, task, variants, metric) or (None, "")
    change, is_paired = Interval(end.value - start.value), False
    if paired is not None and split == "test" and paired.n == start.n == end.n:
        is_paired, change = True, Interval(paired.difference, paired.ci_low, paired.ci_high)
    elif start.n and end.n and metric.kind == "share":
        counts = (round(start.value * start.n), start.n, round(end.value * end.n), end.n)
        change = Interval(change.value, *unpaired_difference(*counts))
    elif start.n and end.n and same_samples(before, after, task, "test"):
        rows, others = (results(run, task, variant, metric) for run, variant in sides)
        if len(rows) and set(rows.index) == set(others.index):
            columns = rows["value"], others["value"].reindex(rows.index), rows["reference"]
            change = change_of(metric, *(column.to_numpy(dtype=float) for column in columns))
            is_paired = is_measured(change.low)
    n, ends = end.n if is_measured(change.value) else 0, (change.value, change.low, change.high)
    return ScoreChange(task, *ends, n, is_paired, paired, split, metric.name, start, end)


@remembered
def _right(run: DriftRun, task: str, variant: str, metric: Metric, split: str) -> pd.Series[Any]:
    """Whether each test sample, or each labelled diagnosis sample, was answered rightly, by sample id."""
    if split == "test":
        return results(run, task, variant, metric)["value"] == 1
    rows = run.outputs(task=task, variant=None if variant == "expert" else variant)
    answer = "expert_pred" if variant == "expert" else "pred"
    rows = rows[rows["label"].notna() & rows[answer].notna()].drop_duplicates("sample_id")
    return pd.Series((rows["label"] == rows[answer]).to_numpy(dtype=bool), index=rows["sample_id"])


def _pairs(
    first: DriftRun, second: DriftRun, before: str | None, after: str | None, *, within: bool
) -> tuple[tuple[str, str], ...]:
    if within:
        before = before or "merged"
        after = after or _last_calibration(first)
    elif before is None and after is None:
        shared = [variant for variant in first.variants if variant in second.variants]
        if not shared:
            raise DataError(
                "the runs have no variant in common", hint="Name one of each: --before and --after."
            )
        return tuple((variant, variant) for variant in shared)
    pair = (before or after or "", after or before or "")
    for run, variant in zip((first, second), pair, strict=True):
        run.layers(variant=variant)  # says which variants there are when this is none
    return (pair,)


def _last_calibration(run: DriftRun) -> str:
    calibrations = [variant for variant in run.variants if part_of(variant) == "calibrated"]
    if not calibrations:
        raise DataError(
            f"the run {run.name!r} has no calibrated variant to compare with",
            hint="`driftlens calibrate` adds one; or name two variants: --before and --after.",
        )
    return calibrations[-1]


def _layer_rows(first: DriftRun, second: DriftRun, task: str, pair: tuple[str, str]) -> pd.DataFrame:
    columns = {"drift_l2_mean": "drift", "cos_mean": "cos"}
    sides = [
        run.layers(task, variant)[["layer", "path", *columns]].rename(columns=columns)
        for run, variant in zip((first, second), pair, strict=True)
    ]
    rows = sides[0].merge(sides[1].drop(columns="path"), on="layer", suffixes=("_before", "_after"))
    for quantity in columns.values():
        rows[f"{quantity}_change"] = rows[f"{quantity}_after"] - rows[f"{quantity}_before"]
    rows["drift_relative"] = rows["drift_change"] / rows["drift_before"].where(rows["drift_before"] != 0)
    changes = drift_changes(first, second, task, pair)
    ends = pd.DataFrame([_ends(changes.get(layer, _UNMEASURED)) for layer in rows["layer"]])
    rows = pd.concat([rows, ends], axis=1)
    for place, (name, value) in enumerate((("task", task), ("before", pair[0]), ("after", pair[1]))):
        rows.insert(place, name, value)
    return rows


def _task_row(first: DriftRun, second: DriftRun, task: str, pair: tuple[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"task": task, "before": pair[0], "after": pair[1]}
    sides = list(zip(("before", "after"), (first, second), pair, strict=True))
    for quantity, column in (("drift", "drift_l2_mean"), ("cos", "cos_mean")):
        for side, run, variant in sides:
            row[f"{quantity}_{side}"] = final_value(run, task, variant, column)
        row[f"{quantity}_change"] = row[f"{quantity}_after"] - row[f"{quantity}_before"]
    row["drift_relative"] = row["drift_change"] / row["drift_before"] if row["drift_before"] else math.nan
    changes = drift_changes(first, second, task, pair) if second.manifest.layers else {}
    row |= _ends(changes.get(second.layer_index("final"), _UNMEASURED) if changes else _UNMEASURED)
    for side, run, variant in sides:
        row[f"flips_{side}"] = flip_share(run, task, variant)
    row["flips_change"] = row["flips_after"] - row["flips_before"]
    metric = main_metrics(first).get(task, ACCURACY)
    return row | _score_change(changed_score(first, second, task, pair, metric))


def _ends(change: MeanChange) -> dict[str, Any]:
    found = {"drift": change.difference, "drift_relative": change.relative}
    ends = {f"{name}_ci_{end}": getattr(of, end) for name, of in found.items() for end in ("low", "high")}
    return {**ends, "drift_n": change.difference.n, "drift_paired": change.is_paired}


def _score_change(found: ScoreChange) -> dict[str, Any]:
    row = {"before": found.before.value, "after": found.after.value, "change": found.change}
    row |= {"ci_low": found.low, "ci_high": found.high}
    is_accuracy = found.metric == ACCURACY.name
    nothing = Paired(math.nan, math.nan, math.nan, math.nan, gained=0, lost=0, n=0)
    paired = found.paired or nothing
    return {
        **{"metric": found.metric, "n_test_before": found.before.n, "n_test_after": found.after.n},
        **{f"score_{name}": value for name, value in row.items()},
        # Under this name nobody may find anything else.
        **{f"accuracy_{name}": value if is_accuracy else math.nan for name, value in row.items()},
        "score_paired": found.is_paired,
        "paired_change": paired.difference,
        "paired_ci_low": paired.ci_low,
        "paired_ci_high": paired.ci_high,
        "p_value": paired.p_value,
        "gained": paired.gained,
        "lost": paired.lost,
        "paired_n": paired.n,
        "paired_split": found.split or None,
    }


def _unverified(a: DriftRun, b: DriftRun, tasks: Sequence[str]) -> Iterator[str]:
    unknown = [task for task in tasks if same_samples(a, b, task) is None]
    if unknown:
        yield (
            f"whether both runs measured the same samples of {', '.join(unknown)} can't be verified, as one was "
            "written before runs said what their sample ids are ids of: intervals take the samples for different ones"
        )


def final_value(run: DriftRun, task: str, variant: str, column: str) -> float:
    """One number of the layer table's last row of a task and variant; the expert has no rows.

    Raises:
        DataError: no such task or variant.
        RunError: the table can't be read.
    """
    rows = run.layers(task, variant, "final")
    return float(rows[column].iloc[0]) if len(rows) else math.nan


def flip_share(run: DriftRun, task: str, variant: str) -> float:
    """Share of diagnosis samples that the variant decides otherwise than the expert. Errors as above."""
    flipped = run.outputs(task, variant)["flipped"].dropna().to_numpy(dtype=bool)
    return float(np.mean(flipped)) if len(flipped) else math.nan


@remembered
def score_of(run: DriftRun, task: str, variant: str, metric: Metric) -> Interval:
    """A variant's score on test samples with its interval and their number; NaN and 0 without. Errors as above."""
    rows = run.accuracy(task, variant)
    rows = rows[(rows["metric"] == metric.name) & rows["value"].notna() & rows["n"].notna()]
    if rows.empty:
        return Interval(math.nan)
    value, low, high, n = rows[["value", "ci_low", "ci_high", "n"]].astype(float).iloc[0]
    return Interval(value, low, high, int(n))


def mismatches(a: DriftRun, b: DriftRun) -> tuple[str, ...]:
    """The fields in which runs differ, in words: tasks, layers, samples, classes, experts; empty where none does.

    Calibration samples may differ: that is what calibrations are compared for.
    """
    return () if a is b else tuple(_differences(a, b))


def _differences(a: DriftRun, b: DriftRun) -> Iterator[str]:
    if set(a.tasks) != set(b.tasks):
        yield f"tasks ({', '.join(a.tasks) or 'none'} against {', '.join(b.tasks) or 'none'})"
    if a.manifest.layers != b.manifest.layers:
        yield f"layers ({_chain(a)} against {_chain(b)})"
    shared = [task for task in a.tasks if task in b.tasks]
    for split in ("diagnosis", "test"):
        ids, other_ids = (run.manifest.sample_id_digests.get(split, {}) for run in (a, b))
        others = [task for task in shared if same_samples(a, b, task, split) is False]
        yield from _differing(f"{split} samples", shared, ids, other_ids, others)
    yield from _differing("class names", shared, a.manifest.classes, b.manifest.classes)
    yield from _differing("experts", shared, _experts(a), _experts(b))


def _differing(
    what: str, tasks: list[str], a: Mapping[str, Any], b: Mapping[str, Any], others: Sequence[str] = ()
) -> Iterator[str]:
    """Tasks on which both runs say something, and not the same."""
    unequal = [task for task in tasks if task in others or (task in a and task in b and a[task] != b[task])]
    if unequal:
        yield f"{what} of {', '.join(unequal)}"


def _experts(run: DriftRun) -> Mapping[str, str]:
    models = run.manifest.models
    return {task: models[expert_of(task)].digest for task in run.tasks if expert_of(task) in models}


def _chain(run: DriftRun) -> str:
    layers = run.manifest.layers
    return f"{len(layers)} layers, {layers[0].path} to {layers[-1].path}" if layers else "none"
