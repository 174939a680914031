"""Several repair methods on the same samples, each kept as a calibration of the run: `sweep --methods`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftlens.base.access import Context
from driftlens.base.errors import Cancelled
from driftlens.base.files import PathLike
from driftlens.calibration.calibrator import calibrators
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.contest.automatic import choice_of
from driftlens.jobs.contest.contest import Candidate, Outcome, candidates, require_any, try_each
from driftlens.jobs.study import reopening
from driftlens.runs import layout
from driftlens.runs.run import open_run
from driftlens.spec import load_spec
from driftlens.spec.requests import CalibrationRequest

BESIDE = ("views", "shrink")
"""Settings of a calibration that a candidate may have in addition to those of its method."""


def wanted_methods(asked: Sequence[tuple[str, Mapping[str, object]]]) -> list[Candidate]:
    """Return candidates by method and settings, under names that calibrations can have; as `candidates`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")

    wanted = candidates(asked, calibrators, calibrators.__getitem__, name_of, beside=BESIDE)
    for candidate in wanted:
        request_of(candidate)
    return wanted


def request_of(candidate: Candidate, **more: Any) -> CalibrationRequest:
    """Return the calibration that a candidate asks for; raise a SpecError where there is no such calibration."""
    settings = dict(candidate.settings)
    beside: dict[str, Any] = {name: settings.pop(name) for name in BESIDE if name in settings}
    return CalibrationRequest(
        name=candidate.name, method=candidate.method, parameters=settings, **beside, **more
    )


def compare_methods(
    run: PathLike, wanted: Sequence[Candidate], context: Context = Context(), *, samples: int | None = None
) -> dict[str, str]:
    """Calibrate a run by every method, on the same samples; finished calibrations stay as they are.

    Settings are those published for models of the run's kind, under a candidate's own. Where the spec's `calibration`
    section has settings of the same method, these take the place of the published ones.

    Args:
        run: the run, which gains a calibration per candidate.
        wanted: what to compare, see `wanted_methods`.
        context: where and how to run; an interrupted calibration is resumed.
        samples: calibration samples per task; None takes the spec's.

    Returns:
        By name, why a candidate could not be calibrated.
    """
    loader = str(open_run(run).manifest.architecture.get("loader"))
    section = None
    if context.live is None:
        reopening.require_spec(Path(run), open_run(run).manifest)
        section = load_spec(Path(run) / layout.SPEC).calibration

    def attempt(candidate: Candidate) -> Outcome[None]:
        kind = calibrators[candidate.method]
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if (
            section is not None
            and section.method == candidate.method
            and (section.preset or section.parameters)
        ):
            preset = None
        request = request_of(candidate, preset=preset, samples=samples, resume=True, attribution=False)
        calibrate(run, request, context, choose=choice_of(request))
        return Outcome()

    try:
        results = try_each(wanted, attempt, team=context.access.team)
        outcomes = {candidate.name: outcome for candidate, outcome in results}
    except Cancelled as error:
        error.hint = "What was finished is kept; the same command resumes."
        raise
    require_any(outcomes.values())
    return {name: outcome.error.message for name, outcome in outcomes.items() if outcome.error is not None}
