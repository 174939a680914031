"""What a suite's protocol will download and cost, before it is begun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from driftlens.base.access import Access
from driftlens.base.errors import CheckpointError
from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import hub_folder, repository_of
from driftlens.data.hf_datasets import repository_folder
from driftlens.jobs.calibrate.plan import calibrator_of
from driftlens.jobs.preflight.costs import size_text
from driftlens.jobs.preflight.job import preflight
from driftlens.jobs.preflight.solving import Trial
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
    for merger, spec in specs.items() if not missing else ():
        if not study.traces:
            spec = spec.model_copy(update={"metrics": spec.metrics.model_copy(update={"jacobian": False})})
        trials = list(trials_of(study, suite, spec))
        checks = preflight(spec, access=Access(access.device, True, access.trust), trials=trials)
        runs[merger] = {
            "cost": checks.cost and vars(checks.cost),
            "more": checks.more and vars(checks.more),
            "calibrations": sum(trial.times for trial in trials),
            "text": checks.cost.text() if checks.cost else "; ".join(at.text for at in checks.problems),
            "more_text": checks.more.text() if checks.more else "",
        }
    return {
        **{"title": suite.title, "protocol": protocol, "about": study.about, "merges": [*specs]},
        **{"repairs": [*study.repairs(suite)], "models": models, "missing": missing, "data": data},
        **{"runs": runs, "note": suite.note},
    }


def trials_of(study: Protocol, suite: Suite, spec: RunSpec) -> Iterator[Trial]:
    """The calibrations that a protocol makes on one of the suite's runs."""
    count = max(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    for method, settings in study.repairs(suite).items():
        kind = calibrators[method]
        if study.is_excess:
            yield Trial(3, count, kind.effort)
        elif study.vary is None:
            request = CalibrationRequest(name="plan", method=method, parameters=dict(settings))
            has_control = calibrator_of(request, spec.calibration).anchor_reach != 1
            yield Trial(1, count, kind.effort, 1 + has_control, study.traces)
        elif study.ablate:
            yield Trial(study.seeds * (1 + len(kind.ablations)), count, kind.effort)
        else:
            for name, values in study.vary(suite).items():
                for value in values:
                    yield Trial(study.seeds, int(value) if name == "n" else count, kind.effort)


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
