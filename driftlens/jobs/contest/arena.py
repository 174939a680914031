"""The arena: several repairs of one run, each calibrated, measured and kept under a name of its own."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from driftlens.base.access import Access
from driftlens.base.errors import Cancelled, DriftLensError, RunError, SpecError
from driftlens.base.files import PathLike
from driftlens.base.progress import CancelToken, ProgressSink
from driftlens.base.settings import resolve
from driftlens.calibration.calibrator import calibrators
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.calibrate.plan import CalibrationRequest
from driftlens.runs import layout
from driftlens.runs.run import open_run
from driftlens.spec import load_spec


class Entrant(NamedTuple):
    """A repair in the arena: the name of its calibration, its method, and settings over the published ones."""

    name: str
    method: str
    settings: Mapping[str, object]


def entrants(given: Sequence[tuple[str, Mapping[str, object]]]) -> list[Entrant]:
    """The repairs asked for by method and settings, `all` being every method; no file is opened.

    Raises:
        SpecError: no such method, a setting that it does not have, a value that is not allowed, or one repair twice.
    """
    every = sorted(calibrators)
    asked = [(at, own) for name, own in given for at in (every if name == "all" and not own else (name,))]
    found: dict[str, Entrant] = {}
    for method, settings in asked:
        resolve(calibrators[method], settings, method)
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")
        if name in found:
            raise SpecError(f"{name} is asked for twice", hint="Name every repair once.")
        found[name] = Entrant(name, method, settings)
    return list(found.values())


def compete(
    run: PathLike,
    wanted: Sequence[Entrant],
    *,
    samples: int | None = None,
    attribution: bool = True,
    access: Access = Access(),
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> dict[str, str]:
    """Calibrate a run with every repair in turn, on the same samples; those that are there are left as they are.

    Settings are those published for models of the run's kind, over which the entrant's own count; those of the spec's
    `calibration` take their place where it is of the same method and says some. One that was interrupted goes on where
    it stopped.

    Args:
        run: its directory.
        wanted: the repairs.
        samples: calibration samples per task; None takes the spec's.
        attribution: whether drift is traced back to layers, too.
        access: what may be used, and on which device.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Returns:
        Name -> why it could not be made, of those that could not.

    Raises:
        Cancelled: somebody asked to stop; what was finished is kept.
        RunError: the run can't be written to, for example as the disk is full; what was finished is kept.
        DriftLensError: no repair could be made; the reason of the first.
    """
    loader = str(open_run(run).manifest.architecture.get("loader"))
    spec = pathlib.Path(run) / layout.SPEC
    section = load_spec(spec).calibration if spec.is_file() else None  # runs of live modules have none
    failed: dict[str, DriftLensError] = {}
    for entrant in wanted:
        kind = calibrators[entrant.method]
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if (
            section is not None
            and section.method == entrant.method
            and (section.preset or section.parameters)
        ):
            preset = None
        request = CalibrationRequest(
            entrant.name, method=entrant.method, preset=preset, parameters=entrant.settings, samples=samples
        )
        watched: dict[str, Any] = {"access": access, "on_progress": on_progress, "cancel": cancel}
        try:
            calibrate(run, request, resume=True, attribution=attribution, **watched)
        except (Cancelled, RunError):  # the run's own trouble, which all repairs share
            raise
        except DriftLensError as error:
            if not access.team.agrees(error):
                raise
            failed[entrant.name] = error
    if failed and len(failed) == len(wanted):
        raise next(iter(failed.values()))
    return {name: error.message for name, error in failed.items()}
