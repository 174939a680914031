"""The main job: from a spec to a finished run directory, phase by phase, each of which can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from driftlens.diagnostics.task_vectors import alignment_rows
from driftlens.errors import SpecError
from driftlens.files import PathLike
from driftlens.models.loading import open_checkpoint
from driftlens.models.sources import content_digest
from driftlens.pipeline.diagnosis import TaskDiagnosis, diagnose
from driftlens.pipeline.evaluation import accuracy_rows
from driftlens.pipeline.merging import save_merge
from driftlens.pipeline.opening import OpenModels, open_study
from driftlens.pipeline.study import Study
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.records.manifest import LayerInfo, ModelInfo, read_manifest
from driftlens.records.run import DriftRun, open_run
from driftlens.records.writer import RunWriter
from driftlens.spec import RunSpec, load_spec

if TYPE_CHECKING:
    import pandas as pd

MERGED_FILE = "models/merged.safetensors"
"""Where a run keeps the merged model it made itself, in the base's key names and dtypes."""


def analyze(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    *,
    out: PathLike,
    resume: bool = False,
    force: bool = False,
    overrides: Sequence[str] = (),
    device: str | None = None,
    offline: bool = False,
    trust: bool = False,
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
        device: `auto`, `cpu` or `cuda`, over the spec's.
        offline: whether only files that were downloaded before may be used.
        trust: whether Python code named in the spec may run.
        synthetic: stamps the run as made of drawn data, so that nobody takes it for a benchmark.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Raises:
        DriftLensError: see the tree in `driftlens.errors`; the run directory's status says the same.
    """
    resolved = load_spec(spec, overrides)
    study, models = open_study(resolved, offline=offline, trust=trust, device=device)
    writer = _writer(resolved, out, resume=resume, force=force)
    with writer:
        reporter = Reporter(_both(writer.progress, on_progress), cancel)
        _describe(writer, study, synthetic=synthetic or writer.manifest.synthetic)
        if resolved.merge is not None:
            _merge(writer, resolved, study, models)
        run_phases(writer, study, reporter, deterministic=resolved.compute.deterministic)
    return open_run(out)


def analyze_study(
    study: Study,
    *,
    out: PathLike,
    force: bool = False,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """The same for a study of live modules; the run records what there is to record of them.

    Raises:
        DriftLensError: as for `analyze`.
    """
    described = f"# made from live modules; it can be read, not repeated\nname: {json.dumps(study.name)}\n"
    digest = hashlib.sha256(described.encode()).hexdigest()
    with RunWriter.create(out, spec_yaml=described, spec_digest=digest, name=study.name, force=force) as writer:
        reporter = Reporter(_both(writer.progress, on_progress), cancel)
        _describe(writer, study, synthetic=False)
        run_phases(writer, study, reporter)
    return open_run(out)


def run_phases(writer: RunWriter, study: Study, reporter: Reporter, *, deterministic: bool = False) -> None:
    """All phases of an analysis that are not done yet.

    Raises:
        DriftLensError: as for `analyze`.
    """
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    _phase(writer, "digests", lambda: _digest_models(writer, study))
    for task in study.tasks:
        _phase(writer, f"analyze:{task}", lambda task=task: _store(writer, task, diagnose(study, task, reporter)))
    if study.has_base:
        _phase(writer, "params", lambda: _compare_parameters(writer, study, reporter))
    for task in study.tasks:
        _phase(writer, f"evaluate:{task}", lambda task=task: _evaluate(writer, study, task, reporter))


def _writer(spec: RunSpec, out: PathLike, *, resume: bool, force: bool) -> RunWriter:
    folder = Path(out)
    if not resume or not (folder / "manifest.json").exists():
        return RunWriter.create(
            folder, spec_yaml=spec.dump(), spec_digest=spec.digest(), name=spec.name, force=force
        )
    if read_manifest(folder).spec_digest != spec.digest():
        raise SpecError(
            f"{folder} was begun with another spec",
            hint=f"Resume with `driftlens analyze {folder / 'spec.yaml'} --out {folder} --resume`, or choose another --out.",
        )
    return RunWriter.resume(folder)


def _both(*sinks: ProgressSink | None) -> ProgressSink:
    there = [sink for sink in sinks if sink is not None]

    def both(event: Any) -> None:
        for sink in there:
            sink(event)

    return both


def _describe(writer: RunWriter, study: Study, *, synthetic: bool) -> None:
    pool = study.pool
    writer.describe(
        synthetic=synthetic,
        device=str(pool.device) if pool.device.type == "cpu" else torch.cuda.get_device_name(pool.device),
        dtype=str(pool.dtype).removeprefix("torch."),
        threads={"torch": torch.get_num_threads()},
        seeds={"samples": study.seed},
        tasks=list(study.tasks),
        variants=list(study.variants),
        layers=[LayerInfo(layer.index, layer.role, layer.path) for layer in pool.chain.layers],
        architecture={"adapter": pool.chain.architecture, **study.architecture, **pool.chain.settings},
        preprocessing=study.preprocessing,
        classes={task: list(at.head.classes) for task, at in study.tasks.items() if at.head is not None},
    )
    for task, at_hand in study.tasks.items():
        if task in study.calibration:
            writer.write_sample_ids(task, "calibration", study.calibration[task])
        writer.write_sample_ids(task, "diagnosis", at_hand.diagnosis.ids)
        if at_hand.test is not None:
            writer.write_sample_ids(task, "test", at_hand.test.ids)
    for notice in study.notices:
        writer.notice(notice)


def _merge(writer: RunWriter, spec: RunSpec, study: Study, models: OpenModels) -> None:
    assert spec.merge is not None
    merge = spec.merge

    def save() -> None:
        with writer.file(MERGED_FILE) as path:
            save_merge(models, merge.method, merge.parameters, path)

    _phase(writer, "merge", save)
    saved = open_checkpoint(writer.folder / MERGED_FILE)
    study.pool.add("merged", models.architecture.align(saved))


def _phase(writer: RunWriter, name: str, work: Any) -> None:
    if writer.done(name):
        return
    with writer.phase(name) as usage:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        work()
        if torch.cuda.is_available():
            usage.peak_gpu_bytes = torch.cuda.max_memory_allocated()


def _digest_models(writer: RunWriter, study: Study) -> None:
    keys = study.pool.chain.keys()
    models = {}
    for name in study.pool.names:
        source = study.pool.source(name)
        count = sum(torch.Size(source.headers[key].shape).numel() for key in keys)
        models[name] = ModelInfo(content_digest(source, keys), count, study.provenance.get(name, source.name))
    writer.describe(models=models)


def _store(writer: RunWriter, task: str, found: TaskDiagnosis) -> None:
    import pandas as pd

    writer.append("layers", pd.DataFrame(found.layers), replace=True)
    writer.append("samples", _stacked(found.samples), replace=True)
    if found.outputs:
        writer.append("outputs", _stacked(found.outputs), replace=True)
    for (variant, layer), array in found.features.items():
        writer.write_features(task, variant, layer, array)


def _stacked(parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([pd.DataFrame(dict(part)) for part in parts], ignore_index=True)


def _compare_parameters(writer: RunWriter, study: Study, reporter: Reporter) -> None:
    import pandas as pd

    pairs = [(task, variant) for task in study.tasks for variant in study.explained_variants]
    rows = [
        {"task": task, "variant": variant, **row}
        for task, variant in reporter.track(pairs, "params", lambda pair: f"task {pair[0]}, {pair[1]}")
        for row in alignment_rows(study.pool, task, variant)
    ]
    writer.append("params", pd.DataFrame(rows), replace=True)


def _evaluate(writer: RunWriter, study: Study, task: str, reporter: Reporter) -> None:
    import pandas as pd

    variants = [*study.variants, "expert"]
    rows = accuracy_rows(study, task, variants, reporter)
    if rows:
        writer.append("accuracy", pd.DataFrame(rows), replace=True)


def evaluate(
    path: PathLike,
    *,
    again: bool = False,
    device: str | None = None,
    offline: bool = False,
    trust: bool = False,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """Measure the accuracy of every variant of a run that has not been measured yet, or of all.

    Args:
        path: the run directory.
        again: measure anew what is there.
        device: over the spec's.
        offline: whether only files that were downloaded before may be used.
        trust: whether Python code named in the spec may run.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop.

    Raises:
        DriftLensError: as for `analyze`.
    """
    with RunWriter.resume(path) as writer:
        wanted = [task for task in writer.manifest.tasks if again or not writer.done(f"evaluate:{task}")]
        if wanted:
            study = reopened(path, device=device, offline=offline, trust=trust)
            reporter = Reporter(_both(writer.progress, on_progress), cancel)
            for task in wanted:
                with writer.phase(f"evaluate:{task}"):
                    _evaluate(writer, study, task, reporter)
    return open_run(path)


def reopened(path: PathLike, *, device: str | None = None, offline: bool = False, trust: bool = False) -> Study:
    """The study behind a run directory, its merged model included.

    Raises:
        DriftLensError: as for `analyze`; the files the run's spec names may have moved.
    """
    folder = Path(path)
    study, models = open_study(load_spec(folder / "spec.yaml"), offline=offline, trust=trust, device=device)
    if "merged" not in study.pool:
        study.pool.add("merged", models.architecture.align(open_checkpoint(folder / MERGED_FILE)))
    return study
