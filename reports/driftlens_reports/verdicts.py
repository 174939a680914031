"""What commands find, in plain text for the terminal: checks, comparisons, calibrations, sweeps, projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from driftlens.projection import Projection
from driftlens.records.before_after import (
    AccuracyChange,
    Outcome,
    accuracy_change_note,
    accuracy_changes,
    credit_sentences,
    final_drift_changes,
    outcomes,
    selection_sentences,
)
from driftlens.records.checks import CheckReport
from driftlens.records.compare import Comparison
from driftlens.records.equality import Equality
from driftlens.records.run import DriftRun
from driftlens.variants import calibrated, title
from driftlens_reports.columns import aligned, printable
from driftlens_reports.wording import (
    error,
    number,
    percent,
    percent_interval,
    points,
    points_interval,
    share_interval,
    with_error,
)

_SHOWN = 5
"""How many of the differences between two runs are listed."""
_OTHER_ENDS = (("warn", "warned"), ("skip", "skipped"))
_INDICATIVE = "Distances on the plane are indicative only; these numbers come from the features themselves."
_QUANTITIES = {"drift": "L2 drift", "cos": "cosine", "accuracy": "accuracy (points)"}
_INTERVAL_NOTE = (
    "Accuracy is that of test samples. Its interval takes the two answers for independent: where both answered "
    "the same samples it is too wide."
)
_FACTORS = ("lam", "rho", "alpha", "n")


def checks_text(report: CheckReport) -> str:
    """One line per check, what went wrong in words, and a count; that no check could be executed is said."""
    header = ["", "check", "value", "margin", "rows"]
    rows = [
        [result.status, result.title, _value(result.value), _value(result.margin), str(result.n)]
        for result in report.results
    ]
    lines = aligned([header, *rows], num_names=2)
    lines += [
        f"{result.status}: {result.title}: {result.reason}" for result in report.results if result.reason
    ]
    counts = [f"{report.count('pass')} passed", f"{report.count('fail')} failed"]
    counts += [f"{report.count(status)} {words}" for status, words in _OTHER_ENDS if report.count(status)]
    if not report.executed:
        counts.append("no check was executed, so nothing is known")
    return "\n".join(printable(line) for line in [*lines, ", ".join(counts)])


def comparison_text(found: Comparison) -> str:
    """Final drift, flips and accuracy before and after, task by task; what a control takes away from the gain."""
    parts = [_subject(found)]
    parts += [[f"Not the same in both: {text}" for text in found.mismatches]] if found.mismatches else []
    for (before, after), rows in found.tasks.groupby(["before", "after"], sort=False):
        parts.append([f"{title(before)} -> {title(after)}", *_task_lines(rows), *_notes(rows)])
    if found.tasks["accuracy_ci_low"].notna().any():
        parts.append([_INTERVAL_NOTE])
    if found.notes:
        parts.append([f"{note[:1].upper()}{note[1:]}." for note in found.notes])
    if len(found.gains):
        parts.append(["What rescaling alone (the anchor) and calibration each change", *_gain_lines(found)])
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts)


def equality_text(found: Equality, tolerance: float) -> str:
    """Whether two runs are equal: to the last bit, within a tolerance, or where not."""
    if found.bit_equal:
        return f"Equal to the last bit: {found.num_values} values in {len(found.tables)} tables."
    largest = f"the largest difference of a number is {error(found.largest)} of its column ({found.where})"
    if found.within(tolerance):
        return printable(f"Equal within {tolerance:g}: {largest}.")
    lines = [f"Not equal within {tolerance:g}" + (f": {largest}." if found.where else ".")]
    lines += found.unequal[:_SHOWN]
    if len(found.unequal) > _SHOWN:
        lines.append(f"and {len(found.unequal) - _SHOWN} more such differences (--json lists all)")
    return "\n".join(printable(line) for line in lines)


def projections_text(found: Sequence[Projection]) -> str:
    """How far each layout can be trusted, one line per variant; what a reader must know besides."""
    where = ["task", "layer", "method", "variant"]
    header = [*where, "points", "cosine", "L2 drift", "kept neighbours", "trust"]
    rows = [
        [
            *(entry.settings.task, str(entry.settings.layer), entry.method, title(row["variant"])),
            *(str(row["n_shown"]), number(row["mean_cosine"]), number(row["mean_drift"])),
            *(percent(row["knn_overlap"]), number(row["trustworthiness"])),
        ]
        for entry in found
        for row in entry.quality.to_dict("records")
    ]
    notes = dict.fromkeys(
        f"{entry.settings.task}, {entry.settings.method}: {text}" for entry in found for text in entry.notes
    )
    return "\n".join(
        [*aligned([header, *rows], num_names=len(where)), *map(printable, [*notes, _INDICATIVE])]
    )


def _subject(found: Comparison) -> list[str]:
    before, after = (f"{run.name} ({run.id})" for run in (found.before, found.after))
    return [before] if found.before is found.after else [f"before: {before}", f"after: {after}"]


def _task_lines(rows: pd.DataFrame) -> list[str]:
    features = ["L2 drift", "change", "95 % interval", "cosine", "change"]
    header = ["task", *features, "flips", "accuracy", "change", "95 % interval"]
    return aligned([header, *(_task_cells(row) for row in rows.to_dict("records"))], num_names=1)


def _task_cells(row: dict[Any, Any]) -> list[str]:
    flips = _arrow(percent(row["flips_before"]), percent(row["flips_after"]))
    return [
        str(row["task"]),
        _arrow(number(row["drift_before"]), number(row["drift_after"])),
        _signed_percent(row["drift_relative"]),
        percent_interval(row["drift_relative_ci_low"], row["drift_relative_ci_high"]),
        _arrow(number(row["cos_before"]), number(row["cos_after"])),
        _signed(row["cos_change"]),
        flips,
        _arrow(percent(row["accuracy_before"]), percent(row["accuracy_after"])),
        points(row["accuracy_change"]),
        points_interval(row["accuracy_ci_low"], row["accuracy_ci_high"]),
    ]


def _notes(rows: pd.DataFrame) -> list[str]:
    """Where both answered the same samples: how many each side gained, and whether that may be chance."""
    return [
        f"{row['task']}: of {row['paired_n']} {row['paired_split']} samples answered by both, {row['gained']} are "
        f"gained and {row['lost']} lost: {points(row['paired_change'])} points "
        f"({points_interval(row['paired_ci_low'], row['paired_ci_high'])}), McNemar p = {row['p_value']:.2g}"
        for row in rows.to_dict("records")
        if row["paired_n"]
    ]


def _gain_lines(found: Comparison) -> list[str]:
    header = ["task", "quantity", "change", "by rescaling", "by calibration"]
    rows = [
        [
            str(row["task"]),
            _QUANTITIES[row["quantity"]],
            *map(
                points if row["quantity"] == "accuracy" else _signed,
                (row["value_after"] - row["value_before"], row["by_rescaling"], row["by_calibration"]),
            ),
        ]
        for row in found.gains.to_dict("records")
    ]
    return aligned([header, *rows], num_names=2)


def _value(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _signed(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.4f}"


def _signed_percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:+.1f} %"


def before_after(run: DriftRun, name: str) -> pd.DataFrame:
    """The numbers of a calibration's table, one row per task and model, for showing and downloading.

    Columns: task, variant, model (what a reader calls the variant), drift (mean norm of the final drift), drift_error
    (half its 95 % interval), relative, cosine, accuracy, low, high, n. The expert has an accuracy only; what was not
    measured is NaN.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    rows = pd.DataFrame(outcomes(run, name), columns=[*Outcome.__dataclass_fields__])
    rows.insert(2, "model", rows["variant"].map(title))
    return rows


def first_numbers_text(run: DriftRun, name: str) -> str:
    """One line per task: final drift and accuracy of the merged and of the calibrated model, and nothing else.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    found = {(entry.task, entry.variant): entry for entry in outcomes(run, name)}
    rows = [["task", "L2 drift merged", title(calibrated(name)), "accuracy merged", title(calibrated(name))]]
    for task in run.tasks:
        before, after = found[task, "merged"], found[task, calibrated(name)]
        accuracies = [percent(entry.accuracy) for entry in (before, after)]
        rows.append([task, number(before.drift), number(after.drift), *accuracies])
    return "\n".join(aligned(rows, num_names=1))


def before_after_text(run: DriftRun, name: str) -> str:
    """The table, the changes of drift and accuracy, what calibration and rescaling gain, how settings were chosen.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    found = outcomes(run, name)
    drift = ["L2 drift, 95 %", "relative", "cosine"]
    rows = [["task", "model", *drift, "accuracy", "95 % interval"]]
    for at, entry in enumerate(found):
        is_first = at == 0 or found[at - 1].task != entry.task
        rows.append([entry.task if is_first else "", title(entry.variant), *_cells(entry)])
    said = [*credit_sentences(run, name), *selection_sentences(run, name)]
    changes = [*_drift_lines(run, name), *_change_lines(run, name)]
    return "\n".join([*aligned(rows, num_names=2), "", *changes, *map(printable, said)])


def _drift_lines(run: DriftRun, name: str) -> list[str]:
    """How the mean final drift of each task changes, with its interval, and an empty line."""
    rows = [
        [
            *(task, str(at.n), number(at.difference.value), f"{100 * at.relative.value:+.1f} %"),
            percent_interval(at.relative.low, at.relative.high),
        ]
        for task, at in final_drift_changes(run, name).items()
    ]
    heading = f"Change of the final L2 drift from merged to {title(calibrated(name))}, paired by sample"
    header = ["task", "samples", "change", "relative", "95 % interval"]
    return [printable(heading), *aligned([header, *rows], num_names=1), ""] if rows else []


def _change_lines(run: DriftRun, name: str) -> list[str]:
    """How the accuracy of each task changes, with intervals, and an empty line; none where it was not measured."""
    found = accuracy_changes(run, name)
    if not found:
        return []
    heading = f"Change of accuracy from merged to {title(calibrated(name))}, in points"
    tested, both = ["test samples", "change", "95 % interval"], ["answered by both", "to right", "to wrong"]
    header = ["task", *tested, *both, "change", "95 % interval", "McNemar p"]
    rows = [header, *(_change_cells(entry) for entry in found)]
    return [printable(heading), *aligned(rows, num_names=1), accuracy_change_note(found), ""]


def _change_cells(entry: AccuracyChange) -> list[str]:
    tested = (
        [str(entry.n), points(entry.change), points_interval(entry.low, entry.high)] if entry.n else [""] * 3
    )
    paired = entry.paired
    if paired is None:
        return [entry.task, *tested, *[""] * 6]
    return [
        *(entry.task, *tested, f"{paired.n} {entry.split}", str(paired.gained), str(paired.lost)),
        *(points(paired.difference), points_interval(paired.ci_low, paired.ci_high), f"{paired.p_value:.2g}"),
    ]


def _cells(entry: Outcome) -> list[str]:
    if entry.variant == "expert":  # its drift is zero by definition
        features = ["", "", ""]
    else:
        features = [with_error(entry.drift, entry.drift_error), number(entry.relative), number(entry.cosine)]
    interval = share_interval(entry.low, entry.high)
    return [*features, percent(entry.accuracy), f"{interval} %" if interval else ""]


def sweep_text(run: DriftRun, name: str) -> str:
    """The points of one sweep in the order of what is varied, and below them what the numbers are.

    Raises:
        RunError: the table can't be read.
    """
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    points = _sweep_points(rows).sort_values(name.split("+"), kind="stable")
    has_accuracy = bool(points["accuracy"].notna().any())
    scored = ["accuracy", "std"] if has_accuracy else []
    lines = [[*_FACTORS, "L2 drift", "relative", "cosine", *scored, "s"]]
    for _, point in points.iterrows():
        settings = [f"{point[factor]:g}" for factor in _FACTORS]
        features = [number(point[column]) for column in ("drift_l2_mean", "drift_rel", "cos_mean")]
        scores = [percent(point["accuracy"]), percent(point["std"])] if has_accuracy else []
        lines.append([*settings, *features, *scores, number(point["seconds"])])
    tasks, seeds = rows["task"].nunique(), rows["seed"].nunique()
    spread = "; std: between seeds" if has_accuracy and seeds > 1 else ""
    return "\n".join(
        [*aligned(lines, num_names=0), "", f"{name}: means of {tasks} tasks, {seeds} seeds{spread}"]
    )


def _sweep_points(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over tasks, then over seeds; `std` is that of the accuracy over seeds, of a sample."""
    rows = rows.astype({"n": float})
    measured = ["drift_l2_mean", "drift_rel", "cos_mean", "accuracy", "seconds"]
    by_seed = rows.groupby(["point", "seed", *_FACTORS], as_index=False)[measured].mean()
    groups = by_seed.groupby(["point", *_FACTORS])
    return groups[measured].mean().assign(std=groups["accuracy"].std()).reset_index()
