"""Analyses of live modules and in-memory data, and later additions to them; no file is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from driftlens.config.requests import AnalysisRequest, LiveSettings, Modules, refuse_unknown
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.sites import select_layers
from driftlens.experiment.live import open_live
from driftlens.experiment.loading import OpenModels
from driftlens.experiment.resume import (
    deterministic_algorithms,
    require_same_models,
    require_same_samples,
)
from driftlens.experiment.study import Settings, Study
from driftlens.models.architecture import Architecture
from driftlens.pipelines.analyze import Phases, describe
from driftlens.runs.layout import MANIFEST
from driftlens.runs.manifest import ids_digest, read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.access import Context
from driftlens.utils.errors import DataError, SpecError
from driftlens.utils.variants import task_of

_LOADER = "live"
"""The manifest's name for the loader of modules that the caller has built."""
_FREE = ("n_calibration", "batch_size")
"""Settings on which no number of a run rests, so that they may be others when something is added to it."""
_ALIKE = 1e-4
"""How far apart scores of the same head may be on another machine, relative to their size."""


def live_study(built: Modules, settings: LiveSettings) -> Study:
    """Return a study of modules that the caller has built. They run in eval mode; nothing about them is changed."""
    live, kind = open_live(built, settings), type(built.merged).__name__
    names = live.pool.names
    paths = [layer.path for layer in live.pool.chain.layers]
    return Study(
        name=settings.name,
        pool=live.pool,
        variants=tuple(name for name in names if task_of(name) is None),
        tasks=live.tasks,
        settings=Settings(
            pool=live.pooling,
            stored_layers=frozenset(select_layers(paths, settings.layers)),
            options=frozenset(name for name in ("cka", "adjoint", "groups") if getattr(settings, name)),
            # A record says it as a mapping.
            jacobian=JacobianSettings(**how) if isinstance(how := settings.jacobian, Mapping) else how,
        ),
        seed=settings.seed,
        notices=live.notices,
        provenance=dict.fromkeys(names, f"live {kind}"),
        preprocessing=live.reads.backend,
        architecture={"loader": _LOADER, "source": kind, **live.reads.settings},
        head_marks=live.head_marks,
    )


def live_again(
    folder: pathlib.Path,
    given: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    num_calibration: int | None,
) -> tuple[Study, OpenModels]:
    """Return the study of a run of live modules, which are handed in again with their samples, and its models.

    `given` are fields of `Modules` and `LiveSettings`; what is left out is the run's. Settings, samples, labels and
    heads are compared with the run's; to compare weights is up to the caller.
    """
    of_modules = {field.name: None for field in dataclasses.fields(Modules)}
    refuse_unknown("modules", given, {**of_modules, **LiveSettings.keywords()})
    handed = {name: value for name, value in given.items() if name in of_modules and value is not None}
    stated = {name: value for name, value in given.items() if name not in of_modules}
    stated |= {} if num_calibration is None else {"n_calibration": num_calibration}
    begun = read_manifest(folder).live or {}
    was = LiveSettings(**begun.get("settings", {}))
    _require_same_settings(was, LiveSettings(**stated))
    settings = was.changed(**stated)
    if calibration is not None:
        handed = {"data": calibration, **handed, "calibration": calibration}
    modules = Modules(**handed)
    _require_what_was_given(folder, modules, settings, begun.get("contents", {}))
    study = live_study(modules, settings)
    _require_same_contents(begun.get("contents", {}), study)
    tasks = {
        task: data if data.calibration else dataclasses.replace(data, calibration=data.diagnosis)
        for task, data in study.tasks.items()
    }
    study = dataclasses.replace(study, tasks=tasks)
    sources = {name: study.pool.source(name) for name in study.pool.names}
    architecture = Architecture(_LOADER, type(modules.merged).__name__, modules.merged, study.pool.chain)
    return study, OpenModels(architecture, sources, sources, study.provenance, form=sources["merged"])


def _require_what_was_given(
    folder: pathlib.Path, modules: Modules, settings: LiveSettings, contents: Mapping[str, Any]
) -> None:
    """Refuse to add to a run without a module, data, a function or a head that it was made with."""
    missing = modules.missing
    missing += [name for name in ("mask", "tokenizer") if getattr(settings, name) is True]
    manifest = read_manifest(folder)
    # Nothing is noted of heads that language models bring.
    with_head = [task for task in manifest.classes if contents.get(task, {}).get("head", True)]
    missing += [f"heads of {task}" for task in with_head if task not in (modules.heads or {})]
    missing += ["base"] if "base" in manifest.variants and modules.base is None else []
    if missing:
        raise SpecError(
            f"{folder} was made from live modules, and to add to it these are missing: {', '.join(missing)}",
            hint="Hand in what dl.analyze was given: "
            "modules={'base': ..., 'merged': ..., 'experts': {...}, 'data': {...}, 'heads': {...}}.",
        )


def analyze_study(
    study: Study, request: AnalysisRequest, settings: LiveSettings, context: Context = Context()
) -> DriftRun:
    """Measure the drift of a study of live modules and write a run directory, in which `settings` are written down."""
    out = request.out or pathlib.Path("runs", study.name)
    live = {"settings": _recorded(settings), "contents": _contents(study)}
    digest = hashlib.sha256(json.dumps(live["settings"], sort_keys=True).encode()).hexdigest()
    goes_on = request.resume and (out / MANIFEST).exists()
    if goes_on:
        manifest = read_manifest(out)
        begun = manifest.live or {}
        if _recorded(LiveSettings(**begun.get("settings", {}))) != live["settings"]:
            raise SpecError(
                f"{out} was begun with other settings", hint="Resume with the same, or choose another out."
            )
        require_same_samples(manifest, study)
        _require_same_contents(begun.get("contents", {}), study)
        require_same_models(manifest, study, context.reporter())
    described = "# made from live modules; it can be read, and added to where they are handed in again\n"
    text = f"{described}name: {json.dumps(study.name)}\n"
    about: dict[str, Any] = {"spec_yaml": text, "spec_digest": digest, "name": study.name, "live": live}
    with RunWriter.resume(out) if goes_on else RunWriter.create(out, **about, force=request.force) as writer:
        reporter = context.reporter(writer.progress)
        describe(writer, study, synthetic=False)
        with deterministic_algorithms(study.settings.deterministic):
            Phases(writer, study, reporter).analyze()
    return open_run(out)


def _recorded(settings: LiveSettings) -> dict[str, Any]:
    """Return the settings as JSON has them; functions and tokenizers stay with the caller."""
    return dict(json.loads(json.dumps(settings.model_dump(), default=lambda number: number.item())))


def _require_same_settings(was: LiveSettings, now: LiveSettings) -> None:
    """Refuse settings whose rows don't belong to those of the run."""
    old, new = _recorded(was), _recorded(now)
    for name in now.model_fields_set - {*_FREE}:
        if new[name] != old[name]:
            raise SpecError(
                f"modules has {name}={new[name]!r}, the run was made with {name}={old[name]!r}",
                hint="Leave it out: settings are those of the run. Analyze into another folder for other ones.",
            )


def _contents(study: Study) -> dict[str, dict[str, Any]]:
    """Return digests of each task's samples, labels and head."""
    return {
        task: {
            "samples": ids_digest(data.diagnosis.digests),
            "labels": ids_digest(data.diagnosis.labels or [text.target for text in data.diagnosis.all_texts]),
            "classes": ids_digest(data.head.classes if data.head is not None else ()),
            "head": list(study.head_marks.get(task, ())),
        }
        for task, data in study.tasks.items()
    }


def _require_same_contents(begun: Mapping[str, Any], study: Study) -> None:
    """Refuse other samples, labels or heads than the run's."""
    now = _contents(study)
    if begun and begun.keys() != now.keys():
        raise SpecError(f"the run was made with the tasks {', '.join(begun)}; given are {', '.join(now)}")
    for task, was in begun.items():
        for part in ("samples", "labels"):
            if was[part] != now[task][part]:
                raise DataError(
                    f"the diagnosis {part} of task {task} are not those of the run: the data has changed",
                    hint="Bring the data back, or analyze the data of today into a run of its own.",
                )
        begun_mark, mark = (torch.tensor(entry["head"], dtype=torch.float64) for entry in (was, now[task]))
        near = _ALIKE * float(begun_mark.abs().sum())
        is_alike = begun_mark.shape == mark.shape and torch.allclose(
            begun_mark, mark, rtol=0, atol=near, equal_nan=True
        )
        if was["classes"] != now[task]["classes"] or not is_alike:
            raise SpecError(
                f"the head of {task} is not the one that the run was made with",
                hint="Hand in that head, or analyze with the other one into a run of its own.",
            )
