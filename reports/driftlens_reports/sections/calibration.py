"""Calibration: settings, before and after, and how much of each gain is rescaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from driftlens.records.before_after import (
    accuracy_change_note,
    accuracy_changes,
    credit_sentences,
    final_drift_changes,
    outcomes,
    selection_sentences,
)
from driftlens.records.compare import gains
from driftlens.records.manifest import CalibrationInfo
from driftlens.records.run import DriftRun
from driftlens.variants import part_of, title
from driftlens_reports.content import Kind, Table
from driftlens_reports.sections.tabulate import table

_LACKING = "The run has no calibrated variant; `driftlens calibrate RUN --name NAME` adds one."

_GAINS = {
    **{"value_before": "merged", "value_control": "anchor only", "value_after": "calibrated"},
    **{"by_rescaling": "change by rescaling", "by_calibration": "change by calibration"},
}
"""Numbers of the gains that a reader sees, and their headings."""
_TEXT: Kind = "text"
_NUMBER: Kind = "number"
_ENDS: Mapping[str, Kind] = {"95 % low": "share", "95 % high": "share"}

_QUANTITIES = {"drift": "L2 drift", "cos": "cosine", "accuracy": "accuracy"}


def calibration_sentences(run: DriftRun) -> list[str]:
    """What each calibration was, and what its gains are made of; that there is none is said."""
    found = run.manifest.calibrations
    if not found and not any(part_of(name) == "calibrated" for name in run.variants):
        return [_LACKING]
    return [sentence for name, info in found.items() for sentence in _of_calibration(run, name, info)]


def calibration_tables(run: DriftRun) -> list[Table]:
    """Settings, before and after of every calibration, and the gains split by its control."""
    names = list(run.manifest.calibrations)
    results = [build(run, name) for name in names for build in (_outcomes, _drifts, _changes, _answers)]
    return [_settings(run.manifest.calibrations), *results, _split(run)]


def _of_calibration(run: DriftRun, name: str, info: CalibrationInfo) -> Iterator[str]:
    count = sum(info.samples.values())
    yield (
        f"{name}: {info.method} on {count} samples of {len(info.samples)} tasks, "
        f"{len(info.layers)} layers calibrated in {info.seconds:.3g} s."
    )
    yield from (f"{name}: {sentence}" for sentence in selection_sentences(run, name))
    yield from (f"{name}: {sentence}" for sentence in credit_sentences(run, name))
    yield from (f"{name}: {notice}." for notice in info.notices)


def _settings(found: Mapping[str, CalibrationInfo]) -> Table:
    rows = [
        (name, setting, _text(value))
        for name, info in found.items()
        for setting, value in info.settings.items()
    ]
    kinds = dict.fromkeys(("calibration", "setting", "value"), _TEXT)
    return table("calibration-settings", "Settings", kinds, rows)


def _text(value: object) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _outcomes(run: DriftRun, name: str) -> Table:
    rows = [
        (
            entry.task,
            title(entry.variant),
            *(entry.drift, entry.drift_error, entry.relative, entry.cosine),
            *(entry.accuracy, entry.low, entry.high),
            entry.n or None,
        )
        for entry in outcomes(run, name)
    ]
    return table(
        f"before-after-{name}",
        f"{name}: before and after",
        {
            **{"task": "text", "model": "text", "L2 drift": "number", "drift +-": "number"},
            **{"relative drift": "share", "cosine": "number", "accuracy": "share", **_ENDS},
            "test samples": "count",
        },
        rows,
        note="L2 drift is a mean over diagnosis samples, followed by half its 95 % interval. Low and high are "
        "those of the accuracy on test samples. The expert has an accuracy only: its own drift is zero by definition.",
    )


def _drifts(run: DriftRun, name: str) -> Table:
    return table(
        f"drift-change-{name}",
        f"{name}: change of the final L2 drift against the merged model",
        {
            **{"task": "text", "change": "number", "95 % low": "number", "95 % high": "number"},
            **{"relative": "share", "relative low": "share", "relative high": "share", "samples": "count"},
        },
        [
            (
                *(task, at.difference.value, at.difference.low, at.difference.high),
                *(at.relative.value, at.relative.low, at.relative.high, at.n),
            )
            for task, at in final_drift_changes(run, name).items()
        ],
        note="Of the mean over diagnosis samples; intervals are Student's, paired by sample.",
    )


def _changes(run: DriftRun, name: str) -> Table:
    found = [entry for entry in accuracy_changes(run, name) if entry.n]
    return table(
        f"accuracy-change-{name}",
        f"{name}: change of accuracy against the merged model",
        {"task": "text", "change": "share", **_ENDS, "test samples": "count"},
        [(entry.task, entry.change, entry.low, entry.high, entry.n) for entry in found],
        note=f"Percentages are points of accuracy. {accuracy_change_note(found)}",
    )


def _answers(run: DriftRun, name: str) -> Table:
    return table(
        f"answers-changed-{name}",
        f"{name}: answers that changed on the samples whose answers are stored",
        {
            **{"task": "text", "split": "text", "samples": "count", "became right": "count"},
            **{"became wrong": "count", "change": "share", **_ENDS, "McNemar p": "number"},
        },
        [
            (
                *(entry.task, entry.split, entry.paired.n, entry.paired.gained, entry.paired.lost),
                *(entry.paired.difference, entry.paired.ci_low, entry.paired.ci_high, entry.paired.p_value),
            )
            for entry in accuracy_changes(run, name)
            if entry.paired is not None
        ],
        note="Percentages are points of accuracy on these samples, with Tango's interval for paired answers.",
    )


def _split(run: DriftRun) -> Table:
    is_there = "merged" in run.variants
    pairs = [("merged", name) for name in run.variants if is_there and part_of(name) == "calibrated"]
    rows = gains(run, run, run.tasks, pairs)
    return table(
        "gain-split",
        "What rescaling and calibration each change",
        {**dict.fromkeys(("task", "model", "quantity"), _TEXT), **dict.fromkeys(_GAINS.values(), _NUMBER)},
        [
            (row["task"], title(row["after"]), _QUANTITIES[row["quantity"]], *(row[name] for name in _GAINS))
            for row in rows.to_dict("records")
        ],
        note="Each in the quantity's own unit: drift in feature units, accuracy as a fraction (0.01 is one point). "
        "The two changes add up to the whole one, from merged to calibrated; opposite signs work against each other.",
    )
