"""The phases of an analysis: each is done once, recorded, and skipped when a run is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from driftlens.diagnostics.task_vectors import alignment_rows
from driftlens.pipeline.diagnosis import TaskDiagnosis, diagnose
from driftlens.pipeline.evaluation import accuracy_rows
from driftlens.pipeline.identity import model_info
from driftlens.pipeline.study import Study
from driftlens.pipeline.thumbs import store_thumbs
from driftlens.progress import ProgressEvent, ProgressSink, Reporter
from driftlens.records.manifest import LayerInfo
from driftlens.records.writer import RunWriter

if TYPE_CHECKING:
    import pandas as pd


def run_phases(writer: RunWriter, study: Study, reporter: Reporter) -> None:
    """Do all phases of an analysis that are not done yet.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.analyze`.
    """
    with deterministic_algorithms(study.settings.deterministic):
        run_phase(writer, "digests", lambda: digest_models(writer, study, study.pool.names))
        for task in study.tasks:
            diagnose_task(writer, study, task, reporter)
        if study.has_base:
            run_phase(writer, "params", lambda: compare_parameters(writer, study, reporter))
        for task in study.tasks:
            evaluate_task(writer, study, task, reporter)


def diagnose_task(writer: RunWriter, study: Study, task: str, reporter: Reporter) -> None:
    """Do the phase that measures one task's drift.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.analyze`.
    """

    def measure() -> None:
        store_diagnosis(writer, task, diagnose(study, task, reporter))
        store_thumbs(writer, task, study.tasks[task])

    run_phase(writer, f"analyze:{task}", measure)


def evaluate_task(
    writer: RunWriter, study: Study, task: str, reporter: Reporter, *, again: bool = False
) -> None:
    """Do the phase that measures one task's accuracy.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.analyze`.
    """
    variants = [*study.variants, "expert"]
    run_phase(
        writer,
        f"evaluate:{task}",
        lambda: measure_accuracy(writer, study, task, variants, reporter),
        again=again,
    )


def run_phase(writer: RunWriter, name: str, work: Callable[[], None], *, again: bool = False) -> None:
    """Do one phase unless it is done already, and record what it used; `again` does it in any case."""
    if writer.done(name) and not again:
        return
    with writer.phase(name) as usage:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        work()
        if torch.cuda.is_available():
            usage.peak_gpu_bytes = torch.cuda.max_memory_allocated()


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """A block in which torch prefers deterministic kernels, if wanted; the caller's choice comes back."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def all_of(*sinks: ProgressSink | None) -> ProgressSink:
    """One sink that hands every event to all of `sinks` that are there."""
    there = [sink for sink in sinks if sink is not None]

    def every(event: ProgressEvent) -> None:
        for sink in there:
            sink(event)

    return every


def describe(writer: RunWriter, study: Study, *, synthetic: bool) -> None:
    """Write down what is known before anything is computed: models, layers, samples, classes."""
    pool = study.pool
    writer.describe(
        synthetic=synthetic,
        device=str(pool.device) if pool.device.type == "cpu" else torch.cuda.get_device_name(pool.device),
        dtype=str(pool.dtype).removeprefix("torch."),
        threads={"torch": torch.get_num_threads()},
        deterministic=study.settings.deterministic,
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


def digest_models(writer: RunWriter, study: Study, names: Sequence[str]) -> None:
    """Write down digest, size and origin of these models of the study's pool."""
    writer.describe(models={name: model_info(study, name) for name in names})


def store_diagnosis(writer: RunWriter, task: str, found: TaskDiagnosis) -> None:
    """Put what one task's walk found into the run; rows with other keys keep their exact values."""
    import pandas as pd

    writer.append("layers", pd.DataFrame(found.layers), replace=True)
    writer.append("samples", _stacked(found.samples), replace=True)
    if found.outputs:
        writer.append("outputs", _stacked(found.outputs), replace=True)
    for warning in found.warnings:
        writer.warn(warning)
    if found.adjoint:
        writer.append("adjoint", _stacked(found.adjoint), replace=True)
    for (variant, layer), array in found.features.items():
        writer.write_features(task, variant, layer, array)


def _stacked(parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([pd.DataFrame(dict(part)) for part in parts], ignore_index=True)


def compare_parameters(writer: RunWriter, study: Study, reporter: Reporter) -> None:
    """Compare the task vectors of the study's variants with the experts'."""
    import pandas as pd

    pairs = [(task, variant) for task in study.tasks for variant in study.explained_variants]
    rows = [
        {"task": task, "variant": variant, **row}
        for task, variant in reporter.track(pairs, "params", lambda pair: f"task {pair[0]}, {pair[1]}")
        for row in alignment_rows(study.pool, task, variant)
    ]
    writer.append("params", pd.DataFrame(rows), replace=True)


def measure_accuracy(
    writer: RunWriter, study: Study, task: str, variants: Sequence[str], reporter: Reporter
) -> None:
    """Score these variants on one task's test samples; `expert` is the task's own."""
    import pandas as pd

    rows = accuracy_rows(study, task, list(variants), reporter)
    if rows:
        writer.append("accuracy", pd.DataFrame(rows), replace=True)
