"""The runs in a folder, one line each; a run that can't be read keeps its line and says why."""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from driftlens.errors import DriftLensError, RunError
from driftlens.files import PathLike
from driftlens.records.contents import LATER, is_phase_of
from driftlens.records.layout import LOCK, MANIFEST, STATUS
from driftlens.records.lock import living_owner_of
from driftlens.records.manifest import Manifest
from driftlens.records.outcomes import Outcome, outcomes
from driftlens.records.reading import is_measured
from driftlens.records.run import DriftRun, open_run
from driftlens.records.status import Status
from driftlens.variants import calibration_of, part_of

_EXPLAIN = ":explain:"
"""In the names of phases that attribute the drift, behind `calibrate:NAME` or at the beginning."""


@dataclass(frozen=True)
class RunSummary:
    """One run as a list shows it.

    Attributes:
        path: the run directory.
        id: short name of the run's own; empty when the run can't be read.
        name: what the user called it; the folder's name when the run can't be read.
        created: UTC.
        tasks: in the run's order.
        variants: in the run's order.
        state: see `current_state`; "unreadable" with a `problem`.
        final_drift: mean L2 drift of the merged model's final feature, by task, where it was measured.
        merge: how the merged model was made; empty where the run was given it.
        scores: mean over the tasks on which all of them were measured, of base, merged model, the last calibration
            and experts, by variant; empty where tasks have scores of different kinds.
        relative: mean relative final drift, of the last calibration or else of the merged model; NaN if not measured.
        bytes: size of the files that the manifest lists.
        problem: why the run can't be read.
        hint: what to do about that, where there is something to say.
        left: what later work left undone, in sentences; see `left_undone`.
        is_live: see `is_live`.
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


def find_runs(root: PathLike) -> list[RunSummary]:
    """The run in `root`, if it is one, or else the runs directly inside it, by name of folder."""
    folder = pathlib.Path(root)
    if _looks_like_a_run(folder):
        return [_summarise(folder)]
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_summarise(child) for child in inside if _looks_like_a_run(child)]


def current_state(run: DriftRun) -> str:
    """The state of the run itself: "done" once its analysis is, however a calibration or sweep of it ended.

    While somebody works on it the state is "running". What became of the last work is `last_work`.
    """
    state, _ = last_work(run)
    ended_early = state in ("cancelled", "failed", "stopped", "unknown")
    return "done" if ended_early and is_analyzed(run.manifest) else state


def last_work(run: DriftRun) -> tuple[str, str]:
    """The state of the run's status, and what is wrong with its status.json and what to do; empty where nothing is.

    The state is "stopped" when it is unfinished and the process behind it is gone, "unknown" where nobody is at work
    and the run does not say. The damage is told without the folder's path: a report tells it to others.
    """
    return _standing(run)[1:]


def left_undone(run: DriftRun) -> tuple[str, ...]:
    """What became of work on a finished run that ended early, and how to go on, in sentences; while it lasts, none.

    Where its status.json is damaged, that takes the place of what became of the work; where it was removed, no work
    is said to have ended early.
    """
    status, state, damage = _standing(run)
    if damage:
        return (damage,)
    if state in ("running", "cancelling") or not is_analyzed(run.manifest):
        return ()
    begun = [name for name in map(calibration_of, run.manifest.unfinished) if name is not None]
    if begun or state in ("done", "unknown"):
        ends = {name: _end_of(run.manifest, name) for name in begun}
        return tuple(f"{end}; {how_to_resume(run.path, name, run.manifest)}" for name, end in ends.items())
    failure = status.error if status is not None else None
    reason = f": {failure.message}" if failure is not None and failure.message != state else ""
    is_open = not is_live(run.manifest) and any(
        _EXPLAIN in f":{name}" and at.state != "done" for name, at in run.manifest.phases.items()
    )
    more = f"; {how_to_explain(run.path)}" if is_open else ""
    return (f"the last work on it ended early ({state}{reason}); what the run held before stands{more}",)


def is_analyzed(manifest: Manifest) -> bool:
    """Whether the run was finished once, and nothing of its own analysis has been begun again since.

    The attribution, which may be left out or done later, does not count.
    """
    own = [phase for name, phase in manifest.phases.items() if not name.startswith((*LATER, "explain:"))]
    return bool(manifest.finished) and all(phase.state == "done" for phase in own)


def unanalyzed(manifest: Manifest) -> list[str]:
    """The phases in which a task is analyzed that are still to be done; until then nothing can be added to the run."""
    phases = [f"analyze:{task}" for task in manifest.tasks]
    return [name for name in phases if name not in manifest.phases or manifest.phases[name].state != "done"]


def how_to_resume(folder: pathlib.Path, name: str, manifest: Manifest) -> str:
    """What to do about a calibration that was begun and not finished."""
    if is_live(manifest):
        return f"`run.calibrate(..., name={name!r}, resume=True)` with the same modules and settings goes on"
    command = f"driftlens calibrate {shlex.quote(str(folder))} --name {shlex.quote(name)}"
    return f"`{command} --resume` with the same settings goes on, without --resume it begins afresh"


def is_live(manifest: Manifest) -> bool:
    """Whether the run was made from live modules, so that no command can open its models again."""
    return bool(manifest.architecture.get("loader") == "live")


def how_to_explain(folder: pathlib.Path) -> str:
    """What to do about variants whose drift is measured and not attributed."""
    return f"`driftlens explain {shlex.quote(str(folder))}` adds the attribution that is missing"


def _standing(run: DriftRun) -> tuple[Status | None, str, str]:
    """The run's status, None where it can't be read or is not there; the state and the damage of `last_work`."""
    status, damage = None, ""
    try:
        status = run.status
    except RunError as error:
        damage = f"{error.message.replace(str(run.path / STATUS), STATUS)}. {error.hint}"
    if status is not None and status.state not in ("running", "cancelling"):
        return status, status.state, damage
    is_alive = living_owner_of(run.path) is not None
    if status is None:
        return None, "running" if is_alive else "unknown", damage
    return status, status.state if is_alive else "stopped", damage


def _end_of(manifest: Manifest, name: str) -> str:
    ends = {"cancelled": "was cancelled", "failed": "failed"}
    states = [phase.state for key, phase in manifest.phases.items() if is_phase_of(name, key)]
    return f"calibration {name!r} {next((ends[s] for s in states if s in ends), 'was interrupted')}"


def _looks_like_a_run(folder: pathlib.Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, STATUS, LOCK))


def _summarise(folder: pathlib.Path) -> RunSummary:
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
            merge=_merge_of(run.manifest),
            **_standings(run),
            bytes=sum(file.bytes for file in run.manifest.files.values()),
            left=left_undone(run),
            is_live=is_live(run.manifest),
        )
    except DriftLensError as error:
        return RunSummary(path=folder, name=folder.name, problem=error.message, hint=error.hint)


def _merge_of(manifest: Manifest) -> str:
    """The method's title, and how far it goes where it has a scaling."""
    scaling = manifest.merge.get("parameters", {}).get("scaling")
    return " ".join(map(str, filter(None, (manifest.merge.get("title", ""), scaling))))


def _standings(run: DriftRun) -> dict[str, Any]:
    """`final_drift`, `scores` and `relative` of a summary."""
    if not run.manifest.layers:
        return {}
    repairs = [name for name in run.variants if part_of(name) == "calibrated"][-1:]
    shown = [*(name for name in ("base", "merged") if name in run.variants), *repairs]
    try:
        found = outcomes(run, [*shown, "expert"])
    except RunError:
        run.layers(layer="final")  # without these a run can't be read; its pages say what else is damaged
        return {}
    last = [entry.relative.value for entry in found if shown and entry.variant == shown[-1]]
    drifts = {entry.task: entry.drift.value for entry in found if entry.variant == "merged"}
    return {
        "final_drift": {task: drift for task, drift in drifts.items() if is_measured(drift)},
        "relative": sum(last) / len(last) if last else math.nan,
        "scores": _mean_scores(found),
    }


def _mean_scores(found: Sequence[Outcome]) -> dict[str, float]:
    """By variant, over the tasks on which every scored one has a score; none where these have no common mean."""
    scored = [entry for entry in found if is_measured(entry.score.value)]
    by_variant: dict[str, dict[str, float]] = {}
    for entry in scored:
        by_variant.setdefault(entry.variant, {})[entry.task] = entry.score.value
    tasks = dict.fromkeys(entry.task for entry in scored)
    common = [task for task in tasks if all(task in values for values in by_variant.values())]
    if not common or not all(entry.metric.is_averaged for entry in scored):
        return {}
    return {name: sum(values[task] for task in common) / len(common) for name, values in by_variant.items()}
