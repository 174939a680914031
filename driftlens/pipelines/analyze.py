"""Analysis of a spec in phases, and the reopening of runs. Entry points: `analyze`, `reopen_study`, `run_phase`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.config.requests import AnalysisRequest
from driftlens.config.spec import load_spec
from driftlens.data.samples import DRAWN_BY, halve_batch_on_oom
from driftlens.engine.pool import Attachments, attachments_from_tensors
from driftlens.engine.walk import FeatureStore
from driftlens.experiment.merging import save_merge, validated_merge
from driftlens.experiment.sanity_checks import check_model_files, check_weights, estimate_task_vectors
from driftlens.experiment.study import Study, TaskSamples
from driftlens.experiment.study_loading import OpenModels, calibration_settings, open_study
from driftlens.models.heads import is_vocabulary_head
from driftlens.pipelines.drift import TracedFeatures, compute_attribution, measure_task
from driftlens.pipelines.evaluation import TaskResults, score_variants
from driftlens.runs.manifest import (
    LONGEST_TEXT,
    MANIFEST,
    MOST_THUMBS,
    SCRATCH,
    SPEC,
    THUMB_SIDE,
    LayerInfo,
    Manifest,
    calibrated_weights_file,
    corrections_file,
    read_manifest,
    texts_file,
    thumbs_file,
)
from driftlens.runs.run import DriftRun, has_live_modules, open_run, require_analyzed, resume_command
from driftlens.runs.schema import LAYERS, TABLES
from driftlens.runs.writer import RunLock, RunWriter
from driftlens.utils.devices import (
    HOST,
    accelerator,
    convert_device_errors,
    device_name,
    full_precision_matmul,
    host_fallbacks,
    peak_memory,
    reset_peak_memory,
)
from driftlens.utils.distributed import JobContext, ProcessGroup, ProgressReporter
from driftlens.utils.errors import Cancelled, CheckpointError, DataError, RunError, SpecError, did_you_mean
from driftlens.utils.files import PathLike, write_text_atomic
from driftlens.utils.registry import ColumnSchema, Diagnostic, diagnostics, enabled_diagnostics
from driftlens.utils.variants import calibrated_variant, has_attribution

if TYPE_CHECKING:
    from driftlens.config.spec import RunSpec
    from driftlens.data.sources import Picture

# The merged model that a run has made, in the base's key names and dtypes.
MERGED_FILE = "models/merged.safetensors"
# Largest difference of equal samples in float32 batches of different sizes, relative to the largest feature.
_ROUNDING = 1e-5


def analyze(
    spec: Path | str | Mapping[str, Any] | RunSpec,
    request: AnalysisRequest = AnalysisRequest(),
    context: JobContext = JobContext(),
) -> DriftRun:
    """Measure the drift of every variant of a spec and write a run directory.

    Args:
        spec: a spec, its content, or its file.
        request: output folder, overrides, and what to measure.
        context: device, progress and cancellation.

    Raises:
        SpecError: the spec is invalid, or an unfinished run has another one.
        CheckpointError: a model can't be read, or it changed since the run was started.
        NumericsError: the drift differs from that of the models' own library, or of float64.
    """
    resolved = load_spec(spec, request.overrides)
    out = request.out or Path("runs", resolved.name)
    # First, because invalid settings are found without opening anything.
    if resolved.merge is not None:
        validated_merge(resolved, resolved.merge.method, resolved.merge.parameters)
    calibration_settings(resolved)
    study, models = open_study(resolved, access=context.access)
    # The stored spec states the pooling, also where it was left to the models.
    layers = resolved.layers.model_copy(update={"pool": study.settings.pool})
    resolved = resolved.model_copy(update={"layers": layers})
    team = context.access.team
    resumes = team.run_on_main(lambda: request.resume and (out / MANIFEST).exists())
    # Before the lock: a refusal must not turn a finished run into a failed one.
    if resumes:
        team.run_on_main(lambda: _require_same_inputs(resolved, out, study, context.reporter()))
    text = resolved.dump()
    about: dict[str, Any] = {"spec_yaml": text, "spec_digest": resolved.digest(), "name": resolved.name}
    create = partial(RunWriter.create, out, **about, force=request.force)
    less = " --no-attribution" * (not request.attribution)
    again = f"`{resume_command(out)}{less}` resumes"
    opened = open_writer(team, partial(RunWriter.resume, out) if resumes else create)
    with opened as writer, with_resume_hint(lambda: (out / MANIFEST).is_file() and again):
        reporter = context.reporter(writer.progress)

        # Before anything is computed, so that readers can name what is missing in an unfinished run.
        def _record_run_inputs() -> None:
            # Missing if the run was killed right after its manifest was written.
            if not (writer.folder / SPEC).exists():
                write_text_atomic(writer.folder / SPEC, text)
            record_inputs(writer, study, synthetic=request.synthetic or writer.manifest.synthetic)
            changes = estimate_task_vectors(models)
            writer.update_manifest(changes={name: vars(change) for name, change in changes.items()})
            findings = check_weights(models.architecture.chain, models.sources) + check_model_files(models, changes)
            for finding in findings:
                if finding.level == "notice":
                    writer.notice(finding.text)

        on_main_process(team, writer, _record_run_inputs)
        if resolved.merge is not None:
            _run_merge_phase(writer, resolved, study, models, reporter)
        with deterministic_algorithms(study.settings.deterministic):
            phases = AnalysisPhases(writer, study, reporter)
            phases.measure_all(request)
    return open_run(out)


def _require_same_inputs(spec: RunSpec, folder: Path, study: Study, reporter: ProgressReporter) -> None:
    """Refuse to resume a run with another spec or with changed checkpoints."""
    manifest = read_manifest(folder)
    if manifest.spec_digest != spec.digest():
        # The digest of an earlier version includes keys that were removed since.
        stored = spec if has_live_modules(manifest) else load_spec(folder / SPEC)
        if has_live_modules(manifest) or stored != spec:
            difference = first_difference(stored.as_dict(), spec.as_dict())
            raise SpecError(
                f"{folder} was begun with {difference or 'another spec'}",
                hint=f"Resume with `{resume_command(folder)}`, choose another --out, or replace it with --force.",
            )
    require_same_models(manifest, study, reporter)


def _run_merge_phase(
    writer: RunWriter, spec: RunSpec, study: Study, models: OpenModels, reporter: ProgressReporter
) -> None:
    assert spec.merge is not None
    merge = validated_merge(spec, spec.merge.method, spec.merge.parameters)
    writer.update_manifest(merge=merge.record)

    def _save_merged_model() -> None:
        with (
            writer.file(MERGED_FILE) as path,
            deterministic_algorithms(study.settings.deterministic),
        ):
            record, notices = save_merge(models, merge, path, study, reporter)
        writer.update_manifest(merge=record)
        for notice in notices:
            writer.notice(notice)

    # Also when resumed: the other phases read the stored file, never the model in memory.
    run_phase(writer, "merge", lambda: on_main_process(study.team, writer, _save_merged_model))
    saved = open_checkpoint(writer.folder / MERGED_FILE)
    study.pool.add("merged", models.architecture.align(saved))


def measure_missing_parts(path: PathLike, context: JobContext = JobContext(), add: Sequence[str] = ()) -> DriftRun:
    """Add missing measurements to a run: scores, drift attribution, and optional diagnostics `add`.

    Variants that have a diagnostic are left unchanged.

    Args:
        path: the run directory.
        context: device, progress and cancellation.
        add: options of optional diagnostics, such as `cka`.
    """
    folder = Path(path)
    require_analyzed(folder)
    # Before the lock: a refusal must not turn a finished run into a failed one.
    study, _ = reopen_study(folder, context, with_jacobian=True)
    study = _with_added_diagnostics(study, add)
    manifest = read_manifest(folder)
    require_same_inputs(manifest, study, context.reporter())
    with open_finished_run(folder, study, context) as (writer, reporter):
        # Each calibration has its own phases, so that removing it also removes their records.
        by_calibration = {
            name: {calibrated_variant(name), info.control} for name, info in manifest.calibrations.items()
        }
        phases = AnalysisPhases(writer, study, reporter)
        phases.measure_scores((*study.variants, "expert"))
        of_calibrations = set[str]().union(*by_calibration.values())
        phases.attribute_drift([name for name in study.attributed_variants if name not in of_calibrations], add)
        for name, own in by_calibration.items():
            variants = [variant for variant in study.variants if variant in own]
            of_calibration = AnalysisPhases(writer, study, reporter, f"calibrate:{name}:")
            of_calibration.add_weight_statistics(variants)
            of_calibration.attribute_drift(variants, add)
        phases.add_diagnostics(add)
    return open_run(folder)


@dataclass(frozen=True)
class AnalysisPhases:
    """The phases of an analysis that measure models and write to a run; `prefix` begins their names.

    `traced` has, by task, the features that `measure_drift` keeps in `store` for `attribute_drift`.
    """

    writer: RunWriter
    study: Study
    reporter: ProgressReporter
    prefix: str = ""
    traced: dict[str, TracedFeatures] = field(default_factory=dict)
    store: FeatureStore = field(default_factory=FeatureStore)

    def measure_all(self, request: AnalysisRequest) -> None:
        """Run all phases that a request asks for: drift, scores, task vectors, drift attribution."""
        study = self.study
        self._run_phase("digests", partial(self._write_model_digests, study.pool.names))
        self.measure_drift((*study.variants, "expert"), attribution=request.attribution)
        if request.scores:
            self.measure_scores((*study.variants, "expert"))
        if study.has_base and request.weights:
            self._run_phase("params", partial(self._compare_task_vectors, study.attributed_variants), study)
        if request.attribution:
            self.attribute_drift(study.attributed_variants)

    def measure_drift(self, variants: Sequence[str], *, attribution: bool) -> None:
        """Measure the drift of variants; `expert` means each task's expert.

        Features that the attribution of drift reads are kept meanwhile, unless no `attribution` follows.
        """
        # The expert is measured in each pass as the reference, so it is no variant of the study.
        named = tuple(name for name in variants if name != "expert")
        study = dataclasses.replace(self.study, variants=named)
        for task in study.tasks:
            if study.settings.jacobian is not None:
                self.traced[task] = TracedFeatures(study, task, study.attributed_variants, self.store)
            self._run_phase(f"analyze:{task}", partial(self._write_drift_tables, study, task, variants), study)
            # They are made in any case, as batches, and with them the last digits, depend on them.
            if not attribution and task in self.traced:
                self.traced.pop(task).forget()

    def measure_scores(self, variants: Sequence[str]) -> None:
        """Measure the scores of variants on the test samples."""
        for task in self.study.tasks:
            self._run_phase(f"evaluate:{task}", partial(self._write_scores, task, variants), self.study)

    def add_weight_statistics(self, variants: Sequence[str]) -> None:
        """Add checkpoint digests and task-vector comparisons of variants."""
        self._run_phase("digests", partial(self._write_model_digests, variants))
        if self.study.has_base:
            self._run_phase("params", partial(self._compare_task_vectors, variants), self.study)

    def attribute_drift(self, variants: Sequence[str], add: Sequence[str] = ()) -> None:
        """Attribute final drift to layers for tasks and variants that lack it."""
        if self.study.settings.jacobian is None:
            return
        column_of = {column.option: column.name for column in reversed(LAYERS.columns)}
        parts = ("contributions", "prefix", "jacobian.spectral")
        needed = ["jacobian_samples", *(column_of[name] for name in add if name in parts)]
        columns = [self._filled_task_variants("layers", [name]) for name in needed]
        columns += [self._filled_task_variants("adjoint")] if "adjoint" in add else []
        for task in self.study.tasks:
            missing = [
                name
                for name in variants
                if has_attribution(name) and not all((task, name) in filled for filled in columns)
            ]
            # A phase that was interrupted after its last row is only recorded.
            if missing or f"{self.prefix}explain:{task}" in self.writer.manifest.phases:
                work = partial(self._write_attribution, task, missing)
                self._run_phase(f"explain:{task}", work, self.study, again=bool(missing))

    def add_diagnostics(self, add: Sequence[str]) -> None:
        """Measure optional diagnostics of features for variants that lack them, in one pass per task."""
        entries = [entry for entry in enabled_diagnostics(add) if entry.option]
        for task in self.study.tasks:
            filled = [
                self._filled_task_variants(entry.table, [column.name for column in entry.columns]) for entry in entries
            ]
            lacking = [name for name in self.study.variants if any((task, name) not in present for present in filled)]
            if lacking:
                work = partial(self._fill_diagnostic_columns, task, lacking, entries)
                named = "+".join(dict.fromkeys(entry.option for entry in entries))
                self._run_phase(f"explain:{named}:{task}", work, self.study, again=True)

    def _run_phase(
        self, name: str, work: Callable[[], object], study: Study | None = None, *, again: bool = False
    ) -> None:
        run_phase(self.writer, f"{self.prefix}{name}", work, study, again=again)

    def _filled_task_variants(self, table: str, columns: Sequence[str] = ()) -> set[tuple[str, str]]:
        """Return (task, variant) pairs that have rows in a table, or values in these columns."""

        def _read_task_variants() -> set[tuple[str, str]]:
            # Opened again: a run caches its tables, and phases have added rows since.
            rows = getattr(open_run(self.writer.folder), table)()
            if columns:
                rows = rows[rows.reindex(columns=columns).notna().any(axis=1)]
            return set(zip(rows["task"], rows["variant"], strict=True))

        return self.study.team.run_on_main(_read_task_variants)

    def _write_tables(self, rows: TaskResults, *names: str) -> None:
        """Add the rows of a task to tables of the run; other rows stay unchanged."""
        entries = enabled_diagnostics(self.study.settings.options)
        for name in names:
            if parts := rows.tables[name]:
                self.writer.append(
                    name, _to_data_frame(parts), replace=True, columns=_diagnostic_columns(entries, name)
                )
        for warning in rows.warnings:
            self.writer.warn(warning)
        for notice in rows.notices:
            self.writer.notice(notice)

    def _write_model_digests(self, names: Sequence[str]) -> None:
        self.writer.update_manifest(models=self.study.team.map(names, self.study.model_info))

    def _compare_task_vectors(self, variants: Sequence[str]) -> None:
        study, rows = self.study, list[dict[str, Any]]()

        def _task_vector_rows(task: str, variant: str) -> list[dict[str, Any]]:
            return [
                {"task": task, "variant": variant, **row}
                for entry in enabled_diagnostics(study.settings.options, "weights")
                for row in entry.measure(study.pool, task, variant)
            ]

        pairs = [(task, variant) for task in study.tasks for variant in variants]
        for pair in self.reporter.track(pairs, "params", lambda pair: f"task {pair[0]}, {pair[1]}"):
            rows += study.run_on_task_owner(pair[0], partial(_task_vector_rows, *pair)) or []
        self.writer.append("params", pd.DataFrame(rows), replace=True)

    def _write_scores(self, task: str, variants: Sequence[str]) -> None:
        scores = self.study.run_on_task_owner(task, partial(score_variants, self.study, task, variants, self.reporter))
        # None outside the main process: tasks are measured by all processes, but only one writes.
        if scores is not None:
            self._write_tables(scores, "scores", "accuracy")

    def _measure_drift(self, study: Study, task: str) -> TaskResults:
        """Measure the drift of a task, reusing the base's drift from the run where the base is not measured."""
        base = None
        if "base" in study.pool and "base" not in study.variants:
            rows = open_run(self.writer.folder).samples(task, "base")
            layers = rows["layer"].unique()
            base = {layer: rows["drift_l2"][rows["layer"] == layer].to_numpy() for layer in layers}
        return measure_task(study, task, self.reporter, base, self.traced.get(task))

    def _write_drift_tables(self, study: Study, task: str, variants: Sequence[str]) -> None:
        writer = self.writer
        diagnosis = study.run_on_task_owner(task, partial(self._measure_drift, study, task))
        if diagnosis is None:
            return
        self._write_tables(diagnosis, "routing", "layers", "samples", "outputs")
        if not math.isnan(diagnosis.precision_error):
            writer.update_manifest(precision={task: diagnosis.precision_error})
        for (variant, layer), array in diagnosis.features.items():
            # The expert's features may be in the run already.
            if variant in variants:
                writer.write_features(task, variant, layer, array)
        if "expert" in variants:
            _store_sample_previews(writer, task, study.tasks[task])
            if _has_identical_features(diagnosis.features["expert", study.pool.chain.layers[-1].index]):
                writer.notice(f"{task}: all samples have the same final feature. Check the samples")

    def _write_attribution(self, task: str, variants: Sequence[str]) -> None:
        # Taken out, so that after an error the samples are read again, in smaller batches.
        traced, spill = self.traced.pop(task, None), self.writer.folder / SCRATCH
        work = partial(compute_attribution, self.study, task, variants, spill, self.reporter, traced)
        try:
            explanation = self.study.run_on_task_owner(task, work)
        finally:
            if traced is not None:
                traced.forget()
        if explanation is None:
            return
        self._write_tables(explanation, "adjoint")
        # `layers` last, because these rows mark a variant as explained.
        for table in ("samples", "layers"):
            if parts := explanation.tables[table]:
                self.writer.fill(table, _to_data_frame(parts))

    def _fill_diagnostic_columns(self, task: str, variants: Sequence[str], entries: Sequence[Diagnostic]) -> None:
        """Measure these diagnostics for variants that lack them and add their columns."""
        study = dataclasses.replace(self.study, variants=tuple(variants))
        diagnosis = study.run_on_task_owner(task, partial(self._measure_drift, study, task))
        if diagnosis is None:
            return
        for table in ("layers", "samples", "outputs"):
            if (columns := _diagnostic_columns(entries, table)) and (parts := diagnosis.tables[table]):
                names = [*TABLES[table].key, *(column.name for column in columns)]
                self.writer.fill(table, _to_data_frame(parts)[names], columns)


def _to_data_frame(parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    if not any(map(np.ndim, parts[0].values())):
        return pd.DataFrame(parts)
    return pd.concat([pd.DataFrame(dict(part)) for part in parts], ignore_index=True)


def _diagnostic_columns(entries: Iterable[Diagnostic], table: str) -> list[ColumnSchema]:
    return [column for entry in entries if entry.table == table for column in entry.columns]


def _has_identical_features(features: NDArray[np.floating[Any]]) -> bool:
    """Return True if several samples have equal features [n, d], up to rounding."""
    return len(features) > 1 and bool(np.ptp(features, axis=0).max() <= _ROUNDING * np.abs(features).max())


def record_inputs(writer: RunWriter, study: Study, *, synthetic: bool) -> None:
    """Write models, layers, samples and classes to the manifest before anything is measured.

    Args:
        writer: of the run.
        study: the opened models and samples.
        synthetic: True if the data is generated, as in the demo.
    """
    pool = study.pool
    writer.update_manifest(
        synthetic=synthetic,
        device=device_name(pool.device),
        dtype=str(pool.dtype).removeprefix("torch."),
        threads={"torch": torch.get_num_threads()},
        deterministic=study.settings.deterministic,
        seeds={"samples": study.seed},
        drawn_by=DRAWN_BY,
        tasks=list(study.tasks),
        variants=list(study.variants),
        layers=[LayerInfo(layer.index, layer.role, layer.path) for layer in pool.chain.layers],
        architecture={
            **{"adapter": pool.chain.architecture, "reads": pool.chain.modality.name},
            **study.architecture,
            **pool.chain.settings,
        },
        preprocessing=study.preprocessing,
        classes={
            task: list(data.head.classes)
            for task, data in study.tasks.items()
            if data.head is not None and not is_vocabulary_head(data.head)
        },
    )
    # Rows of stored features are in the order of the diagnosis ids.
    for task, data in study.tasks.items():
        if data.calibration is not None:
            writer.write_sample_ids(task, "calibration", data.calibration.ids)
        for split, samples in (("diagnosis", data.diagnosis), ("test", data.test)):
            if samples is not None:
                writer.write_sample_ids(task, split, samples.ids, samples.source_digest())
    for notice in [*host_fallbacks(pool.device), *study.notices]:
        writer.notice(notice)


def _store_sample_previews(writer: RunWriter, task: str, data: TaskSamples) -> None:
    """Store thumbnails or shortened texts of a task's diagnosis samples, in their order."""
    ids = data.diagnosis.ids[:MOST_THUMBS]
    if data.diagnosis.texts is not None:
        texts, half = [data.diagnosis.text(position).input for position in range(len(ids))], LONGEST_TEXT // 2
        # Both ends, because many texts share a long beginning, such as an instruction.
        short = [text if len(text) <= LONGEST_TEXT else f"{text[:half]} … {text[-half:]}" for text in texts]
        with writer.file(texts_file(task)) as path:
            path.write_text(json.dumps(dict(zip(ids, short, strict=True))), encoding="utf-8")
    picture = data.diagnosis.picture
    if picture is None or not ids:
        return
    pictures = np.stack([thumbnail(picture(position)) for position in range(len(ids))])
    with writer.file(thumbs_file(task)) as path, path.open("wb") as file:
        np.savez_compressed(file, pictures=pictures)


def thumbnail(picture: Picture) -> NDArray[np.uint8]:
    """Return a square thumbnail [side, side, 3] of the whole image, padded with grey."""
    from PIL import Image, ImageOps

    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    square = ImageOps.pad(image.convert("RGB"), (THUMB_SIDE, THUMB_SIDE), color=(128, 128, 128))
    return np.asarray(square, dtype=np.uint8)


def _optional_diagnostic_names() -> tuple[str, ...]:
    declared = [column.option for table in TABLES.values() for column in table.columns]
    return tuple(sorted({*declared, *(entry.option for entry in diagnostics.values())} - {""}))


def _with_added_diagnostics(study: Study, add: Collection[str]) -> Study:
    for name in add:
        if name not in _optional_diagnostic_names():
            raise SpecError(
                f"there is no diagnostic {name!r} to add; there are {', '.join(_optional_diagnostic_names())}",
                hint=did_you_mean(name, _optional_diagnostic_names()),
            )
    settings = study.settings
    jacobian = settings.jacobian
    if jacobian is not None:
        fields = {"contributions": "contributions", "prefix": "prefix", "jacobian.spectral": "spectral"}
        jacobian = dataclasses.replace(jacobian, **{fields[name]: True for name in add if name in fields})
    return dataclasses.replace(
        study, settings=dataclasses.replace(settings, options=settings.options | {*add}, jacobian=jacobian)
    )


def reopen_study(
    path: PathLike,
    context: JobContext = JobContext(),
    *,
    num_calibration: int | None = None,
    with_calibrations: bool = True,
    with_jacobian: bool = False,
) -> tuple[Study, OpenModels]:
    """Reopen the study and checkpoints of a run directory, merged model included.

    Args:
        path: the run directory.
        context: device, and for a run of live modules how to build its study again.
        num_calibration: calibration samples per task, at least as many as the spec's.
        with_calibrations: True to open calibrated models too.
        with_jacobian: True to switch the attribution on where the spec leaves it out.

    Raises:
        SpecError: the run was made from live modules, which were not passed again.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if context.live is not None:
        study, models = context.live(num_calibration)
    else:
        spec = load_run_spec(folder)
        if num_calibration is not None:
            # Smaller counts give a prefix of the same samples, see `draw`.
            drawn = {task: entry.n or spec.data.defaults.n for task, entry in spec.data.tasks.items()}
            spec = with_sample_counts(spec, {task: max(count, num_calibration) for task, count in drawn.items()})
        if with_jacobian and spec.metrics.jacobian is False:
            spec = load_spec(spec, ["metrics.jacobian={}"])
        study, models = open_study(spec, access=context.access)
        if "merged" not in study.pool:
            study.pool.add("merged", models.architecture.align(open_checkpoint(folder / MERGED_FILE)))
    for name, info in manifest.calibrations.items() if with_calibrations else ():
        if info.attached and info.method not in calibrators:
            # An older version made it: measurements stay, but the maps can't be rebuilt.
            continue
        add_calibrated_models(study, models, folder, name, info.method, info.control)
    later = tuple(name for name in manifest.variants if name not in study.variants and name in study.pool)
    return dataclasses.replace(study, variants=(*study.variants, *later)), models


def add_calibrated_models(
    study: Study, models: OpenModels, folder: Path, name: str, method: str, control: str
) -> None:
    """Add a finished calibration to the pool: the calibrated variant and its control.

    Args:
        study: models and samples.
        models: the checkpoints.
        folder: the run directory.
        name: of the calibration.
        method: its method.
        control: the control's variant name; empty without.
    """
    for variant in filter(None, (calibrated_variant(name), control)):
        is_control = variant == control
        weights = open_checkpoint(folder / calibrated_weights_file(name, control=is_control))
        attached = None if is_control else read_attachments(folder, name, method)
        study.pool.add(variant, models.architecture.align(weights), attached)


def read_attachments(run: Path, name: str, method: str) -> Attachments:
    """Read the correction modules of a finished calibration; empty for closed-form methods."""
    file = run / corrections_file(name)
    if not file.exists():
        return {}
    kind: Any = calibrators[method]
    source = open_checkpoint(file)
    return attachments_from_tensors(((key, source.read(key)) for key in source.headers), kind.attachment)


def load_run_spec(folder: Path) -> RunSpec:
    """Load the spec of a run; refuse a run of modules in memory, which has none."""
    if has_live_modules(read_manifest(folder)):
        raise SpecError(
            f"{folder} was made in Python from models in memory, so it can't be extended without them",
            hint="Pass them again: `driftlens.open_run(...).calibrate(..., modules={...})`, or save the "
            "models and analyze a spec.",
        )
    return load_spec(folder / SPEC)


def with_sample_counts(spec: RunSpec, counts: Mapping[str, int], seed: int | None = None) -> RunSpec:
    """Return the spec with other numbers of calibration samples, or another seed.

    Args:
        spec: the spec.
        counts: samples by task.
        seed: another sampling seed; None keeps it.
    """
    values = spec.as_dict()
    if seed is not None:
        values["data"]["defaults"]["seed"] = seed
    for task, count in counts.items():
        values["data"][task]["n"] = count
    return load_spec(values)


def require_same_models(manifest: Manifest, study: Study, reporter: ProgressReporter) -> None:
    """Refuse checkpoints whose content digest differs from the run's."""
    names = [name for name in manifest.models if name in study.pool]
    for name in reporter.track(names, "check", lambda name: f"is {name} unchanged?"):
        recorded = manifest.models[name]
        if study.model_info(name).digest != recorded.digest:
            raise CheckpointError(
                f"{name} differs from the run's: {study.pool.source(name).name} has changed",
                hint="Restore that model, or analyze the current models into a new run.",
                model=name,
            )


def require_same_samples(manifest: Manifest, study: Study) -> None:
    """Refuse samples other than the run's; samples in memory are compared by content."""
    for task, data in study.tasks.items():
        for split, samples in (("diagnosis", data.diagnosis), ("test", data.test)):
            recorded = manifest.sample_ids.get(split, {}).get(task)
            origin = manifest.sample_origins.get(split, {}).get(task) if has_live_modules(manifest) else None
            if recorded is None or samples is None:
                continue
            if list(recorded) != list(samples.ids) or (origin is not None and origin != samples.source_digest()):
                raise DataError(
                    f"the {split} samples of task {task} differ from the run's: the data has changed",
                    hint="Restore the data, or analyze the current data into a new run.",
                )


def require_same_inputs(manifest: Manifest, study: Study, reporter: ProgressReporter) -> None:
    """Refuse samples or checkpoints that differ from the run's."""
    study.team.run_on_main(lambda: require_same_samples(manifest, study))
    study.team.run_on_main(lambda: require_same_models(manifest, study, reporter))


@contextmanager
def open_finished_run(folder: Path, study: Study, context: JobContext) -> Iterator[tuple[RunWriter, ProgressReporter]]:
    """Open a finished run for adding results; yields its writer and a reporter."""
    opened = open_writer(study.team, lambda: RunWriter.resume(folder))
    with opened as writer, deterministic_algorithms(study.settings.deterministic):
        yield writer, context.reporter(writer.progress)


@contextmanager
def open_writer(team: ProcessGroup, opened: Callable[[], RunWriter]) -> Iterator[RunWriter]:
    """Open the writer of a run for the block; only the main process writes."""
    # What others still read before they come here must not change.
    team.barrier()
    with ExitStack() as stack:
        writers: list[RunWriter] = []

        def _enter_writer() -> tuple[Path, Manifest]:
            writers.append(stack.enter_context(opened()))
            return writers[0].folder, writers[0].manifest

        folder, manifest = team.run_on_main(_enter_writer)
        yield writers[0] if writers else _NoopWriter(folder, manifest)
    # The run is finished now.
    team.barrier()


@contextmanager
def with_resume_hint(how: Callable[[], str | Literal[False]]) -> Iterator[None]:
    """Add a hint on how to resume to a cancellation or disk error raised in the block."""
    try:
        yield
    except (Cancelled, RunError) as error:
        if way := how():
            before = "" if isinstance(error, Cancelled) else error.hint
            error.hint = f"{before} Finished work is kept: {way}.".lstrip()
        raise


def on_main_process(team: ProcessGroup, writer: RunWriter, work: Callable[[], object]) -> None:
    """Run a function that writes on the main process only, then share the manifest.

    Args:
        team: the processes.
        writer: the run's writer.
        work: writes to the run.
    """

    def _run_and_return_manifest() -> Manifest:
        work()
        return writer.manifest

    writer.manifest = team.run_on_main(_run_and_return_manifest)


class _NoopWriter(RunWriter):
    """The run writer of all other processes: it writes nothing and keeps the manifest in memory."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest, RunLock(folder))

    def _ignore_call(self, *_: Any, **__: Any) -> None:
        """Do nothing; the main process writes rows, features, events and progress."""

    append = fill = drop = write_features = event = status = progress = _ignore_call

    def _save(self, **changes: Any) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)


def run_phase(
    writer: RunWriter,
    name: str,
    work: Callable[[], object],
    study: Study | None = None,
    *,
    again: bool = False,
    sums: bool = False,
) -> None:
    """Run one phase of a job unless it is done, and record the resources it used.

    When memory runs out, the work restarts with smaller batches, see `halve_batch_on_oom`.

    Args:
        writer: the run's writer.
        name: the phase in manifest, events and the table `resources`.
        work: does the work.
        study: its models, if it runs any.
        again: True to repeat a finished phase.
        sums: True if it accumulates moments, which may move to the host when memory runs out.
    """
    if writer.done(name) and not again:
        return
    device = (accelerator() or HOST) if study is None else study.pool.device

    def _report_fallback(fallback: str) -> None:
        writer.notice(f"{device} has too little memory for {name}: continuing with {fallback}")

    with (
        full_precision_matmul(),
        writer.phase(name) as usage,
        convert_device_errors(device, f"{name.partition(':')[0]} here"),
    ):
        reset_peak_memory(device)
        # Several processes would have to begin again together: there, too little memory ends the job.
        if study is None or study.team.size > 1:
            work()
        else:
            size = max((data.diagnosis.batch_size for data in study.tasks.values()), default=1)
            with halve_batch_on_oom(size, _report_fallback, sums=sums) as done:
                done(work)
        if (peak := peak_memory(device)) is not None:
            usage["peak_gpu_bytes"] = peak


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use deterministic torch kernels in a block if enabled; the previous state is restored."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        # Only a warning for operations without a deterministic kernel, which would otherwise raise.
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first setting that differs, as "another lam: 1, now 2"; empty if none does."""
    flat_before, flat_now = _flatten_settings(before), _flatten_settings(now)
    for name in {**flat_now, **flat_before}:
        was, value = flat_before.get(name), flat_now.get(name)
        if was != value:
            texts = [text if len(text) <= 80 else f"{text[:77]}..." for text in map(json.dumps, (was, value))]
            return f"another {name}: {texts[0]}, now {texts[1]}"
    return ""


def _flatten_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{part}" if part else name: value
        for name, inner in settings.items()
        for part, value in (_flatten_settings(inner) if isinstance(inner, Mapping) else {"": inner}).items()
    }
