"""What a suite's protocol will download and cost, before it is begun."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftlens.base.access import Access
from driftlens.base.errors import CheckpointError
from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import hub_folder, repository_of
from driftlens.data.hf_datasets import repository_folder
from driftlens.jobs.preflight.cost import Cost, size_text
from driftlens.jobs.preflight.job import checked
from driftlens.jobs.preflight.rehearsal import Rehearsed, shares_of
from driftlens.jobs.study.study import Study
from driftlens.spec import RunSpec
from driftlens.spec.requests import CalibrationRequest
from driftlens.suites.protocols import Protocol, protocol_called
from driftlens.suites.reproduce import Suite, hub_ids


def plan(
    suite: Suite, specs: Mapping[str, RunSpec], protocol: str, *, access: Access = Access()
) -> dict[str, Any]:
    """The plan of a protocol as plain values; nothing is downloaded or written.

    `models` and `data` say of each repository the bytes that it takes in the local cache, None where it is not there;
    the Hub isn't asked how large others are. Once all models are there, `runs` holds what each analysis takes
    (`cost`, by preflight) and what its repairs or sweeps take (`more`), or else problems.

    Args:
        suite: as loaded.
        specs: of its runs, by merge.
        protocol: its name.
        access: what may be used, and on which device.
    """
    first, study = next(iter(specs.values())), protocol_called(protocol)
    models = {name: _cached_bytes(name) for name in hub_ids(first)}
    data = {name: _bytes(repository_folder(*repository_of(name))) for name in hub_ids(first, "data")}
    missing = [name for name, size in models.items() if size is None]
    runs = {}
    repairs: dict[str, Rehearsed] = {}  # they take as long whatever the merge
    for merger, spec in specs.items() if not missing else ():
        if not study.traces:
            spec = spec.model_copy(update={"metrics": spec.metrics.model_copy(update={"jacobian": False})})
        trials, more = list(trials_of(study, suite, spec)), None
        checks, opened = checked(spec, Access(access.device, True, access.trust))
        if opened is not None and checks.estimate(opened.analysis) is not None:
            for trial in trials:
                if trial.method not in repairs:
                    request = CalibrationRequest(
                        name="plan",
                        method=trial.method,
                        parameters=dict(trial.settings),
                        attribution=study.traces,
                    )
                    repairs[trial.method] = opened.calibration(request)
            more = _together(trials, repairs)
        others = [found.text for found in checks.findings if found.level != "ok"]
        runs[merger] = {
            "cost": checks.cost and vars(checks.cost),
            "more": more and vars(more),
            "calibrations": sum(trial.times for trial in trials),
            "text": checks.cost.text() if checks.cost else "; ".join(others),
            "more_text": more.text() if more else "",
        }
    return {
        **{"title": suite.title, "protocol": protocol, "about": study.about, "merges": [*specs]},
        **{"repairs": [*study.repairs(suite)], "models": models, "missing": missing, "data": data},
        **{"runs": runs, "note": suite.note},
    }


@dataclass(frozen=True)
class Trial:
    """Calibrations by one method, with about the same settings.

    Attributes:
        method: name of the calibrator.
        settings: of the suite.
        times: how many.
        samples: calibration samples per task.
        is_kept: whether each leaves its models in the run; else it is only solved and scored.
    """

    method: str
    settings: Mapping[str, Any]
    times: int
    samples: int
    is_kept: bool = False


def trials_of(study: Protocol, suite: Suite, spec: RunSpec) -> Iterator[Trial]:
    """The calibrations that a protocol makes on one of the suite's runs."""
    count = max(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    for method, settings in study.repairs(suite).items():
        if study.is_excess:
            yield Trial(method, settings, _EXCESS_FITS, count)
        elif study.vary is None:
            yield Trial(method, settings, 1, count, is_kept=True)
        elif study.ablate:
            yield Trial(method, settings, study.seeds * (1 + len(calibrators[method].ablations)), count)
        else:
            for name, values in study.vary(suite).items():
                for value in values:
                    yield Trial(method, settings, study.seeds, int(value) if name == "n" else count)


_EXCESS_FITS = 3
"""Fits on the features of the merged model, of the expert and of the deployed one, which are compared."""


def _together(trials: Sequence[Trial], repairs: Mapping[str, Rehearsed]) -> Cost:
    """About what all of them take, one after the other."""
    seconds, disk, memory = 0.0, 0, 0
    for trial in trials:
        rehearsal = repairs[trial.method]
        shares = {
            task: dataclasses.replace(share, calibration=share.calibration * trial.samples / count)
            for (task, share), count in zip(
                shares_of(rehearsal.study).items(), _counts(rehearsal.study), strict=True
            )
        }
        phases = rehearsal.seconds if trial.is_kept else [of for of in rehearsal.seconds if of in _SCORED]
        seconds += trial.times * sum(rehearsal.phase_seconds(phase, shares) for phase in phases)
        cost = rehearsal.cost
        disk += trial.times * cost.disk_bytes if trial.is_kept else 0
        memory = max(memory, cost.memory_bytes)
    return Cost(memory, disk, seconds)


_SCORED = ("calibrate", "evaluate")
"""Phases of a calibration that stand for one which only is solved and scored."""


def _counts(study: Study) -> list[int]:
    return [len(task.calibration or ()) or 1 for task in study.tasks.values()]


def plan_text(planned: Mapping[str, Any]) -> str:
    """The plan in lines."""
    lines = [f"{planned['title']}, protocol {planned['protocol']}: {planned['about']}"]
    lines += [f"merges: {', '.join(planned['merges'])}", f"repairs: {', '.join(planned['repairs'])}"]
    for kind, sizes in (("model", planned["models"]), ("data", planned["data"])):
        lines += [
            f"{kind} {name}: {'to be downloaded' if size is None else f'in the cache, {size_text(size)}'}"
            for name, size in sizes.items()
        ]
    for merger, run in planned["runs"].items():
        lines.append(f"analysis of {merger}: {run['text']}")
        if run["more_text"]:
            count = run["calibrations"]
            lines.append(f"{count} calibration{'s' if count > 1 else ''} of {merger}: {run['more_text']}")
    if planned["missing"]:
        lines.append(f"The cost is known once {len(planned['missing'])} models are in the cache.")
    return "\n".join([*lines, planned["note"]]).strip()


def _cached_bytes(repository: str) -> int | None:
    try:
        return _bytes(hub_folder(repository, offline=True))
    except CheckpointError:
        return None


def _bytes(folder: Path | None) -> int | None:
    if folder is None:
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
