"""The main job: from a spec to a finished run directory, phase by phase, each of which can be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from driftlens.base.access import Access
from driftlens.base.errors import SpecError
from driftlens.base.files import PathLike, write_text_atomic
from driftlens.base.progress import CancelToken, ProgressSink, Reporter
from driftlens.base.variants import calibrated
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.jobs.analyze.phases import (
    all_of,
    complete_variants,
    describe,
    deterministic_algorithms,
    explain_variants,
    measure_accuracy,
    run_phase,
    run_phases,
)
from driftlens.jobs.study.companions import companions
from driftlens.jobs.study.merging import merge_of, save_merge
from driftlens.jobs.study.opening import OpenModels, calibration_settings, open_study
from driftlens.jobs.study.reopening import (
    MERGED_FILE,
    reopened,
    require_analyzed,
    require_same_models,
    require_same_samples,
    require_spec,
)
from driftlens.jobs.study.study import Study
from driftlens.jobs.study.suspicion import suspicions
from driftlens.jobs.study.writing import lead, writing
from driftlens.runs import layout
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.standing import is_live
from driftlens.runs.writer import RunWriter
from driftlens.spec import RunSpec, load_spec


def analyze(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    *,
    out: PathLike,
    resume: bool = False,
    force: bool = False,
    overrides: Sequence[str] = (),
    attribution: bool = True,
    access: Access = Access(),
    synthetic: bool = False,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """Measure the drift of every variant of a spec, and write it all into a run directory.

    Args:
        spec: a file, the values themselves, or a checked spec.
        out: the run directory, new or empty.
        resume: go on where an interrupted run of the same spec stopped.
        force: replace the run that is there.
        overrides: `a.b=value` each, over the spec.
        attribution: whether the drift is traced back to layers, once it and the accuracy are known; `explain` does
            so later.
        access: what may be used, and on which device.
        synthetic: stamps the run as made of drawn data, so that nobody takes it for a benchmark.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Raises:
        DriftLensError: see the tree in `driftlens.base.errors`; the run directory's status says the same.
    """
    resolved = load_spec(spec, overrides)
    # First of all: nothing need be opened to see that a setting is wrong.
    if resolved.merge is not None:
        merge_of(resolved, resolved.merge.method, resolved.merge.parameters)
    calibration_settings(resolved)
    study, models = open_study(resolved, access=access)
    # A run says how it pooled, also where its spec left that to the models.
    layers = resolved.layers.model_copy(update={"pool": study.settings.pool})
    resolved = resolved.model_copy(update={"layers": layers})
    team = access.team
    goes_on = team.once(lambda: resume and (Path(out) / "manifest.json").exists())
    if goes_on:  # before the lock: a refusal must not turn a finished run into a failed one
        team.once(lambda: _require_same_inputs(resolved, Path(out), study, Reporter(on_progress, cancel)))
    new = {"spec_yaml": resolved.dump(), "spec_digest": resolved.digest(), "name": resolved.name}
    opened = partial(RunWriter.resume, out) if goes_on else partial(RunWriter.create, out, **new, force=force)
    with writing(team, opened) as writer:
        reporter = Reporter(all_of(writer.progress, on_progress), cancel)

        def begin() -> None:
            if not (writer.folder / layout.SPEC).exists():  # the run was killed between its manifest and this
                write_text_atomic(writer.folder / layout.SPEC, new["spec_yaml"])
            describe(writer, study, synthetic=synthetic or writer.manifest.synthetic)
            for finding in (*suspicions(models.architecture.chain, models.sources), *companions(models)):
                if finding.level == "notice":
                    writer.notice(finding.text)

        lead(team, writer, begin)
        if resolved.merge is not None:
            _merge(writer, resolved, study, models, reporter)
        run_phases(writer, study, reporter, attribution=attribution)
    return open_run(out)


def _require_same_inputs(spec: RunSpec, folder: Path, study: Study, reporter: Reporter) -> None:
    """Refuse to go on with another spec, or with checkpoints that have changed since the run hashed them."""
    manifest = read_manifest(folder)
    is_same = manifest.spec_digest == spec.digest()
    if not is_same and not is_live(manifest):
        # The digest that an earlier version wrote counts keys that were taken out since.
        is_same = load_spec(folder / "spec.yaml") == spec
    if not is_same:
        raise SpecError(
            f"{folder} was begun with another spec",
            hint=f"Resume with `driftlens analyze {folder / 'spec.yaml'} --out {folder} --resume`, "
            "or choose another --out.",
        )
    require_same_models(manifest, study, reporter)


def _merge(writer: RunWriter, spec: RunSpec, study: Study, models: OpenModels, reporter: Reporter) -> None:
    assert spec.merge is not None
    merge = spec.merge
    method, settings = merge_of(spec, merge.method, merge.parameters)
    writer.describe(merge=method.record(settings))

    def save() -> None:
        with writer.file(MERGED_FILE) as path, deterministic_algorithms(study.settings.deterministic):
            save_merge(models, merge.method, merge.parameters, path, study, reporter)

    run_phase(writer, "merge", lambda: lead(study.team, writer, save))
    saved = open_checkpoint(writer.folder / MERGED_FILE)
    study.pool.add("merged", models.architecture.align(saved))


def explain(
    path: PathLike,
    *,
    access: Access = Access(),
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """Trace the drift of every variant of a run back to layers, where that was left out or interrupted.

    The run's spec says how; where it leaves Jacobians out, their default settings do.

    Args:
        path: the run directory.
        access: what may be used, and on which device.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Raises:
        RunError: the analysis itself is unfinished, or the run is damaged.
        SpecError: the run was made from live modules.
        CheckpointError: a checkpoint is not the one that the run was made with.
        DriftLensError: as for `analyze`.
    """
    folder = Path(path)
    require_analyzed(folder)
    # Before the lock: a refusal must not turn a finished run into a failed one.
    study, _ = reopened(folder, with_jacobian=True, access=access)
    manifest = read_manifest(folder)
    access.team.once(lambda: require_same_samples(manifest, study))
    access.team.once(lambda: require_same_models(manifest, study, Reporter(on_progress, cancel)))
    with writing(access.team, partial(RunWriter.resume, folder)) as writer:
        reporter = Reporter(all_of(writer.progress, on_progress), cancel)
        made = {calibrated(name): name for name in manifest.calibrations}
        made |= {info.control: name for name, info in manifest.calibrations.items() if info.control}
        with deterministic_algorithms(study.settings.deterministic):
            own = [variant for variant in study.explained_variants if variant not in made]
            explain_variants(writer, study, own, reporter)
            for name in manifest.calibrations:
                variants = [variant for variant in study.explained_variants if made.get(variant) == name]
                prefix = f"calibrate:{name}:"
                complete_variants(writer, study, variants, reporter, prefix=prefix)
                explain_variants(writer, study, variants, reporter, prefix=prefix)
    return open_run(folder)


def evaluate(
    path: PathLike,
    *,
    again: bool = False,
    access: Access = Access(),
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """Measure the accuracy of every variant of a run that has not been measured yet, or of all.

    Args:
        path: the run directory.
        again: measure anew what is there.
        access: what may be used, and on which device.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Raises:
        RunError: the analysis itself is unfinished, or the run is damaged.
        SpecError: the run was made from live modules, and there is something to measure.
        DriftLensError: as for `analyze`.
    """
    require_analyzed(Path(path))
    if again:  # before the lock: a refusal must not turn a finished run into a failed one
        require_spec(Path(path), read_manifest(Path(path)))
    with writing(access.team, partial(RunWriter.resume, path)) as writer:
        wanted = [task for task in writer.manifest.tasks if again or not writer.done(f"evaluate:{task}")]
        if wanted:
            study, _ = reopened(path, access=access)
            reporter = Reporter(all_of(writer.progress, on_progress), cancel)
            with deterministic_algorithms(study.settings.deterministic):
                for task in wanted:
                    work = partial(
                        measure_accuracy, writer, study, task, [*study.variants, "expert"], reporter
                    )
                    run_phase(writer, f"evaluate:{task}", work, study=study, again=True)
    return open_run(path)
