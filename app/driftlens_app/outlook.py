"""What is known of a job before its end: what a preflight found, what is in its way, what it and earlier ones take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import streamlit as st

from driftlens.base.errors import RunLockedError
from driftlens.base.progress import ProgressEvent, duration
from driftlens.base.words import some_of
from driftlens.findings.reading import printable, size
from driftlens.runs.manifest import LATER, Manifest, PhaseInfo, is_phase_of
from driftlens.runs.run import DriftRun
from driftlens.runs.standing import is_analyzed, is_live, unanalyzed
from driftlens.runs.status import require_unlocked
from driftlens_app.jobs import Job
from driftlens_app.show import plain

_LEVELS = ("problem", "notice", "ok")
STAGES: Mapping[str, str] = {
    "check": "Checking the weights",
    "choose": "Choosing",
    "calibrate": "Solving",
    "analyze": "Measuring drift",
    "evaluate": "Measuring accuracy",
    "explain": "Tracing the drift back to layers",
}
"""What a calibration does, by phase, in this order. Two more are over at once: `look`, and `params` at the end."""

_SOLVING = 0.3
"""Seconds of solving for one of measuring, where neither was done before: 0.26 to 0.38 on the three embedded runs."""

_SOLVED = 0.4
"""What a second of solving counts for beside one of measuring, where a job's pace is told from what is behind it."""

_TRUST = 0.1
"""Share of a work at which its own pace counts as much as what was expected."""


@dataclass(frozen=True)
class Ahead:
    """A calibration under way: the stage, and seconds spent, left until all is measured, and left until its end."""

    stage: str
    spent: float
    until_measured: float
    left: float


def ahead(manifest: Manifest, job: Job, at: ProgressEvent) -> Ahead:
    """What a calibration has still before it: the more of a stage is done, the more its own pace tells of the rest."""
    began = {name: phase for name, phase in manifest.phases.items() if phase.started >= job.started}
    took_so_far = _by_stage({name: phase for name, phase in began.items() if phase.state == "done"}, job.name)
    usual = _usual(manifest, job.name)
    stages, part = list(STAGES), at.done / at.total if at.total and at.phase in STAGES else 0.0
    here = {"look": "analyze", "params": "explain"}.get(at.phase, at.phase)
    following = stages[stages.index(here) + 1 :]
    usual["choose"] = usual["calibrate"] * (at.total or 0) / 100 if here == "choose" else 0.0
    seconds = at.seconds if at.phase in STAGES else 0.0
    # How long solving takes is the method's as much as the machine's, so it tells less of what follows: nothing, where
    # a choice went before, whose method may take several times as long as the one that is usual.
    trust = dict.fromkeys(stages, 1.0) | {"calibrate": 0.0 if "choose" in took_so_far else _SOLVED}
    known = [stage for stage in took_so_far if usual.get(stage) and stage not in (here, *following)]
    took = trust[here] * seconds + sum(trust[stage] * took_so_far[stage] for stage in known)
    expected = trust[here] * part * usual[here] + sum(trust[stage] * usual[stage] for stage in known)
    weight = _TRUST * sum(usual[stage] for stage in {*known, here, *following})
    pace = (took + weight) / (expected + weight) if weight else 1.0
    left = {stage: pace * usual[stage] for stage in following}
    left[here] = (1 - part) * (seconds + _TRUST * pace * usual[here]) / (part + _TRUST)
    measured = sum(left.get(stage, 0.0) for stage in stages[: stages.index("explain")])
    spent = sum(took_so_far[stage] for stage in took_so_far if stage in stages and stage != here) + at.seconds
    return Ahead(here, spent, measured, sum(left.values()))


def _usual(manifest: Manifest, name: str = "") -> dict[str, float]:
    """Seconds that stages took in the last calibration but `name`, or in the analysis, which explains no anchor."""
    usual = dict.fromkeys(STAGES, 0.0) | _by_stage(manifest.phases)
    usual["calibrate"] = _SOLVING * (usual["analyze"] + usual["evaluate"])
    usual["explain"] *= 2
    for other, info in manifest.calibrations.items():  # in the order in which they were finished
        if other != name:
            usual |= _by_stage(manifest.phases, other)
            # One that took another's place was solved before its phase began.
            usual["calibrate"] = max(usual["calibrate"], info.seconds)
    return {stage: usual[stage] if stage != "choose" else 0.0 for stage in STAGES}


def _by_stage(phases: Mapping[str, PhaseInfo], name: str = "") -> dict[str, float]:
    """Seconds of a calibration by stage, or of the run's own analysis: the median task's, for as many as there are."""
    seconds_of: dict[str, list[float]] = {}
    for phase, info in phases.items():
        if is_phase_of(name, phase) if name else not phase.startswith(LATER):
            stage = phase.removeprefix(f"calibrate:{name}").strip(":").partition(":")[0]
            seconds_of.setdefault(stage or "calibrate", []).append(info.seconds)
    return {stage: len(seconds) * median(seconds) for stage, seconds in seconds_of.items()}


def show_findings(document: Mapping[str, Any]) -> None:
    """Draw what `driftlens validate` and `calibrate --dry-run` find: problems first, each with its line of the spec."""
    by_level = {
        level: [finding for finding in document["findings"] if finding["level"] == level] for level in _LEVELS
    }
    cost, count, well = document["estimate"], len(by_level["problem"]), len(by_level["ok"])
    with st.container(border=True):
        if not document["ready"]:
            # One problem may have stopped the check before others.
            many = f"{count} problems to solve first."
            st.markdown(f"**{many if count > 1 else 'First problem to solve; more may follow.'}**")
        elif cost is None:
            st.success("Ready.", icon=":material/check:")
        else:
            parts = [f"{size(cost['memory_bytes'])} of memory", f"{size(cost['disk_bytes'])} on disk"]
            seconds = cost["seconds"]
            parts += [] if seconds is None else ["less than a second" if seconds < 1 else duration(seconds)]
            st.success(f"Ready: about {', '.join(parts)}.", icon=":material/check:")
        for finding in by_level["problem"]:
            line = finding.get("line")
            st.error(f"{f'Line {line}: ' if line else ''}{_told(finding)}", icon=":material/error:")
            if line:
                st.code(f"{line}  {printable(finding['code'])}", language="yaml")
        for finding in by_level["notice"]:
            st.markdown(f":material/info: {_told(finding)}")
        if well:
            with st.expander(f"{well} check{'s' if well > 1 else ''} passed", icon=":material/check:"):
                st.markdown("\n".join(f"- {_told(finding)}" for finding in by_level["ok"]))


def _told(finding: Mapping[str, Any]) -> str:
    text, hint = finding["text"], finding["hint"]
    stop = "." if hint and not text.endswith((".", "?", "!", ":")) else ""
    return f"**{plain(finding['subject'])}**: {plain(text + stop)} {plain(hint)}".rstrip()


def obstacle(run: DriftRun) -> str:
    """What would stop any calibration of the run, by its state alone; a dry run looks at weights, data and disk."""
    try:
        require_unlocked(run.path)
    except RunLockedError as error:
        return f"{error.message}. {error.hint}"
    if is_live(run.manifest):
        return "the run's live modules are not here; `run.calibrate(...)` in Python takes them"
    missing = some_of(unanalyzed(run.manifest, scored=True))
    return (
        f"the run is unfinished; still to be done: {missing}. Its analysis has to go on first"
        if missing
        else ""
    )


def past_cost(run: DriftRun) -> str:
    """What one calibration will take, by what was measured on this run; nothing of that where that can't be told."""
    estimate = "Estimate, under Advanced, checks weights and data first."
    took = _seconds(run, lambda usual: sum(usual.values()))
    return (
        f"One calibration takes about {took}. That is by what this run took. {estimate}" if took else estimate
    )


def choosing_cost(run: DriftRun, choosing: float, efforts: Mapping[str, float]) -> str:
    """About what choosing the best takes: `choosing` calibrations by FeatCal, `efforts` of other methods in those."""

    def chosen(usual: Mapping[str, float]) -> float:
        costs = [
            info.seconds / efforts[info.method]
            for info in run.manifest.calibrations.values()
            if efforts.get(info.method) and not info.automatic and info.seconds > 0
        ]
        once = min(costs, default=usual["calibrate"])
        return sum(usual.values()) - usual["calibrate"] + choosing * once if once else math.nan

    took = _seconds(run, chosen) if choosing else ""
    scale = f"That is {choosing:.0f} calibrations by FeatCal, by what this run took."
    return f"Takes about {took}. {scale}" if took else ""


def _seconds(run: DriftRun, of: Callable[[Mapping[str, float]], float]) -> str:
    """A time that follows from what the run's stages took; empty where that can't be told."""
    try:
        return duration(of(_usual(run.manifest))) if is_analyzed(run.manifest) else ""
    except (TypeError, ValueError, OverflowError):  # a manifest that was edited may hold anything for seconds
        return ""
