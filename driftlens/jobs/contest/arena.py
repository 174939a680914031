"""The arena: several repairs of one run, each calibrated, measured and kept under a name of its own."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from driftlens.base.access import Context
from driftlens.base.errors import Cancelled
from driftlens.base.files import PathLike
from driftlens.calibration.calibrator import calibrators
from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.contest.contest import Candidate, Outcome, candidates, contest, one_by_one, require_any
from driftlens.jobs.contest.excess import measure_excess
from driftlens.jobs.contest.sweep import sweep
from driftlens.runs import layout
from driftlens.runs.run import DriftRun, open_run
from driftlens.spec import load_spec
from driftlens.spec.requests import AnalysisRequest, CalibrationRequest, SweepRequest
from driftlens.suites.reproduce import Protocol, Suite, protocol_called


def entrants(given: Sequence[tuple[str, Mapping[str, object]]]) -> list[Candidate]:
    """The repairs asked for by method and settings, under names that calibrations can have; as `candidates`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")

    return candidates(given, calibrators, calibrators.__getitem__, name_of)


def compete(
    run: PathLike,
    wanted: Sequence[Candidate],
    context: Context = Context(),
    *,
    samples: int | None = None,
    attribution: bool = True,
) -> dict[str, str]:
    """Calibrate a run with every repair in turn, on the same samples; those that are there are left as they are.

    Settings are those published for models of the run's kind, over which the entrant's own count; those of the spec's
    `calibration` take their place where it is of the same method and says some. One that was interrupted goes on where
    it stopped. Given is why those that could not be made could not, by name.
    """
    loader = str(open_run(run).manifest.architecture.get("loader"))
    spec = pathlib.Path(run) / layout.SPEC
    section = load_spec(spec).calibration if spec.is_file() else None  # runs of live modules have none

    def attempt(entrant: Candidate) -> Outcome[None]:
        kind, name = calibrators[entrant.method], entrant.name
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if (
            section is not None
            and section.method == entrant.method
            and (section.preset or section.parameters)
        ):
            preset = None
        request = CalibrationRequest(
            name=name,
            method=entrant.method,
            preset=preset,
            parameters=dict(entrant.settings),
            samples=samples,
            resume=True,
            attribution=attribution,
        )
        calibrate(run, request, context)
        return Outcome()

    try:
        met = contest(wanted, one_by_one(attempt, context.access.team))
        outcomes = {entrant.name: outcome for entrant, outcome in met}
    except Cancelled as error:
        error.hint = "What was finished is kept; the same command goes on where it stopped."
        raise
    require_any(outcomes.values())
    return {name: at.error.message for name, at in outcomes.items() if at.error is not None}


def reproduce(
    name: str,
    suite: Suite,
    folder: Path,
    out: Path,
    context: Context = Context(),
    *,
    protocol: str = "main",
) -> tuple[dict[str, DriftRun], dict[str, str]]:
    """The runs of a protocol by merge method, each under `out`, and why repairs are missing."""
    study = protocol_called(protocol)
    wanted = entrants([*study.repairs(suite).items()])
    specs = {merger: suite.run_spec(name, merger, folder) for merger in study.of(suite)}
    runs, failed = dict[str, DriftRun](), dict[str, str]()
    for merger, spec in specs.items():
        place = out / merger
        analyze(spec, AnalysisRequest(out=place, resume=True, attribution=study.traces), context)
        if study.is_excess:
            measure_excess(place, study.repairs(suite)["featcal"], context, resume=True)
        elif study.vary is None:
            missing = compete(place, wanted, context, attribution=study.traces)
            failed |= {f"{merger} {repair}": why for repair, why in missing.items()}
        else:
            sweep(place, sweep_of(study, suite), context)
        runs[merger] = open_run(place)
    return runs, failed


def sweep_of(study: Protocol, suite: Suite) -> SweepRequest:
    """What a protocol that varies something sweeps on each of its runs, whose specs may have published settings."""
    assert study.vary is not None
    repairs = {name: dict(settings) for name, settings in study.repairs(suite).items()}
    return SweepRequest(
        param={name: [*values] for name, values in study.vary(suite).items()},
        method=tuple(repairs),
        settings=repairs,
        seeds=study.seeds,
        ablate=study.ablate,
        resume=True,
    )
