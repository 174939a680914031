"""Where a run stands, from its manifest, its status and its lock: done, at work, ended early, and how to go on."""

from __future__ import annotations

import pathlib
import shlex
from typing import TYPE_CHECKING

from driftlens.runs.layout import STATUS, begun_calibration
from driftlens.runs.manifest import LATER, Manifest, is_phase_of, read_manifest
from driftlens.runs.status import Status, living_owner_of
from driftlens.utils.errors import RunError
from driftlens.utils.files import from_json
from driftlens.utils.variants import calibrated, calibration_of

if TYPE_CHECKING:
    from driftlens.runs.run import DriftRun

COMMAND = "command"
"""In what a calibration begins with: the options of its command line."""

_EXPLAIN = ":explain:"
"""In the names of phases that attribute the drift, behind `calibrate:NAME` or at the beginning."""


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
    begun = _begun(run)
    if begun or state in ("done", "unknown"):
        ends = {name: _end_of(run.manifest, name) for name in begun}
        return tuple(f"{end}; {how_to_resume(run.path, name, run.manifest)}" for name, end in ends.items())
    failure = status.error if status is not None else None
    reason = f": {failure.message}" if failure is not None and failure.message != state else ""
    lacking = [
        f":{name}".partition(_EXPLAIN)[2]
        for name, phase in run.manifest.phases.items()
        if _EXPLAIN in f":{name}" and phase.state != "done"
    ]
    # Of an optional diagnostic, or several of one walk, the phase tells before its task.
    add = dict.fromkeys(name for of in lacking for group in of.split(":")[:-1] for name in group.split("+"))
    more = f"; {how_to_explain(run.path, *add)}" if lacking and not is_live(run.manifest) else ""
    return (f"the last work on it ended early ({state}{reason}); what the run held before stands{more}",)


def is_analyzed(manifest: Manifest) -> bool:
    """Whether the run was finished once, and nothing of its own analysis has been begun again since.

    The attribution, which may be left out or done later, does not count.
    """
    phases = [phase for name, phase in manifest.phases.items() if not name.startswith((*LATER, "explain:"))]
    return bool(manifest.finished) and all(phase.state == "done" for phase in phases)


def unanalyzed(manifest: Manifest, *, scored: bool = False) -> list[str]:
    """The phases in which a task is analyzed that are still to be done; until then nothing can be added to the run.

    Those in which it is `scored` count where the run was never finished: who goes on calls it done.
    """
    kinds = ("analyze", "evaluate") if scored and not manifest.finished else ("analyze",)
    phases = [f"{kind}:{task}" for kind in kinds for task in manifest.tasks]
    return [name for name in phases if name not in manifest.phases or manifest.phases[name].state != "done"]


def require_analyzed(folder: pathlib.Path, *, scored: bool = False) -> None:
    """Refuse a run whose analysis was interrupted: to finish here would call it done. See `unanalyzed`."""
    manifest = read_manifest(folder)
    missing = unanalyzed(manifest, scored=scored)
    if missing and living_owner_of(folder) is None:  # else taking the lock will say who is at it
        raise RunError(
            f"{folder} is unfinished; still to be done: {', '.join(missing)}",
            hint=f"`{command_to_resume(folder, manifest)}` goes on, accuracy included.",
        )


def _begun(run: DriftRun) -> list[str]:
    """Calibrations that were begun and not finished, those among them whose settings were still being chosen."""
    phases = (name.split(":") for name in run.manifest.phases if name.startswith("calibrate:"))
    names = [*map(calibration_of, run.manifest.unfinished), *(parts[1] for parts in phases)]
    is_variant = set(run.manifest.unfinished)
    return [
        name
        for name in dict.fromkeys(filter(None, names))
        if calibrated(name) in is_variant or (run.path / begun_calibration(name)).is_file()
    ]


def how_to_resume(folder: pathlib.Path, name: str, manifest: Manifest) -> str:
    """What to do about a calibration that was begun and not finished, perhaps to take the place of one of its name."""
    is_replacing = name in manifest.calibrations
    if is_live(manifest):
        both = f"name={name!r}, {'replace=True, ' if is_replacing else ''}resume=True"
        return f"`run.calibrate(..., {both})` with the same modules and settings goes on"
    words = _words_of(folder / begun_calibration(name))
    flags = [*(words or ()), *["--replace"] * is_replacing, "--resume"]
    command = shlex.join(["driftlens", "calibrate", str(folder), "--name", name, *flags])
    same = " with the same settings" if words is None else ""
    return f"`{command}`{same} goes on, without --resume it begins afresh"


def how_to_save(folder: pathlib.Path, name: str, manifest: Manifest, *words: str) -> str:
    """What to do for the model of a finished calibration in the form of its base; `words` are further options."""
    if is_live(manifest):
        return f"`run.calibrate(..., name={name!r}, save_weights=...)` with the same settings saves it"
    command = shlex.join(["driftlens", "calibrate", str(folder), "--name", name, *words, "--save-weights"])
    return f"`{command} FOLDER` saves it for its own library"


def _words_of(begun: pathlib.Path) -> list[str] | None:
    """The options with which a calibration was begun; None where nobody can tell."""
    try:
        return [str(word) for word in from_json(begun.read_bytes())[COMMAND]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_live(manifest: Manifest) -> bool:
    """Whether the run was made from live modules, so that no command can open its models again."""
    return bool(manifest.architecture.get("loader") == "live")


def command_to_resume(folder: pathlib.Path, manifest: Manifest | None = None) -> str:
    """The command that goes on with an analysis; of live modules, which `manifest` tells, the call."""
    if manifest is not None and is_live(manifest):
        return "dl.analyze(..., resume=True)"
    folder_name = shlex.quote(str(folder))
    return f"driftlens analyze {folder_name}/spec.yaml --out {folder_name} --resume"


def how_to_explain(folder: pathlib.Path, *add: str) -> str:
    """What to do about variants whose drift is measured and not attributed, or lacks the diagnostics `add`."""
    command = shlex.join(["driftlens", "analyze", str(folder), *(["--add", ",".join(add)] if add else ())])
    return f"`{command}` adds {'what' if add else 'the attribution that'} is missing"


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
