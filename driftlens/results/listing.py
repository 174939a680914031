"""The runs in a folder, one line each; a run that can't be read keeps its line and says why."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from driftlens.results.measures import (
    DRIFT,
    RELATIVE,
    SCORE,
    common_measures,
    main_metrics,
    mean_on_tasks,
    value_on_task,
)
from driftlens.results.verdict import shown_repair
from driftlens.runs.manifest import LOCK, MANIFEST, STATUS, Manifest
from driftlens.runs.notes import read_notes
from driftlens.runs.run import DriftRun, current_state, has_live_modules, open_run, unfinished_work
from driftlens.utils.errors import DriftLensError, RunError
from driftlens.utils.files import PathLike


@dataclass(frozen=True)
class RunSummary:
    """One entry of a list of runs; of an unreadable run only the folder's name, `problem` and `hint`.

    Attributes:
        state: see `current_state`; "unreadable" with a `problem`.
        final_drift: mean L2 drift of the merged model's final feature, by task, where it was measured.
        merge: method that made the merged model; empty if the run was given it.
        scores: means of base, merged model, shown calibration and experts, by variant; empty if metrics differ in kind.
        relative: mean relative final drift of the shown calibration, else of the merged model; NaN if not measured.
        bytes: size of the files that the manifest lists.
        left: see `unfinished_work`.
        tags: words that the user gave the run, as `note`; see `driftlens.runs.notes`.
    """

    path: pathlib.Path
    id: str = ""
    name: str = ""
    created: str = ""
    tasks: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    state: str = "unreadable"
    final_drift: Mapping[str, float] = field(default_factory=dict)
    merge: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    relative: float = math.nan
    bytes: int = 0
    problem: str = ""
    hint: str = ""
    left: tuple[str, ...] = ()
    is_live: bool = False
    tags: tuple[str, ...] = ()
    note: str = ""


def find_runs(root: PathLike) -> list[RunSummary]:
    """Return `root` if it is a run directory, else the run directories directly inside it, sorted by name.

    Raises:
        RunError: there is no such folder.
    """
    folder = pathlib.Path(root)
    if _is_run_folder(folder):
        return [_run_summary(folder)]
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder", hint="Name a run directory or a folder of runs.")
    inside = sorted(folder.iterdir())
    return [_run_summary(child) for child in inside if _is_run_folder(child)]


def _is_run_folder(folder: pathlib.Path) -> bool:
    # A lock or a status without a manifest is a run that has just begun or was killed early.
    return any((folder / name).is_file() for name in (MANIFEST, STATUS, LOCK))


def _run_summary(folder: pathlib.Path) -> RunSummary:
    try:
        run = open_run(folder)
        return RunSummary(
            path=folder,
            id=run.id,
            name=run.name,
            created=run.manifest.created,
            tasks=run.tasks,
            variants=run.variants,
            state=current_state(run),
            merge=_merge_title_with_scaling(run.manifest),
            **_drift_and_score_fields(run),
            bytes=sum(file.bytes for file in run.manifest.files.values()),
            left=unfinished_work(run),
            is_live=has_live_modules(run.manifest),
            **asdict(read_notes(folder)),
        )
    except DriftLensError as error:
        # One damaged run must not hide the others.
        return RunSummary(path=folder, name=folder.name, problem=error.message, hint=error.hint)


def _merge_title_with_scaling(manifest: Manifest) -> str:
    scaling = manifest.merge.get("parameters", {}).get("scaling")
    return " ".join(map(str, filter(None, (manifest.merge.get("title", ""), scaling))))


def _drift_and_score_fields(run: DriftRun) -> dict[str, Any]:
    """Return final drift, mean scores and relative drift for the summary of a run."""
    if not run.manifest.layers:
        return {}
    try:
        shown = [*(name for name in ("base", "merged") if name in run.variants), *filter(None, [shown_repair(run)])]
        last = [value_on_task(run, RELATIVE, task, variant).value for variant in shown[-1:] for task in run.tasks]
        drifts = {task: value_on_task(run, DRIFT, task, "merged") for task in run.tasks if "merged" in shown}
        scores = _mean_score_by_variant(run, [*shown, "expert"])
    except RunError:
        run.layers(layer="final")  # without these a run can't be read; its pages say what else is damaged
        return {}
    return {
        "final_drift": {task: drift.value for task, drift in drifts.items() if drift.is_measured},
        "relative": sum(last) / len(last) if last else math.nan,
        "scores": scores,
    }


def _mean_score_by_variant(run: DriftRun, variants: Sequence[str]) -> dict[str, float]:
    """Return mean scores by variant over tasks scored for every variant; empty without a common metric."""
    # A mean of accuracies and perplexities would be meaningless.
    if not all(metric.is_averaged for metric in main_metrics(run).values()):
        return {}
    scored = [
        name for name in variants if any(value_on_task(run, SCORE, task, name).is_measured for task in run.tasks)
    ]
    groups = [(about, tasks) for about, tasks in common_measures(run, scored) if about.role == SCORE.role]
    return {name: mean_on_tasks(run, about, tasks, name).value for about, tasks in groups for name in scored}
