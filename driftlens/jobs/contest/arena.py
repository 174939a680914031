"""Several repairs of one run on the same samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftlens.base.access import Context
from driftlens.base.errors import Cancelled, SpecError, did_you_mean
from driftlens.base.files import PathLike
from driftlens.calibration.calibrator import calibrators
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.contest.automatic import choice_of
from driftlens.jobs.contest.contest import (
    Candidate,
    Outcome,
    candidates,
    contest,
    one_by_one,
    require_any,
)
from driftlens.jobs.study import reopening
from driftlens.runs import layout
from driftlens.runs.run import open_run
from driftlens.spec import load_spec
from driftlens.spec.requests import CalibrationRequest


def entrants(asked: Sequence[tuple[str, Mapping[str, object]]]) -> list[Candidate]:
    """The repairs asked for by method and settings, under names that calibrations can have; as `candidates`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")

    repairs = candidates(asked, calibrators, calibrators.__getitem__, name_of, beside=BESIDE)
    for entrant in repairs:
        request_of(entrant)
    return repairs


BESIDE = ("views", "shrink")
"""What an entrant may be asked for beside its method's own settings, as a calibration is."""


def request_of(entrant: Candidate, **more: Any) -> CalibrationRequest:
    """The calibration that an entrant is; a SpecError where that can't be asked for."""
    settings = dict(entrant.settings)
    beside: dict[str, Any] = {name: settings.pop(name) for name in BESIDE if name in settings}
    return CalibrationRequest(name=entrant.name, method=entrant.method, parameters=settings, **beside, **more)


def compete(
    run: PathLike,
    repairs: Sequence[Candidate],
    context: Context = Context(),
    *,
    samples: int | None = None,
    attribution: bool = True,
    against: str | None = None,
) -> dict[str, str]:
    """Calibrate a run with every repair in turn, on the same samples; those that are there are left as they are.

    `views` and `shrink` among an entrant's settings are the calibration's. Settings are those published for models of
    the run's kind, over which the entrant's own count; those of the spec's `calibration` take their place where it is
    of the same method and says some. One that was interrupted goes on where it stopped. Given is why those that could
    not be made could not, by name. A repair that all will be compared with, `against`, has to be among them or in the
    run.
    """
    manifest = open_run(run).manifest
    known = [*manifest.calibrations, *(entrant.name for entrant in repairs)]
    if against is not None and against not in known:
        raise SpecError(
            f"no repair is called {against!r}; there will be {', '.join(dict.fromkeys(known))}",
            hint=did_you_mean(against, known),
        )
    loader = str(manifest.architecture.get("loader"))
    section = None
    if context.live is None:
        reopening.require_spec(Path(run), manifest)
        section = load_spec(Path(run) / layout.SPEC).calibration

    def attempt(entrant: Candidate) -> Outcome[None]:
        kind = calibrators[entrant.method]
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if (
            section is not None
            and section.method == entrant.method
            and (section.preset or section.parameters)
        ):
            preset = None
        request = request_of(entrant, preset=preset, samples=samples, resume=True, attribution=attribution)
        calibrate(run, request, context, choose=choice_of(request))
        return Outcome()

    try:
        results = contest(repairs, one_by_one(attempt, context.access.team))
        outcomes = {entrant.name: outcome for entrant, outcome in results}
    except Cancelled as error:
        error.hint = "What was finished is kept; the same command goes on where it stopped."
        raise
    require_any(outcomes.values())
    return {name: outcome.error.message for name, outcome in outcomes.items() if outcome.error is not None}
