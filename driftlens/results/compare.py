"""Comparison of two runs, or of two variants of one run: drift, cosine, flips and scores. Entry point: `compare`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from driftlens.results.formatting import Kind, Table, with_interval_ends
from driftlens.results.measures import (
    COSINE,
    DRIFT,
    DRIFT_CHANGE,
    FLIPS,
    drift_changes,
    feature_changes,
    has_same_samples,
    main_metrics,
    pairing_note,
    score_change,
    value_on_task,
    variant_score,
)
from driftlens.results.verdict import repairs_of, shown_repair
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import DataError
from driftlens.utils.files import PathLike
from driftlens.utils.intervals import Interval, MeanChange, PairedChange, mean_over_tasks
from driftlens.utils.variants import ACCURACY, expert_name, metric_by_name, metrics_title


@dataclass(frozen=True)
class Comparison:
    """The changes of all measures from `before` to `after` (after minus before); NaN if not measured.

    Attributes:
        before: the run of the first variant of each pair.
        after: the run of the second variant; the same run when two of its variants are compared.
        pairs: the compared variants, (before, after) each.
        layers: one row per task, pair and layer: mean drift and cosine, before, after and their change. The change of
            drift has a 95 % interval, `drift_ci_*` and, relative to the drift before, `drift_relative_ci_*`, over
            `drift_n` samples; `drift_paired` is True if it is paired by sample.
        tasks: one row per task and pair: final drift and cosine, flips, the task's main `metric` and its `score_*`.
            `score_paired` is True if the interval is paired by test sample; otherwise it comes from counts and is too
            wide. `paired_*`, `gained`, `lost` and `p_value` come from the `paired_n` samples of the split
            `paired_split` that both answered.
        mismatches: differences between the runs that change the meaning of changes; empty unless allowed.
        notes: notes on the intervals.
    """

    before: DriftRun
    after: DriftRun
    pairs: tuple[tuple[str, str], ...]
    layers: pd.DataFrame = field(repr=False)
    tasks: pd.DataFrame = field(repr=False)
    mismatches: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """Return the changes by task as HTML, for notebooks."""
        names = ["task", "before", "after", "metric", "score_before", "score_after", "score_change"]
        names += ["score_ci_low", "score_ci_high", "drift_before", "drift_after"]
        return self.tasks[names].to_html(index=False, float_format="{:.3g}".format)


def compare(
    a: DriftRun | PathLike,
    b: DriftRun | PathLike | None = None,
    *,
    before: str | None = None,
    after: str | None = None,
    allow_mismatch: bool = False,
) -> Comparison:
    """Compare run `a` with run `b`, or two variants of `a`.

    Args:
        a: the run before, or its folder.
        b: the run after; None compares two variants of `a`.
        before: variant of `a`. Default: every variant the two runs share, or "merged" within one run.
        after: variant of the run after. Default: the same as `before`, or within one run the calibration added last.
        allow_mismatch: compare common parts even if tasks, samples, classes or experts differ.

    Raises:
        DataError: a variant is missing, the runs share nothing, or they differ and that is not allowed.
        RunError: a run can't be read.
    """
    run_before = a if isinstance(a, DriftRun) else open_run(a)
    run_after = run_before if b is None else b if isinstance(b, DriftRun) else open_run(b)
    differences = mismatches(run_before, run_after)
    if differences and not allow_mismatch:
        raise DataError(
            f"the runs differ in {'; '.join(differences)}",
            hint="Their numbers are not comparable. compare(allow_mismatch=True) in Python compares the rest.",
            mismatches=differences,
        )
    pairs = _choose_variant_pairs(run_before, run_after, before, after, within=b is None)
    tasks = [task for task in run_before.tasks if task in run_after.tasks]
    if not tasks:
        raise DataError("the runs have no task in common", hint="Compare runs of the same tasks.")
    places = [(task, pair) for task in tasks for pair in pairs]
    unknown = [task for task in tasks if has_same_samples(run_before, run_after, task) is None]
    notes = (
        f"an older run does not identify its samples of {', '.join(unknown)}; intervals assume different samples",
    ) * bool(unknown)
    return Comparison(
        run_before,
        run_after,
        pairs,
        layers=pd.concat([_layer_changes(run_before, run_after, *place) for place in places], ignore_index=True),
        tasks=pd.DataFrame([_task_changes(run_before, run_after, *place) for place in places]),
        mismatches=differences,
        notes=notes,
    )


def comparison_table(rows: pd.DataFrame) -> Table:
    """Return the task rows of one pair of variants as a table; scores are in percent if all are fractions."""
    metrics = [metric_by_name(name) for name in dict.fromkeys(rows["metric"])]
    score_title = metrics_title(metrics) if len(metrics) == 1 else "score"
    is_share = all(metric.kind == "share" for metric in metrics)
    score: Kind = "share" if is_share else "number"
    change: Kind = "points" if is_share else "signed"
    columns: dict[str, tuple[Kind, str]] = {
        "task": ("text", "task"),
        **({"metric": ("text", "metric")} if len(metrics) > 1 else {}),
        **_before_after_columns("L2 drift", "number", "drift"),
        **with_interval_ends(
            *("change of drift", "relative"),
            ("drift_relative", "drift_relative_ci_low", "drift_relative_ci_high"),
        ),
        "samples": ("count", "drift_n"),
        **_before_after_columns("cosine", "number", "cos"),
        "change of cosine": ("signed", "cos_change"),
        **_before_after_columns("flips", "share", "flips"),
        **_before_after_columns(score_title, score, "score"),
        **with_interval_ends(f"change of {score_title}", change, ("score_change", "score_ci_low", "score_ci_high")),
        "test samples": ("count", "n_test_after"),
    }
    scored = rows[rows["score_ci_low"].notna()]
    note = pairing_note(dict(zip(scored["task"], scored["score_paired"], strict=True)))
    return Table.from_rows("changes", "Change by task", columns, rows.to_dict("records"), note)


def _before_after_columns(head: str, kind: Kind, name: str) -> dict[str, tuple[Kind, str]]:
    return {f"{head} {side}": (kind, f"{name}_{side}") for side in ("before", "after")}


def mean_score_change(rows: pd.DataFrame) -> Interval:
    """Return the mean score change over the tasks of one pair with its interval; NaN without a common metric."""
    ends = rows[["score_change", "score_ci_low", "score_ci_high"]].astype(float).to_numpy()
    return mean_over_tasks([Interval(*row) for row in ends] if rows["metric"].nunique() == 1 else [])


def _choose_variant_pairs(
    run_before: DriftRun, run_after: DriftRun, before: str | None, after: str | None, *, within: bool
) -> tuple[tuple[str, str], ...]:
    if within:
        before = before or "merged"
        repairs = repairs_of(run_before)
        if not after and not repairs:
            raise DataError(
                f"the run {run_before.name!r} has no calibrated variant to compare with",
                hint="`driftlens calibrate` adds one; or name two variants: `before` and `after`.",
            )
        after = after or shown_repair(run_before)
    elif before is None and after is None:
        shared = [variant for variant in run_before.variants if variant in run_after.variants]
        if not shared:
            raise DataError("the runs have no variant in common", hint="Name one of each: `before` and `after`.")
        return tuple((variant, variant) for variant in shared)
    # One name alone means the same variant in both runs.
    pair = (before or after or "", after or before or "")
    for run, variant in zip((run_before, run_after), pair, strict=True):
        run.layers(variant=variant)  # raises with the list of variants if it has no such
    return (pair,)


def _layer_changes(run_before: DriftRun, run_after: DriftRun, task: str, pair: tuple[str, str]) -> pd.DataFrame:
    columns = {"drift_l2_mean": "drift", "cos_mean": "cos"}
    sides = [
        run.layers(task, variant)[["layer", "path", *columns]].rename(columns=columns)
        for run, variant in zip((run_before, run_after), pair, strict=True)
    ]
    rows = sides[0].merge(sides[1].drop(columns="path"), on="layer", suffixes=("_before", "_after"))
    for quantity in columns.values():
        rows[f"{quantity}_change"] = rows[f"{quantity}_after"] - rows[f"{quantity}_before"]
    # NaN instead of infinity where there was no drift before.
    rows["drift_relative"] = rows["drift_change"] / rows["drift_before"].where(rows["drift_before"] != 0)
    changes = drift_changes(run_before, run_after, task, pair)
    ends = pd.DataFrame([_drift_interval_columns(changes.get(layer)) for layer in rows["layer"]])
    rows = pd.concat([rows, ends], axis=1)
    for place, (name, value) in enumerate((("task", task), ("before", pair[0]), ("after", pair[1]))):
        rows.insert(place, name, value)
    return rows


def _task_changes(run_before: DriftRun, run_after: DriftRun, task: str, pair: tuple[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"task": task, "before": pair[0], "after": pair[1]}
    sides = ((run_before, pair[0]), (run_after, pair[1]))
    for name, about in (("drift", DRIFT), ("cos", COSINE), ("flips", FLIPS)):
        start, end = (value_on_task(run, about, task, variant).value for run, variant in sides)
        row |= {f"{name}_before": start, f"{name}_after": end, f"{name}_change": end - start}
    row["drift_relative"] = row["drift_change"] / row["drift_before"] if row["drift_before"] else math.nan
    changes = feature_changes(run_before, run_after, task, pair)
    drift, relative = (changes.get(about.role) for about in (DRIFT, DRIFT_CHANGE))
    row |= _drift_interval_columns(
        MeanChange(drift, relative, is_paired=bool(drift.paired)) if drift and relative else None
    )
    # One metric for both runs, so that a change never mixes two.
    metric = main_metrics(run_before).get(task, ACCURACY)
    scores = [variant_score(run, task, variant, metric) for run, variant in sides]
    change = score_change(run_before, run_after, task, pair, metric)
    answers = change.answers or PairedChange(math.nan, math.nan, math.nan, math.nan, gained=0, lost=0, n=0)
    return row | {
        # Both counts are kept, because the runs may have different test sets.
        **{"metric": metric.name, "n_test_before": scores[0].n, "n_test_after": scores[1].n},
        **{"score_before": scores[0].value, "score_after": scores[1].value, "score_change": change.value},
        **{"score_ci_low": change.low, "score_ci_high": change.high, "score_paired": change.paired},
        **{"paired_change": answers.difference, "paired_n": answers.n, "paired_split": change.answered or None},
        **{"paired_ci_low": answers.ci_low, "paired_ci_high": answers.ci_high, "p_value": answers.p_value},
        **{"gained": answers.gained, "lost": answers.lost},
    }


def _drift_interval_columns(change: MeanChange | None) -> dict[str, Any]:
    nothing = Interval(math.nan)
    change = change or MeanChange(nothing, nothing, is_paired=False)
    both = {"drift": change.difference, "drift_relative": change.relative}
    ends = {f"{name}_ci_{end}": getattr(mean, end) for name, mean in both.items() for end in ("low", "high")}
    return {**ends, "drift_n": change.difference.n, "drift_paired": change.is_paired}


def mismatches(a: DriftRun, b: DriftRun) -> tuple[str, ...]:
    """Return descriptions of the differences between runs: tasks, layers, samples, classes, experts."""
    return () if a is b else tuple(_describe_mismatches(a, b))


def _describe_mismatches(a: DriftRun, b: DriftRun) -> Iterator[str]:
    if set(a.tasks) != set(b.tasks):
        yield f"tasks ({', '.join(a.tasks) or 'none'} against {', '.join(b.tasks) or 'none'})"
    if a.manifest.layers != b.manifest.layers:
        yield f"layers ({_describe_layer_range(a)} against {_describe_layer_range(b)})"
    for split in ("diagnosis", "test"):
        own, other = (run.manifest.sample_id_digests.get(split, {}) for run in (a, b))
        # None means that an older run recorded no origin; then ids alone decide.
        unlike = [task for task in a.tasks if task in b.tasks and has_same_samples(a, b, task, split) is False]
        yield from _describe_unequal_tasks(f"{split} samples", own, other, unlike)
    yield from _describe_unequal_tasks("class names", a.manifest.classes, b.manifest.classes)
    yield from _describe_unequal_tasks("experts", _expert_weight_digests(a), _expert_weight_digests(b))


def _expert_weight_digests(run: DriftRun) -> Mapping[str, str]:
    # By digest of the weights, as the same expert may have another path.
    models = run.manifest.models
    return {task: models[expert_name(task)].digest for task in run.tasks if expert_name(task) in models}


def _describe_unequal_tasks(
    field_name: str, a: Mapping[str, Any], b: Mapping[str, Any], unlike: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a message that names the tasks on which two runs have different values, if there are any."""
    unequal = dict.fromkeys([*unlike, *(task for task in a if task in b and a[task] != b[task])])
    if unequal:
        yield f"{field_name} of {', '.join(unequal)}"


def _describe_layer_range(run: DriftRun) -> str:
    layers = run.manifest.layers
    return f"{len(layers)} layers, {layers[0].path} to {layers[-1].path}" if layers else "none"
