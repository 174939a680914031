"""A suite's protocols: its runs made one after the other, repaired and swept as a published table says."""

from __future__ import annotations

from pathlib import Path

from driftlens.base.access import Context
from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.contest.arena import compete, entrants
from driftlens.jobs.contest.excess import measure_excess
from driftlens.jobs.contest.sweep import sweep
from driftlens.runs.run import DriftRun, open_run
from driftlens.spec.requests import AnalysisRequest, SweepRequest
from driftlens.suites.protocols import Protocol, protocol_called
from driftlens.suites.reproduce import Suite


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
