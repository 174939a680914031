"""Two runs, or two variants of one run, side by side: changes of drift, cosine, flips and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from driftlens.errors import DataError
from driftlens.files import PathLike
from driftlens.records.gains import gains
from driftlens.records.intervals import Paired, mcnemar, unpaired_difference, wilson
from driftlens.records.mismatch import mismatches
from driftlens.records.run import DriftRun, open_run
from driftlens.records.single import accuracy_of, final_value, flip_share, ratio
from driftlens.variants import part_of

__all__ = ["Comparison", "Paired", "compare", "mcnemar", "paired_accuracy", "unpaired_difference", "wilson"]


@dataclass(frozen=True)
class Comparison:
    """What changed from `before` to `after`; a change is after minus before, NaN where either was not measured.

    Attributes:
        before: the run that the first variant of each pair is taken from.
        after: the run of the second ones; the same one when two variants of one run are compared.
        pairs: the variants compared, (before, after) each.
        layers: one row per task, pair and layer: mean drift and cosine, before, after and their change.
        tasks: one row per task and pair: final drift and cosine, flips, accuracy with intervals. `accuracy_*` comes
            from test counts, with an interval that ignores that both answered the same samples (too wide if they
            did); `paired_*`, `gained`, `lost` and `p_value` come from samples answered by both, of which there are
            `paired_n` in the split `paired_split`.
        gains: one row per task and quantity where `after` is a calibration of `before` that has an anchor-only
            control: what rescaling changes, and what calibration changes beyond it, in the quantity's own unit.
        mismatches: in what the runs differ that makes changes mean something else; empty unless allowed.
    """

    before: DriftRun
    after: DriftRun
    pairs: tuple[tuple[str, str], ...]
    layers: pd.DataFrame
    tasks: pd.DataFrame
    gains: pd.DataFrame
    mismatches: tuple[str, ...]


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
        gains=gains(first, second, tasks, pairs),
        mismatches=found,
    )


def paired_accuracy(
    before: DriftRun, after: DriftRun, task: str, variants: tuple[str, str]
) -> tuple[Paired, str] | None:
    """The change of accuracy on the samples whose predictions both stored, and which split these are.

    Args:
        before: the run that answered first.
        after: the run that answered second, often the same one.
        task: the task.
        variants: the variant of each; "expert" is the task's own.

    Returns:
        None where no sample has a label and both predictions. The split reads "test" where the samples are exactly
        those of the accuracy table, "diagnosis" where they are others or fewer.

    Raises:
        DataError: no such task or variant.
        RunError: the output table can't be read.
    """
    answers = (
        _right(before, task, variants[0])
        .to_frame("before")
        .join(_right(after, task, variants[1]).rename("after"), how="inner")
    )
    if answers.empty:
        return None
    tested = before.manifest.sample_ids.get("test", {}).get(task, ())
    split = "test" if set(tested) == set(answers.index) else "diagnosis"
    return mcnemar(answers["before"].to_numpy(), answers["after"].to_numpy()), split


def _right(run: DriftRun, task: str, variant: str) -> pd.Series[Any]:
    """Whether each labelled sample was answered rightly, by sample id."""
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
    row["drift_relative"] = ratio(row["drift_change"], row["drift_before"])
    for side, run, variant in sides:
        row[f"flips_{side}"] = flip_share(run, task, variant)
    row["flips_change"] = row["flips_after"] - row["flips_before"]
    return row | _accuracy_change(sides, task) | _paired_change(first, second, task, pair)


def _accuracy_change(sides: Sequence[tuple[str, DriftRun, str]], task: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    counts: list[int] = []
    for side, run, variant in sides:
        row[f"accuracy_{side}"], row[f"n_test_{side}"] = accuracy_of(run, task, variant)
        if row[f"n_test_{side}"]:
            counts += [round(row[f"accuracy_{side}"] * row[f"n_test_{side}"]), row[f"n_test_{side}"]]
    low, high = unpaired_difference(*counts) if len(counts) == 4 else (math.nan, math.nan)
    change = row["accuracy_after"] - row["accuracy_before"]
    return row | {"accuracy_change": change, "accuracy_ci_low": low, "accuracy_ci_high": high}


def _paired_change(first: DriftRun, second: DriftRun, task: str, pair: tuple[str, str]) -> dict[str, Any]:
    found = paired_accuracy(first, second, task, pair)
    nothing = Paired(math.nan, math.nan, math.nan, math.nan, gained=0, lost=0, n=0)
    paired, split = found or (nothing, None)
    return {
        "paired_change": paired.difference,
        "paired_ci_low": paired.ci_low,
        "paired_ci_high": paired.ci_high,
        "p_value": paired.p_value,
        "gained": paired.gained,
        "lost": paired.lost,
        "paired_n": paired.n,
        "paired_split": split,
    }
