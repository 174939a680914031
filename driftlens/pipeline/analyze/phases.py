"""The phases of an analysis: each is done once, recorded, and skipped when a run is resumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from driftlens.diagnostics.task_vectors import alignment_rows
from driftlens.engine.exactness import exact_products
from driftlens.pipeline.analyze.diagnosis import TaskDiagnosis, diagnose
from driftlens.pipeline.analyze.evaluation import accuracy_rows
from driftlens.pipeline.study.identity import model_info
from driftlens.pipeline.study.study import Study
from driftlens.progress import ProgressEvent, ProgressSink, Reporter
from driftlens.records.manifest import LayerInfo
from driftlens.records.thumbs import MOST, SIDE, Pictures, save_thumbs, thumbs_file
from driftlens.records.writer import RunWriter
from driftlens.threads import settled_threads

if TYPE_CHECKING:
    import pandas as pd

    from driftlens.data.pictures import Picture
    from driftlens.pipeline.study.study import TaskSamples
    from driftlens.records.writer import RunWriter


def run_phases(writer: RunWriter, study: Study, reporter: Reporter) -> None:
    """Do all phases of an analysis that are not done yet.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.job.analyze`.
    """
    with deterministic_algorithms(study.settings.deterministic):
        run_phase(writer, "digests", lambda: digest_models(writer, study, study.pool.names))
        for task in study.tasks:
            diagnose_task(writer, study, task, reporter)
        if study.has_base:
            run_phase(writer, "params", lambda: compare_parameters(writer, study, reporter), study=study)
        for task in study.tasks:
            evaluate_task(writer, study, task, reporter)


def diagnose_task(writer: RunWriter, study: Study, task: str, reporter: Reporter) -> None:
    """Do the phase that measures one task's drift.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.job.analyze`.
    """

    def measure() -> None:
        store_diagnosis(writer, task, diagnose(study, task, reporter))
        store_thumbs(writer, task, study.tasks[task])

    run_phase(writer, f"analyze:{task}", measure, study=study)


def evaluate_task(
    writer: RunWriter, study: Study, task: str, reporter: Reporter, *, again: bool = False
) -> None:
    """Do the phase that measures one task's accuracy.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.job.analyze`.
    """
    variants = [*study.variants, "expert"]
    run_phase(
        writer,
        f"evaluate:{task}",
        lambda: measure_accuracy(writer, study, task, variants, reporter),
        study=study,
        again=again,
    )


def run_phase(
    writer: RunWriter,
    name: str,
    work: Callable[[], None],
    *,
    study: Study | None = None,
    again: bool = False,
) -> None:
    """Do one phase unless it is done already, and record what it used; `again` does it in any case.

    With the study whose models it runs, it computes with as many threads as suit these just then.
    """
    if writer.done(name) and not again:
        return
    with exact_products(), writer.phase(name) as usage, suitable_threads(writer, name, study):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        work()
        if torch.cuda.is_available():
            usage.peak_gpu_bytes = torch.cuda.max_memory_allocated()


@contextmanager
def suitable_threads(writer: RunWriter | None, name: str, study: Study | None) -> Iterator[None]:
    """A block with as many threads as suit the study's models just then; another number than torch's is recorded."""
    if study is None or study.pool.device.type != "cpu":
        yield
        return
    given = torch.get_num_threads()
    with settled_threads(*_layer_size(study), phase=name) as number:
        if writer is not None and number != given:
            writer.describe(threads={**writer.manifest.threads, name: number})
        yield


def _layer_size(study: Study) -> tuple[int, int]:
    """About how many rows of which width most operations of a layer have; the narrowest map is as wide as features."""
    source = study.pool.source(study.pool.names[0])
    maps = [
        layer.parameters[f"{site.name}.weight"].key
        for layer in study.pool.chain.blocks
        for site in layer.sites
        if site.kind == "linear"
    ]
    width = min((min(source.headers[key].shape) for key in maps), default=_USUAL_WIDTH)
    batch = min((at_hand.diagnosis.batch_size for at_hand in study.tasks.values()), default=1)
    return batch * _FEW_TOKENS, width


_FEW_TOKENS = 16
"""Tokens per sample, which no shape of a weight tells: few, so that where it matters fewer threads are taken."""
_USUAL_WIDTH = 256
"""Of models without a linear map that can be calibrated."""


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
        for split, samples in (("diagnosis", at_hand.diagnosis), ("test", at_hand.test)):
            if samples is not None:
                writer.write_sample_ids(task, split, samples.ids, samples.origin())
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
    if not math.isnan(found.precision_error):
        writer.describe(precision={task: found.precision_error})
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


def analyze_variants(
    writer: RunWriter, study: Study, variants: Sequence[str], reporter: Reporter, *, prefix: str
) -> None:
    """Measure drift, causes, parameters, scores and accuracy of variants that the study's pool holds.

    Args:
        writer: of the run.
        study: with the variants in its pool.
        variants: the new ones.
        reporter: told of every layer; may cancel.
        prefix: of the phases' names; a phase that is done is not done again.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.job.analyze`.
    """
    new = _only(study, variants)
    run_phase(writer, f"{prefix}:digests", lambda: digest_models(writer, new, variants))
    for task in new.tasks:
        work = partial(_diagnose, writer, new, variants, task, reporter)
        run_phase(writer, f"{prefix}:analyze:{task}", work, study=new)
    if new.has_base:
        run_phase(writer, f"{prefix}:params", lambda: compare_parameters(writer, new, reporter), study=new)
    for task in new.tasks:
        work = partial(measure_accuracy, writer, new, task, variants, reporter)
        run_phase(writer, f"{prefix}:evaluate:{task}", work, study=new)


def _diagnose(
    writer: RunWriter, study: Study, variants: Sequence[str], task: str, reporter: Reporter
) -> None:
    store_diagnosis(writer, task, _of_variants(diagnose(study, task, reporter), variants))


def _only(study: Study, variants: Sequence[str]) -> Study:
    """The study of these variants; the base walks along, because their drift is related to its own."""
    return dataclasses.replace(study, variants=(*(["base"] if study.has_base else []), *variants))


def _of_variants(found: TaskDiagnosis, variants: Sequence[str]) -> TaskDiagnosis:
    """What was found of these variants alone: the base's and the expert's are in the run already."""
    return dataclasses.replace(
        found,
        layers=[row for row in found.layers if row["variant"] in variants],
        samples=[columns for columns in found.samples if columns["variant"] in variants],
        outputs=[columns for columns in found.outputs if columns["variant"] in variants],
        features={key: array for key, array in found.features.items() if key[0] in variants},
    )


def store_thumbs(writer: RunWriter, task: str, samples: TaskSamples) -> None:
    """Keep small pictures of a task's diagnosis samples, in their order; none where they are no images.

    Raises:
        DataError: an image can't be read.
        RunError: the file can't be written.
    """
    if samples.picture is None or not samples.diagnosis.ids:
        return
    pictures = np.stack([thumb(samples.picture(sample)) for sample in samples.diagnosis.ids[:MOST]])
    with writer.file(thumbs_file(task)) as path:
        save_thumbs(path, pictures)


def thumb(picture: Picture) -> Pictures:
    """The picture [SIDE, SIDE, 3], whole, with grey bars where it is not square."""
    from PIL import Image, ImageOps

    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    return np.asarray(ImageOps.pad(image.convert("RGB"), (SIDE, SIDE), color=(128, 128, 128)), dtype=np.uint8)
