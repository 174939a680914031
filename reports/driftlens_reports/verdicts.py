"""Checks, comparisons and projections in plain text, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from driftlens.projection import Projection
from driftlens.records.checks import CheckReport
from driftlens.records.compare import Comparison
from driftlens.records.equality import Equality
from driftlens.variants import title
from driftlens_reports.columns import aligned, printable
from driftlens_reports.wording import error, number, percent, percent_interval, points, points_interval

_SHOWN = 5
"""How many of the differences between two runs are listed."""
_OTHER_ENDS = (("warn", "warned"), ("skip", "skipped"))
_INDICATIVE = "Distances on the plane are indicative only; these numbers come from the features themselves."
_QUANTITIES = {"drift": "L2 drift", "cos": "cosine", "accuracy": "accuracy (points)"}
_INTERVAL_NOTE = (
    "Accuracy is that of test samples. Its interval takes the two answers for independent: where both answered "
    "the same samples it is too wide."
)


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
    header = [
        "task",
        "layer",
        "method",
        "variant",
        "points",
        "cosine",
        "L2 drift",
        "kept neighbours",
        "trust",
    ]
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
    return "\n".join([*aligned([header, *rows], num_names=4), *map(printable, [*notes, _INDICATIVE])])


def _subject(found: Comparison) -> list[str]:
    before, after = (f"{run.name} ({run.id})" for run in (found.before, found.after))
    return [before] if found.before is found.after else [f"before: {before}", f"after: {after}"]


def _task_lines(rows: pd.DataFrame) -> list[str]:
    header = [
        *("task", "L2 drift", "change", "95 % interval", "cosine", "change", "flips"),
        *("accuracy", "change", "95 % interval"),
    ]
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
