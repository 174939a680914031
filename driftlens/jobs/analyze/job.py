"""The main job: from a spec to a finished run directory, phase by phase, each of which can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from driftlens.base.access import Context
from driftlens.base.errors import SpecError
from driftlens.base.files import PathLike, write_text_atomic
from driftlens.base.progress import Reporter
from driftlens.base.variants import calibrated
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.jobs.analyze.phases import (
    Phase,
    analysis,
    completing,
    describe,
    deterministic_algorithms,
    explaining,
    measuring,
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
from driftlens.spec.requests import AnalysisRequest


def analyze(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    request: AnalysisRequest = AnalysisRequest(),
    context: Context = Context(),
) -> DriftRun:
    """Measure the drift of every variant of a spec, and write it all into a run directory."""
    resolved = load_spec(spec, request.over_spec)
    out = request.out or Path("runs", resolved.name)
    # First of all: nothing need be opened to see that a setting is wrong.
    if resolved.merge is not None:
        merge_of(resolved, resolved.merge.method, resolved.merge.parameters)
    calibration_settings(resolved)
    study, models = open_study(resolved, access=context.access)
    # A run says how it pooled, also where its spec left that to the models.
    layers = resolved.layers.model_copy(update={"pool": study.settings.pool})
    resolved = resolved.model_copy(update={"layers": layers})
    team = context.access.team
    goes_on = team.once(lambda: request.resume and (out / "manifest.json").exists())
    if goes_on:  # before the lock: a refusal must not turn a finished run into a failed one
        team.once(lambda: _require_same_inputs(resolved, out, study, context.reporter()))
    new: dict[str, Any] = {
        "spec_yaml": resolved.dump(),
        "spec_digest": resolved.digest(),
        "name": resolved.name,
    }
    opened = (
        partial(RunWriter.resume, out)
        if goes_on
        else partial(RunWriter.create, out, **new, force=request.force)
    )
    with writing(team, opened) as writer:
        reporter = context.reporter(writer.progress)

        def begin() -> None:
            if not (writer.folder / layout.SPEC).exists():  # the run was killed between its manifest and this
                write_text_atomic(writer.folder / layout.SPEC, new["spec_yaml"])
            describe(writer, study, synthetic=request.synthetic or writer.manifest.synthetic)
            for finding in (*suspicions(models.architecture.chain, models.sources), *companions(models)):
                if finding.level == "notice":
                    writer.notice(finding.text)

        lead(team, writer, begin)
        if resolved.merge is not None:
            _merge(writer, resolved, study, models, reporter)
        with deterministic_algorithms(study.settings.deterministic):
            run_phases(writer, analysis(writer, study, reporter, attribution=request.attribution))
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
    merge = merge_of(spec, spec.merge.method, spec.merge.parameters)
    writer.describe(merge=merge.record)

    def save() -> None:
        with writer.file(MERGED_FILE) as path, deterministic_algorithms(study.settings.deterministic):
            save_merge(models, merge, path, study, reporter)

    run_phases(writer, [Phase("merge", save, leads=study.team)])
    saved = open_checkpoint(writer.folder / MERGED_FILE)
    study.pool.add("merged", models.architecture.align(saved))


def explain(path: PathLike, context: Context = Context()) -> DriftRun:
    """Trace the drift of every variant of a run back to layers where that was left out, by defaults if need be."""
    folder = Path(path)
    require_analyzed(folder)
    # Before the lock: a refusal must not turn a finished run into a failed one.
    study, _ = reopened(folder, context, with_jacobian=True)
    manifest = read_manifest(folder)
    context.access.team.once(lambda: require_same_samples(manifest, study))
    context.access.team.once(lambda: require_same_models(manifest, study, context.reporter()))
    with writing(context.access.team, partial(RunWriter.resume, folder)) as writer:
        reporter = context.reporter(writer.progress)
        made = {calibrated(name): name for name in manifest.calibrations}
        made |= {info.control: name for name, info in manifest.calibrations.items() if info.control}
        with deterministic_algorithms(study.settings.deterministic):
            own = [variant for variant in study.explained_variants if variant not in made]
            run_phases(writer, explaining(writer, study, own, reporter))
            for name in manifest.calibrations:
                variants = [variant for variant in study.explained_variants if made.get(variant) == name]
                prefix = f"calibrate:{name}:"
                run_phases(writer, completing(writer, study, variants, reporter, prefix=prefix))
                run_phases(writer, explaining(writer, study, variants, reporter, prefix=prefix))
    return open_run(folder)


def evaluate(path: PathLike, context: Context = Context(), *, again: bool = False) -> DriftRun:
    """Measure the accuracy of every variant of a run that has not been measured yet, or of all."""
    require_analyzed(Path(path))
    if again:  # before the lock: a refusal must not turn a finished run into a failed one
        require_spec(Path(path), read_manifest(Path(path)))
    with writing(context.access.team, partial(RunWriter.resume, path)) as writer:
        wanted = [task for task in writer.manifest.tasks if again or not writer.done(f"evaluate:{task}")]
        if wanted:
            study, _ = reopened(path, context)
            reporter = context.reporter(writer.progress)
            with deterministic_algorithms(study.settings.deterministic):
                measured = measuring(writer, study, (*study.variants, "expert"), reporter)
                names = {f"evaluate:{task}" for task in wanted}
                run_phases(writer, (replace(phase, again=True) for phase in measured if phase.name in names))
    return open_run(path)
