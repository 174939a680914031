"""Analysis of live modules and in-memory data. Entry points: `study_of_modules`, then `analyze_study`.

`reopen_live_study` reopens a run with the modules passed in again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from driftlens.config.requests import AnalysisRequest, LiveSettings, Modules, check_keywords
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.sites import select_layers
from driftlens.experiment.live import open_modules
from driftlens.experiment.study import AnalysisSettings, Study
from driftlens.experiment.study_loading import OpenModels
from driftlens.models.architecture import Architecture
from driftlens.pipelines.analyze import (
    AnalysisPhases,
    deterministic_algorithms,
    record_inputs,
    require_same_models,
    require_same_samples,
)
from driftlens.runs.manifest import MANIFEST, Manifest, read_manifest, sample_ids_digest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import DataError, SpecError
from driftlens.utils.variants import task_of_expert

# The loader in the manifest for modules built by the caller.
_LOADER = "live"
# Settings that affect no stored number, so they may differ in later additions.
_CHANGEABLE = ("n_calibration", "batch_size")
# Largest difference of the same head's scores between machines, relative to their size.
_HEAD_TOLERANCE = 1e-4


def study_of_modules(built: Modules, settings: LiveSettings) -> Study:
    """Build a study of modules in memory; they run in eval mode and are not changed."""
    live, kind = open_modules(built, settings), type(built.merged).__name__
    names, jacobian = live.pool.names, settings.jacobian
    paths = [layer.path for layer in live.pool.chain.layers]
    return Study(
        name=settings.name,
        pool=live.pool,
        variants=tuple(name for name in names if task_of_expert(name) is None),
        tasks=live.tasks,
        settings=AnalysisSettings(
            pool=live.pooling,
            stored_layers=frozenset(select_layers(paths, settings.layers)),
            options=frozenset(name for name in ("cka", "adjoint") if getattr(settings, name)),
            # The manifest stores a mapping.
            jacobian=JacobianSettings(**jacobian) if isinstance(jacobian, Mapping) else jacobian,
        ),
        seed=settings.seed,
        notices=live.notices,
        provenance=dict.fromkeys(names, f"live {kind}"),
        preprocessing=live.reads.backend,
        architecture={"loader": _LOADER, "source": kind, **live.reads.settings},
        head_marks=live.head_marks,
    )


def reopen_live_study(
    folder: pathlib.Path,
    passed: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    num_calibration: int | None,
) -> tuple[Study, OpenModels]:
    """Reopen a run of modules in memory; refuse other settings, samples or heads.

    Args:
        folder: the run directory.
        passed: fields of `Modules` and `LiveSettings`; the run's settings replace missing ones.
        calibration: calibration samples by task, also used as `data` if that is missing.
        num_calibration: calibration samples per task; None takes the run's.
    """
    of_modules = {field.name: None for field in dataclasses.fields(Modules)}
    check_keywords("modules", passed, {**of_modules, **LiveSettings.field_defaults()})
    fields = {name: value for name, value in passed.items() if name in of_modules and value is not None}
    changes = {name: value for name, value in passed.items() if name not in of_modules}
    changes |= {} if num_calibration is None else {"n_calibration": num_calibration}
    before, contents = _recorded_inputs(read_manifest(folder))
    _require_same_settings(before, LiveSettings(**changes))
    settings = before.with_changes(**changes)
    if calibration is not None:
        fields = {"data": calibration, **fields, "calibration": calibration}
    modules = Modules(**fields)
    _require_original_inputs(folder, modules, settings, contents)
    study = study_of_modules(modules, settings)
    _require_same_data(contents, study)
    # Without separate calibration samples, the diagnosis samples serve both; a notice says so.
    tasks = {
        task: data if data.calibration else dataclasses.replace(data, calibration=data.diagnosis)
        for task, data in study.tasks.items()
    }
    study = dataclasses.replace(study, tasks=tasks)
    sources = {name: study.pool.source(name) for name in study.pool.names}
    architecture = Architecture(_LOADER, type(modules.merged).__name__, modules.merged, study.pool.chain)
    return study, OpenModels(architecture, sources, sources, study.provenance, form=sources["merged"])


def _require_original_inputs(
    folder: pathlib.Path, modules: Modules, settings: LiveSettings, contents: Mapping[str, Any]
) -> None:
    """Refuse to add to a run unless the modules, data, functions and heads that made it are passed."""
    missing = modules.missing_fields
    missing += [name for name in ("mask", "tokenizer") if getattr(settings, name) is True]
    manifest = read_manifest(folder)
    # The heads of language models are part of the modules, so the manifest records none.
    with_head = [task for task in manifest.classes if contents.get(task, {}).get("head", True)]
    missing += [f"heads of {task}" for task in with_head if task not in (modules.heads or {})]
    missing += ["base"] if "base" in manifest.variants and modules.base is None else []
    if missing:
        raise SpecError(
            f"{folder} was made from live modules; missing: {', '.join(missing)}",
            hint="Pass the arguments of dl.analyze again: "
            "modules={'base': ..., 'merged': ..., 'experts': {...}, 'data': {...}, 'heads': {...}}.",
        )


def analyze_study(
    study: Study, request: AnalysisRequest, settings: LiveSettings, context: JobContext = JobContext()
) -> DriftRun:
    """Measure the drift of modules in memory and write a run directory.

    Args:
        study: the modules and samples, see `study_of_modules`.
        request: output folder, and whether to resume or replace a run.
        settings: stored in the run.
        context: device, progress and cancellation.
    """
    out = request.out or pathlib.Path("runs", study.name)
    live = {"settings": _settings_as_json(settings), "contents": _sample_and_head_digests(study)}
    # Stands in for the digest of a spec, which live modules don't have.
    digest = hashlib.sha256(json.dumps(live["settings"], sort_keys=True).encode()).hexdigest()
    resumes = request.resume and (out / MANIFEST).exists()
    if resumes:
        manifest = read_manifest(out)
        before, contents = _recorded_inputs(manifest)
        if _settings_as_json(before) != live["settings"]:
            raise SpecError(
                f"{out} was begun with other settings",
                hint="Resume with the same settings, or choose another out.",
            )
        require_same_samples(manifest, study)
        _require_same_data(contents, study)
        require_same_models(manifest, study, context.reporter())
    described = "# made from live modules; pass them in again to add to this run\n"
    text = f"{described}name: {json.dumps(study.name)}\n"
    about: dict[str, Any] = {"spec_yaml": text, "spec_digest": digest, "name": study.name, "live": live}
    with RunWriter.resume(out) if resumes else RunWriter.create(out, **about, force=request.force) as writer:
        reporter = context.reporter(writer.progress)
        record_inputs(writer, study, synthetic=False)
        with deterministic_algorithms(study.settings.deterministic):
            AnalysisPhases(writer, study, reporter).measure_all(request)
    return open_run(out)


def _recorded_inputs(manifest: Manifest) -> tuple[LiveSettings, Mapping[str, Any]]:
    """Return the settings and data digests of a run of live modules; removed settings are left out."""
    recorded = manifest.live or {}
    known = LiveSettings.field_defaults()
    settings = {name: value for name, value in recorded.get("settings", {}).items() if name in known}
    return LiveSettings(**settings), recorded.get("contents", {})


def _settings_as_json(settings: LiveSettings) -> dict[str, Any]:
    """Return the settings as JSON values, without functions and tokenizers."""
    return dict(json.loads(json.dumps(settings.model_dump(), default=lambda number: number.item())))


def _require_same_settings(before: LiveSettings, now: LiveSettings) -> None:
    old, new = _settings_as_json(before), _settings_as_json(now)
    for name in now.model_fields_set - {*_CHANGEABLE}:
        if new[name] != old[name]:
            raise SpecError(
                f"modules has {name}={new[name]!r}, the run was made with {name}={old[name]!r}",
                hint="Leave it out, or analyze into another folder.",
            )


def _sample_and_head_digests(study: Study) -> dict[str, dict[str, Any]]:
    return {
        task: {
            "samples": sample_ids_digest(data.diagnosis.digests),
            "labels": sample_ids_digest(data.diagnosis.labels or [text.target for text in data.diagnosis.all_texts]),
            "classes": sample_ids_digest(data.head.classes if data.head is not None else ()),
            "head": list(study.head_marks.get(task, ())),
        }
        for task, data in study.tasks.items()
    }


def _require_same_data(recorded: Mapping[str, Any], study: Study) -> None:
    contents = _sample_and_head_digests(study)
    if recorded and recorded.keys() != contents.keys():
        raise SpecError(f"the run was made with the tasks {', '.join(recorded)}; passed are {', '.join(contents)}")
    for task, before in recorded.items():
        now = contents[task]
        for part in ("samples", "labels"):
            if before[part] != now[part]:
                raise DataError(
                    f"the diagnosis {part} of task {task} are not those of the run",
                    hint="Restore the data, or analyze into another folder.",
                )
        # Scores of the same head differ by rounding between machines, so they are compared, not hashed.
        old, new = (torch.tensor(entry["head"], dtype=torch.float64) for entry in (before, now))
        limit = _HEAD_TOLERANCE * float(old.abs().sum())
        is_equal = old.shape == new.shape and torch.allclose(old, new, rtol=0, atol=limit, equal_nan=True)
        if before["classes"] != now["classes"] or not is_equal:
            raise SpecError(
                f"the head of {task} differs from the run's",
                hint="Pass the run's head, or analyze into another folder.",
            )
