"""What to do next about a run, as a command that works, and the better merge that a comparison found."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driftlens.results.formatting import brief
from driftlens.runs.layout import COMPARISON, MERGES
from driftlens.runs.run import DriftRun, remembered
from driftlens.runs.run_state import command_to_resume, is_live
from driftlens.utils.files import from_json

CONTENDERS = {True: "average,ties,iso_c,tsv_m", False: "average,regmean"}
"""Merges that are worth a comparison, with a base and without."""
_LOWER = {
    "hellinger": "Hellinger distance {} lower",
    "kl": "KL {} nat lower",  # of comparisons made by earlier versions
    "drift_rel": "relative drift {} lower",
}


def next_command(run: DriftRun, side: int, bad: Sequence[str]) -> str:
    """The command that most likely helps; empty for live modules, which no command can open.

    `side` is -1 where the last model is clearly worse than the experts, `bad` are tasks whose experts are themselves.
    """
    path = shlex.quote(str(run.path))
    if is_live(run.manifest):
        return ""
    if not run.manifest.finished:
        return command_to_resume(run.path)
    if bad:
        return f"driftlens validate {path}/spec.yaml --deep"
    if side >= 0:
        return f"driftlens report {path}"
    compared = comparison(run)
    if (better := _nearest(compared)) is not None:
        merge = json.dumps({"method": better["method"], **better["settings"]})
        sets = f"--set {shlex.quote(f'merge={merge}')} --set merged=null"
        return f"driftlens analyze {path}/spec.yaml {sets} --out {path}-{shlex.quote(better['method'])}"
    if not compared and len(run.tasks) > 1:
        return f"driftlens merge {path}/spec.yaml --compare {CONTENDERS['base' in run.variants]} --out {path}/{MERGES}"
    if not any(info.automatic for info in run.manifest.calibrations.values()):
        return f"driftlens calibrate {path} --name best --auto"
    return f"driftlens sweep {path} --param alpha=0.15,0.3,0.6"


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
            ranking = from_json(file.read_text(encoding="utf-8"))
            if file.parent.parent == run.path or _is_about(ranking, run):
                [*nearer_merge(ranking)]  # all that will be read of it
                return dict(ranking)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a stranger's file, or none
    return {}


def _is_about(ranking: Mapping[str, Any], run: DriftRun) -> bool:
    """Whether a comparison that lies elsewhere has the run's name and tasks, and its merge as the present one."""
    merge = run.manifest.merge
    present = next((row for row in ranking["merges"] if row["merge"] == ranking.get("present")), None)
    return (
        present is not None
        and (ranking["name"], {*ranking["samples"]}) == (run.name, {*run.tasks})
        and present["method"] == merge.get("method")
        and present["settings"].items() <= merge["parameters"].items()
    )


def _nearest(compared: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The best of the merges whose whole interval says that they are nearer than the present one."""
    nearer = [row for row in compared.get("merges", ()) if row["method"] and (row.get("nearer_low") or 0) > 0]
    return min(nearer, key=lambda row: row["place"], default=None)
