"""A suite's protocols: its runs made one after the other, repaired and swept as a published table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from driftlens.access import Access
from driftlens.calibration.calibrator import ClosedFormBase, calibrators
from driftlens.errors import SpecError, did_you_mean
from driftlens.pipeline.analyze.job import analyze
from driftlens.pipeline.search.arena import compete, entrants
from driftlens.pipeline.search.sweep import SweepRequest, sweep
from driftlens.progress import CancelToken, ProgressSink
from driftlens.records.run import DriftRun, open_run
from driftlens.suites.reproduce import MERGED, Suite

SEEDS = 3
"""Draws of the calibration samples in the paper's table of sample efficiency."""


def _samples(suite: Suite, spec: Any) -> SweepRequest:
    # A sweep tries closed forms only; what is trained per task stays out.
    solved = [name for name in suite.repairs if issubclass(calibrators[name], ClosedFormBase)]
    return SweepRequest({"n": suite.samples}, method=solved or "featcal", seeds=SEEDS, preset=_preset(spec))


def _ablations(_suite: Suite, spec: Any) -> SweepRequest:
    return SweepRequest({}, ablate=True, method="featcal", preset=_preset(spec))


def _preset(spec: Any) -> str | None:
    found: str | None = getattr(spec.calibration, "preset", None)
    return found


PROTOCOLS: Mapping[str, Callable[[Suite, Any], SweepRequest] | None] = {
    "main": None,
    "samples": _samples,
    "ablations": _ablations,
}
"""Name -> what is swept, on the suite's Task Arithmetic or else its first merge; `main` is every merge and repair."""


def require_protocol(name: str) -> None:
    """Raises a SpecError that lists them where there is no such protocol."""
    if name not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        hint = did_you_mean(name, PROTOCOLS) or "Name one of these."
        raise SpecError(f"no protocol is called {name!r}; there are {known}", hint=hint)


def mergers_of(suite: Suite, protocol: str) -> list[str]:
    """The merges of the suite that a protocol runs. Errors as for `require_protocol`."""
    require_protocol(protocol)
    every = [*suite.mergers] or [MERGED]
    if protocol == "main":
        return every
    return ["task_arithmetic"] if "task_arithmetic" in every else every[:1]


def reproduce(
    name: str,
    suite: Suite,
    folder: Path,
    out: Path,
    *,
    protocol: str = "main",
    access: Access = Access(),
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> tuple[dict[str, DriftRun], dict[str, str]]:
    """The runs of a protocol by merge method, each under `out`, and why repairs are missing. Goes on where it stopped.

    Args:
        name: of the suite.
        suite: what to run.
        folder: its paths are relative to this one.
        out: where the runs go, a folder per merge.
        protocol: one of `PROTOCOLS`.
        access: what may be used, and on which device.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Raises:
        Cancelled: somebody asked to stop; what was finished is kept.
        DriftLensError: see the tree in `driftlens.errors`.
    """
    watched: dict[str, Any] = {"access": access, "on_progress": on_progress, "cancel": cancel}
    wanted = entrants([*suite.repairs.items()] or [("featcal", {})])
    specs = {merger: suite.run_spec(name, merger, folder) for merger in mergers_of(suite, protocol)}
    runs, failed = dict[str, DriftRun](), dict[str, str]()
    for merger, spec in specs.items():
        place = out / merger
        analyze(spec, out=place, resume=True, attribution=False, **watched)
        request = PROTOCOLS[protocol]
        if request is None:
            missing = compete(place, wanted, attribution=False, **watched)
            failed |= {f"{merger} {repair}": why for repair, why in missing.items()}
        else:
            sweep(place, request(suite, spec), resume=True, **watched)
        runs[merger] = open_run(place)
    return runs, failed
