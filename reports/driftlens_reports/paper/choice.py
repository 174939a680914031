"""Which tasks and variants an exhibit shows: what the writer asked for, or what the run offers."""

from __future__ import annotations

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens.variants import control_of, part_of
from driftlens_reports.paper.exhibit import ExhibitOptions

CALIBRATE = "driftlens calibrate RUN --name featcal"
"""The command that adds a calibrated variant, as notes name it."""


def tasks_of(run: DriftRun, options: ExhibitOptions) -> tuple[str, ...]:
    """The tasks to show, in the order of the run.

    Raises:
        DataError: the run lacks one that was asked for; says which it has.
    """
    if options.tasks is None:
        return run.tasks
    for task in options.tasks:
        _check("task", task, run.tasks)
    return tuple(task for task in run.tasks if task in options.tasks)


def task_of(run: DriftRun, options: ExhibitOptions) -> str:
    """The task of an exhibit about one: the one asked for, or the one with the merged model's largest final drift.

    Raises:
        DataError: the run lacks the task that was asked for, or has no tasks.
    """
    if options.task is not None:
        _check("task", options.task, run.tasks)
        return options.task
    tasks = tasks_of(run, options)
    if not tasks:
        raise DataError(f"run {run.id} has no task to show")
    rows = run.layers(layer="final") if run.manifest.layers else run.layers()
    rows = rows[rows["task"].isin(tasks) & (rows["variant"] == "merged") & rows["drift_l2_mean"].notna()]
    return str(rows.loc[rows["drift_l2_mean"].idxmax(), "task"]) if len(rows) else tasks[0]


def calibrated_of(run: DriftRun, options: ExhibitOptions) -> str | None:
    """The variant called "calibrated": the one asked for, or the last of the run; None where there is none.

    Raises:
        DataError: the run lacks the variant that was asked for.
    """
    if options.calibrated is not None:
        _check("variant", options.calibrated, run.variants)
        return options.calibrated
    return next((name for name in reversed(run.variants) if part_of(name) == "calibrated"), None)


def anchor_of(run: DriftRun, options: ExhibitOptions) -> str | None:
    """The anchor-only control of the calibrated variant; None where there is none."""
    calibrated = calibrated_of(run, options)
    if calibrated is None:
        return None
    control = control_of(calibrated.partition(":")[2])
    return control if control in run.variants else None


def baseline_of(run: DriftRun, options: ExhibitOptions) -> str:
    """The variant that gains are counted from: the one asked for, or the anchor-only control, or `merged`.

    Raises:
        DataError: the run lacks the variant that was asked for.
    """
    if options.baseline is not None:
        _check("variant", options.baseline, run.variants)
        return options.baseline
    return anchor_of(run, options) or "merged"


def compared(run: DriftRun, options: ExhibitOptions) -> tuple[str, ...]:
    """The variants of a comparison in reading order: merged, baseline, calibrated; those that the run has."""
    wanted = dict.fromkeys(("merged", baseline_of(run, options), calibrated_of(run, options)))
    return tuple(variant for variant in wanted if variant in run.variants)


def _check(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise DataError(f"the run has no {kind} {name!r}; it has {', '.join(known) or 'none'}")
