"""A finished run's models and samples, opened once more to add something to it, and whether they are still the same."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from driftlens.base.access import Access, Context
from driftlens.base.errors import CheckpointError, DataError, RunError, SpecError
from driftlens.base.files import PathLike
from driftlens.base.progress import Reporter
from driftlens.base.variants import calibrated
from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.engine.attached import Attachments, attachments_from
from driftlens.jobs.study.opening import OpenModels, open_study
from driftlens.jobs.study.study import Study
from driftlens.runs import layout
from driftlens.runs.manifest import Manifest, read_manifest
from driftlens.runs.standing import is_live, unanalyzed
from driftlens.runs.status import living_owner_of
from driftlens.spec import RunSpec, load_spec

MERGED_FILE = "models/merged.safetensors"
"""Where a run keeps the merged model it made itself, in the base's key names and dtypes."""


def reopened(
    path: PathLike,
    context: Context = Context(),
    *,
    num_calibration: int | None = None,
    with_calibrations: bool = True,
    with_jacobian: bool = False,
) -> tuple[Study, OpenModels]:
    """The study behind a run directory, the merged model included, and its checkpoints."""
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    if context.live is None:
        require_spec(folder, manifest)
        study, models = _of_spec(folder, num_calibration, context.access, with_jacobian=with_jacobian)
    else:
        study, models = context.live(num_calibration)
    for name, info in manifest.calibrations.items() if with_calibrations else ():
        add_calibration(study, models, folder, name, info.method, info.control)
    later = tuple(name for name in manifest.variants if name not in study.variants and name in study.pool)
    return dataclasses.replace(study, variants=(*study.variants, *later)), models


def _of_spec(
    folder: pathlib.Path, num_calibration: int | None, access: Access, *, with_jacobian: bool
) -> tuple[Study, OpenModels]:
    spec = load_spec(folder / "spec.yaml")
    if num_calibration is not None:
        # Fewer are a beginning of those drawn, so that nothing else is drawn differently (`data.drawing.draw`).
        there = {task: entry.n or spec.data.defaults.n for task, entry in spec.data.tasks.items()}
        spec = redrawn(spec, {task: max(count, num_calibration) for task, count in there.items()})
    if with_jacobian and spec.metrics.jacobian is False:
        spec = load_spec(spec, ["metrics.jacobian={}"])
    study, models = open_study(spec, access=access)
    if "merged" not in study.pool:
        study.pool.add("merged", models.architecture.align(open_checkpoint(folder / MERGED_FILE)))
    return study, models


def add_calibration(
    study: Study, models: OpenModels, folder: pathlib.Path, name: str, method: str, control: str
) -> None:
    """Put a calibrated variant, with what is attached to it, and its control into the study's pool."""
    weights = {calibrated(name): layout.calibration_weights(name)}
    if control:
        weights[control] = layout.calibration_weights(name, control=True)
    for variant, relative in weights.items():
        attached = None if variant == control else _attached(folder, name, method)
        study.pool.add(variant, models.architecture.align(open_checkpoint(folder / relative)), attached)


def _attached(run: pathlib.Path, name: str, method: str) -> Attachments:
    """What a finished calibration of a run attaches; nothing for closed forms."""
    file = run / layout.calibration_attachments(name)
    if not file.exists():
        return {}
    kind = calibrators[method]
    if not issubclass(kind, Trained):
        raise CheckpointError(
            f"{file} holds attachments, and {method} makes none", hint="Calibrate again under another name."
        )
    source = open_checkpoint(file)
    return attachments_from(((key, source.read(key)) for key in source.headers), kind.attachment)


def require_spec(folder: pathlib.Path, manifest: Manifest) -> None:
    """Refuse a run of live modules where nobody hands them in again: no spec says how to get them back."""
    if is_live(manifest):
        raise SpecError(
            f"{folder} was made from live modules, which are not there any more: it can be read, not added to",
            hint="Hand them in again from Python, as `driftlens.open_run(...).calibrate(..., modules={...})`, or save "
            "them as checkpoints and analyze a spec that names these.",
        )


def require_analyzed(folder: pathlib.Path) -> None:
    """Refuse a run whose analysis was interrupted: to finish here would call it done."""
    manifest = read_manifest(folder)
    missing = unanalyzed(manifest)
    if missing and living_owner_of(folder) is None:  # else taking the lock will say who is at it
        command = f"driftlens analyze {folder / 'spec.yaml'} --out {folder} --resume"
        command = "dl.analyze(..., resume=True)" if is_live(manifest) else command
        raise RunError(
            f"{folder} is unfinished; still to be done: {', '.join(missing)}",
            hint=f"`{command}` goes on, accuracy included.",
        )


def redrawn(spec: RunSpec, counts: Mapping[str, int], seed: int | None = None) -> RunSpec:
    """The spec with other numbers of calibration samples by task, and perhaps another seed."""
    values = spec.as_dict()
    if seed is not None:
        values["data"]["defaults"]["seed"] = seed
    for task, count in counts.items():
        values["data"][task]["n"] = count
    return load_spec(values)


def require_same_models(manifest: Manifest, study: Study, reporter: Reporter) -> None:
    """Refuse models that changed since the run looked at them; their files are read and hashed again."""
    names = [name for name in manifest.models if name in study.pool]
    for name in reporter.track(names, "check", lambda name: f"is {name} unchanged?"):
        recorded = manifest.models[name]
        if study.model_info(name).digest != recorded.digest:
            raise CheckpointError(
                f"{name} is not the model that the run was made with: {study.pool.source(name).name} has changed",
                hint="Bring that model back, or analyze the models of today into a run of their own.",
                model=name,
            )


def require_same_samples(manifest: Manifest, study: Study) -> None:
    """Refuse data that the run's rows are not about; live samples are numbered, so that a few are looked at, too."""
    for task, at_hand in study.tasks.items():
        for split, samples in (("diagnosis", at_hand.diagnosis), ("test", at_hand.test)):
            recorded = manifest.sample_ids.get(split, {}).get(task)
            if recorded is None or samples is None:
                continue
            origin = manifest.sample_origins.get(split, {}).get(task)
            is_other = is_live(manifest) and origin is not None and origin != samples.origin()
            if is_other or list(recorded) != list(samples.ids):
                raise DataError(
                    f"the {split} samples of task {task} are not those of the run: the data has changed",
                    hint="Bring the data back, or analyze the data of today into a run of its own.",
                )
