"""The arena's table: what every calibration of a run gains and costs, on the same test samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from driftlens.base.variants import calibrated
from driftlens.base.words import counted
from driftlens.findings.features import COSINE, RELATIVE
from driftlens.findings.frame import Finding, pairing
from driftlens.findings.measures import SCORE, common, mean, mean_change
from driftlens.findings.reading import Kind, is_measured
from driftlens.findings.table import Table
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import plain

_MIB = 2**20


def arena_rows(
    run: DriftRun, names: Sequence[str] | None = None, *, against: str | None = None
) -> list[dict[str, Any]]:
    """A row per calibration, best score first, below base and merged model and above the experts.

    Keys: model, method, score with `low` and `high`, `change` over the merged model with its ends, `behind` the
    calibration `against` (None: the first, whose score is best) with its ends, both paired by sample, relative and
    cosine (of the final feature), seconds of calibrating, energy_wh, peak_mib (resident, so far), added (numbers that
    are attached), task_id (whether the task of an input must be known), n (test samples of the mean). What was not
    measured is NaN, or None. `names` are of calibrations; None takes all.
    """
    wanted = [*run.manifest.calibrations] if names is None else [*names]
    for name in (*wanted, *filter(None, [against])):
        run.calibration_info(name)
    rows = [_measured(run, calibrated(name), name) | _cost(run, name) for name in wanted]
    rows.sort(key=lambda row: -row["score"] if math.isfinite(row["score"]) else math.inf)
    scored = [row for row in rows if math.isfinite(row["score"])]
    leader = against or next((row["model"] for row in scored), "")
    for row in scored:
        if row["model"] != leader:
            row |= _behind(run, calibrated(leader), calibrated(row["model"]))
    starts = [_measured(run, name, name) for name in ("base", "merged") if name in run.variants]
    return [*starts, *rows, _measured(run, "expert", "experts")]


def arena_sheet(
    run: DriftRun,
    names: Sequence[str] | None = None,
    failed: Mapping[str, str] | None = None,
    *,
    against: str | None = None,
) -> Table:
    """The rows to be read, without columns that nothing was measured for; `failed` says why repairs are missing."""
    rows = arena_rows(run, names, against=against)
    leader = f"against {against or 'the first'}"
    columns: dict[str, tuple[Kind, str]] = {
        "model": ("text", "model"),
        **{"score": ("share", "score"), "95 % low": ("share", "low"), "95 % high": ("share", "high")},
        "against merged": ("points", "change"),
        **{f"change {end}": ("points", f"change_{end}") for end in ("low", "high")},
        leader: ("points", "behind"),
        **{f"{leader}, {end}": ("points", f"behind_{end}") for end in ("low", "high")},
        **{"relative drift": ("share", "relative"), "cosine": ("number", "cosine")},
        **{"seconds": ("number", "seconds"), "energy (Wh)": ("number", "energy_wh")},
        **{"memory (MiB)": ("count", "peak_mib"), "added numbers": ("count", "added")},
        "needs task": ("text", "task_id"),
    }
    columns = {
        head: (kind, key)
        for head, (kind, key) in columns.items()
        if head == "model" or any(is_measured(row.get(key)) for row in rows)
    }
    n = max((row["n"] for row in rows), default=0)
    paired = {
        row["model"]: row.get("change_paired", True) and row.get("behind_paired", True)
        for row in rows
        if is_measured(row.get("change_low")) or is_measured(row.get("behind_low"))
    }
    said = [
        f"Means over {counted(len(run.tasks), 'task')}" + (f", {n} test samples" if n else "") + ".",
        pairing(paired),
        "The first repair stands first on these very samples, which flatters it a little against the others. One draw "
        "of calibration samples. Seconds are of calibrating alone; memory is the process's peak by then, and energy "
        "that of all programs.",
    ]
    said += [f"{name}: not made, as {reason}." for name, reason in (failed or {}).items()]
    title, note = f"Repairs of {run.name} beside each other", " ".join(filter(None, said))
    return Table.from_rows("arena", title, columns, rows, note)


def _cost(run: DriftRun, name: str) -> dict[str, Any]:
    """What a calibration is and takes; None what was not measured."""
    info, used = run.calibration_info(name), run.resources()
    phase = used.loc[used["phase"] == f"calibrate:{name}", ["peak_rss_bytes", "energy_wh"]]
    peak, energy = (plain(value) for value in phase.iloc[0]) if len(phase) else (None, None)
    row = {"method": info.method, "seconds": info.seconds, "energy_wh": energy}
    row |= {"peak_mib": None if peak is None else round(peak / _MIB)}
    return row | {"added": info.attached, "task_id": info.attached > 0}


def _behind(run: DriftRun, leader: str, variant: str) -> dict[str, Any]:
    """How the mean score changes from one calibrated variant to another, paired by sample; nothing where not scored."""
    scored = [(about, tasks) for about, tasks in common(run, [leader, variant]) if about.role == SCORE.role]
    return _change("behind", mean_change(run, *scored[0], (leader, variant))) if scored else {}


def _change(name: str, change: Finding) -> dict[str, Any]:
    ends = {f"{name}_{end}": getattr(change, end) for end in ("low", "high", "paired")}
    return {name: change.value, **ends}


def _measured(run: DriftRun, variant: str, name: str) -> dict[str, Any]:
    """Means of one variant, and what changes from the merged model to it."""
    is_after = variant not in ("base", "merged") and "merged" in run.variants
    row: dict[str, Any] = {"model": name, "score": math.nan, "n": 0}
    for about, tasks in common(run, ["merged", variant] if is_after else [variant]):
        own = mean(run, about, tasks, variant)
        if about.role == SCORE.role:
            row |= {"score": own.value, "low": own.low, "high": own.high, "n": own.n}
            if is_after:
                row |= _change("change", mean_change(run, about, tasks, ("merged", variant)))
        elif about in (RELATIVE, COSINE):
            row[about.name] = own.value
    return row
