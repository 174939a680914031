"""Reopened runs: checks that models and samples are unchanged, phases, and one writing process among several.

Entry points: `reopen_study` for a run's study, `open_writer` and `run_phase` for a job.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.config.run import load_spec
from driftlens.data.samples import halve_batch_on_oom
from driftlens.engine.pool import Attachments, attachments_from_tensors
from driftlens.experiment.loading import OpenModels, open_study
from driftlens.experiment.study import Study
from driftlens.runs.manifest import Manifest, attachments_file, calibrated_weights_file, read_manifest
from driftlens.runs.run import has_live_modules
from driftlens.runs.writer import RunLock, RunWriter
from driftlens.utils.devices import (
    HOST,
    accelerator,
    convert_device_errors,
    full_precision_matmul,
    peak_memory,
    reset_peak_memory,
)
from driftlens.utils.distributed import JobContext, ProcessGroup, ProgressReporter
from driftlens.utils.errors import Cancelled, CheckpointError, DataError, RunError, SpecError
from driftlens.utils.files import PathLike
from driftlens.utils.variants import calibrated_variant

if TYPE_CHECKING:
    from driftlens.config.run import RunSpec

# The merged model that a run has made, in the base's key names and dtypes.
MERGED_FILE = "models/merged.safetensors"


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
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    if context.live is not None:
        study, models = context.live(num_calibration)
    else:
        require_spec(folder, manifest)
        spec = load_spec(folder / "spec.yaml")
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
    study: Study, models: OpenModels, folder: pathlib.Path, name: str, method: str, control: str
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


def read_attachments(run: pathlib.Path, name: str, method: str) -> Attachments:
    """Read the correction modules of a finished calibration; empty for closed-form methods."""
    file = run / attachments_file(name)
    if not file.exists():
        return {}
    kind: Any = calibrators[method]
    source = open_checkpoint(file)
    return attachments_from_tensors(((key, source.read(key)) for key in source.headers), kind.attachment)


def require_spec(folder: pathlib.Path, manifest: Manifest) -> None:
    """Refuse to reopen a run of modules in memory, which has no spec, without its modules."""
    if has_live_modules(manifest):
        raise SpecError(
            f"{folder} was made in Python from models in memory, so it can't be extended without them",
            hint="Pass them again: `driftlens.open_run(...).calibrate(..., modules={...})`, or save the "
            "models and analyze a spec.",
        )


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
                hint="Restore that model, or analyze the present ones into a new run.",
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
                    hint="Restore the data, or analyze the present data into a new run.",
                )


def require_same_inputs(manifest: Manifest, study: Study, reporter: ProgressReporter) -> None:
    """Refuse samples or checkpoints that differ from the run's."""
    study.team.run_on_main(lambda: require_same_samples(manifest, study))
    study.team.run_on_main(lambda: require_same_models(manifest, study, reporter))


@contextmanager
def open_finished_run(
    folder: pathlib.Path, study: Study, context: JobContext
) -> Iterator[tuple[RunWriter, ProgressReporter]]:
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

        def _enter_writer() -> tuple[pathlib.Path, Manifest]:
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

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
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
