"""The runs in a folder, one line each; a run that can't be read keeps its line and says why."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from driftlens.errors import DriftLensError
from driftlens.files import PathLike
from driftlens.records.layout import LOCK, MANIFEST, STATUS
from driftlens.records.lock import owner_of
from driftlens.records.run import DriftRun, open_run


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
        state: of its status, "stopped" where the process behind it is gone, "unreadable" with a `problem`.
        final_drift: mean L2 drift of the merged model's final feature, by task, where it was measured.
        bytes: size of the files that the manifest lists.
        problem: why the run can't be read.
    """

    path: pathlib.Path
    id: str = ""
    name: str = ""
    created: str = ""
    tasks: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    state: str = "unreadable"
    final_drift: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
    problem: str = ""


def find_runs(root: PathLike) -> list[RunSummary]:
    """The run in `root`, if it is one, or else the runs directly inside it, by name of folder."""
    folder = pathlib.Path(root)
    if _looks_like_a_run(folder):
        return [_summarise(folder)]
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_summarise(child) for child in inside if _looks_like_a_run(child)]


def current_state(run: DriftRun) -> str:
    """The state of the run's status, or "stopped" when it is unfinished and the process behind it is gone.

    Raises:
        RunError: status.json is damaged.
    """
    status = run.status
    if status is None:
        return "unknown"
    if status.state not in ("running", "cancelling"):
        return status.state
    owner = owner_of(run.path)
    return status.state if owner is not None and owner.is_alive else "stopped"


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
            final_drift=_final_drift(run),
            bytes=sum(file.bytes for file in run.manifest.files.values()),
        )
    except DriftLensError as error:
        return RunSummary(path=folder, name=folder.name, problem=error.message)


def _final_drift(run: DriftRun) -> dict[str, float]:
    if "merged" not in run.variants or not run.manifest.layers:
        return {}
    rows = run.layers(variant="merged", layer="final")
    found = dict(zip(rows["task"], rows["drift_l2_mean"], strict=True))
    return {task: float(drift) for task, drift in found.items() if not math.isnan(drift)}
