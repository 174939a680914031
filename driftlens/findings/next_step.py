"""What to do next about a run, as a command that works, and the better merge that a comparison found."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driftlens.base.files import from_json
from driftlens.findings.reading import brief
from driftlens.runs.layout import COMPARISON, MERGES
from driftlens.runs.run import DriftRun, remembered
from driftlens.runs.standing import is_live

CONTENDERS = {True: "average,ties,iso_c,tsv_m", False: "average,karcher"}
"""Merges of weights alone that are worth a comparison, with a base and without."""
_LOWER = {
    "hellinger": "Hellinger distance {} lower",
    "kl": "KL {} nat lower",  # of comparisons made by earlier versions
    "drift_rel": "relative drift {} lower",
}


def next_command(run: DriftRun, side: int, bad: Sequence[str]) -> str:
    """The command that most likely helps; empty for live modules, which no command can open.

    `side` is -1 where the last model is clearly worse than the experts, `bad` are tasks whose experts are themselves.
    """
    at = shlex.quote(str(run.path))
    if is_live(run.manifest):
        return ""
    if not run.manifest.finished:
        return f"driftlens analyze {at}/spec.yaml --out {at} --resume"
    if bad:
        return f"driftlens validate {at}/spec.yaml --deep"
    if side >= 0:
        return f"driftlens report {at}"
    compared = comparison(run)
    if (better := _nearest(compared)) is not None:
        merge = json.dumps({"method": better["method"], **better["settings"]})
        sets = f"--set {shlex.quote(f'merge={merge}')} --set merged=null"
        return f"driftlens analyze {at}/spec.yaml {sets} --out {at}-{shlex.quote(better['method'])}"
    if not compared and len(run.tasks) > 1:
        return f"driftlens merge {at}/spec.yaml --compare {CONTENDERS['base' in run.variants]} --out {at}/{MERGES}"
    if not any(info.automatic for info in run.manifest.calibrations.values()):
        return f"driftlens calibrate {at} --name best --auto"
    return f"driftlens advise {at} --search"


def nearer_merge(compared: Mapping[str, Any]) -> Iterator[str]:
    """That another merge is clearly nearer to the experts than the present one, where a comparison says so."""
    if (row := _nearest(compared)) is not None:
        value, low, high = (brief(row[f"nearer{end}"]) for end in ("", "_low", "_high"))
        lower = _LOWER[compared["score"]].format(value)
        yield f"{row['merge']} is nearer to the experts than this merge: {lower} ({low} to {high})."


@remembered
def comparison(run: DriftRun) -> Mapping[str, Any]:
    """The newest comparison of the run's merge with others, in the run or beside it; empty where none was made."""
    beside = sorted(run.path.parent.glob(f"*/{COMPARISON}")) if run.path.parent.is_dir() else []
    for file in itertools.chain([run.path / MERGES / COMPARISON], beside):
        try:
            found = from_json(file.read_text(encoding="utf-8"))
            if file.parent.parent == run.path or _is_about(found, run):
                [*nearer_merge(found)]  # all that will be read of it
                return dict(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a stranger's file, or none
    return {}


def _is_about(found: Mapping[str, Any], run: DriftRun) -> bool:
    """Whether a comparison that lies elsewhere has the run's name and tasks, and its merge as the present one."""
    own = run.manifest.merge
    present = next((row for row in found["merges"] if row["merge"] == found.get("present")), None)
    return (
        present is not None
        and (found["name"], {*found["samples"]}) == (run.name, {*run.tasks})
        and present["method"] == own.get("method")
        and present["settings"].items() <= own["parameters"].items()
    )


def _nearest(compared: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The best of the merges whose whole interval says that they are nearer than the present one."""
    nearer = [row for row in compared.get("merges", ()) if row["method"] and (row.get("nearer_low") or 0) > 0]
    return min(nearer, key=lambda row: row["place"], default=None)
