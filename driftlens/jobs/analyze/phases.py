"""The phases of an analysis: each is done once, recorded, and skipped when a run is resumed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.diagnostic import chosen
from driftlens.base.progress import Reporter
from driftlens.base.team import Team
from driftlens.base.threads import exact_products, settled_threads
from driftlens.jobs.analyze.causes import explain
from driftlens.jobs.analyze.diagnosis import TaskDiagnosis, diagnosis_of, walked
from driftlens.jobs.analyze.evaluation import scores_of
from driftlens.jobs.study.study import Study
from driftlens.jobs.study.writing import lead
from driftlens.models.score_maps import is_of_vocabulary
from driftlens.runs.layout import LONGEST_TEXT, MOST_THUMBS, THUMB_SIDE, texts_file, thumbs_file
from driftlens.runs.manifest import LayerInfo
from driftlens.runs.run import open_run
from driftlens.runs.writer import RunWriter

if TYPE_CHECKING:
    import pandas as pd

    from driftlens.data.sources import Picture
    from driftlens.jobs.study.study import TaskSamples


@dataclass(frozen=True)
class Phase:
    """One part of a job.

    Attributes:
        study: whose models it runs, with as many threads as suit these just then; None where it runs none.
        leads: the team whose first process does it alone, because it writes; None where all do their share.
        again: whether it is done although it was done before.
    """

    name: str
    work: Callable[[], object]
    study: Study | None = None
    leads: Team | None = None
    again: bool = False


def run_phases(writer: RunWriter, phases: Iterable[Phase]) -> None:
    """Do the phases that are not done yet, one after the other, and record what each used."""
    for phase in phases:
        if writer.done(phase.name) and not phase.again:
            continue
        threads = suitable_threads(writer, phase.name, phase.study)
        with exact_products(), writer.phase(phase.name) as usage, threads:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            if phase.leads is None:
                phase.work()
            else:
                lead(phase.leads, writer, phase.work)
            if torch.cuda.is_available():
                usage["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()


def analysis(
    writer: RunWriter, study: Study, reporter: Reporter, *, attribution: bool = True
) -> Iterator[Phase]:
    """All phases of an analysis: drift and accuracy of all tasks first, then, with `attribution`, their causes."""
    yield Phase("digests", lambda: digest_models(writer, study, study.pool.names))
    yield from measuring(writer, study, (*study.variants, "expert"), reporter)
    if study.has_base:
        yield Phase("params", lambda: compare_parameters(writer, study, reporter), study)
    if attribution:
        yield from explaining(writer, study, study.explained_variants, reporter)


def measuring(
    writer: RunWriter, study: Study, variants: Sequence[str], reporter: Reporter, *, prefix: str = ""
) -> Iterator[Phase]:
    """The drift and accuracy of variants in the study's pool (`expert` is each task's own): what is asked first."""
    new = _only(study, variants)
    for task in new.tasks:
        yield Phase(f"{prefix}analyze:{task}", partial(_diagnose, writer, new, variants, task, reporter), new)
    for task in new.tasks:
        work = partial(measure_accuracy, writer, new, task, variants, reporter)
        yield Phase(f"{prefix}evaluate:{task}", work, new)


def completing(
    writer: RunWriter, study: Study, variants: Sequence[str], reporter: Reporter, *, prefix: str
) -> Iterator[Phase]:
    """What nobody waits for: digests of the models, and how their task vectors lie. Arguments as above."""
    new = _only(study, variants)
    yield Phase(f"{prefix}digests", lambda: digest_models(writer, new, variants))
    if study.has_base:
        yield Phase(f"{prefix}params", lambda: compare_parameters(writer, new, reporter), new)


def explaining(
    writer: RunWriter, study: Study, variants: Sequence[str], reporter: Reporter, *, prefix: str = ""
) -> Iterator[Phase]:
    """What traces drift back to layers, for all tasks and variants whose rows lack it, as the study's settings say."""
    if study.settings.jacobian is None:
        return

    def known() -> set[tuple[str, str]]:
        rows = open_run(writer.folder).layers()
        there = rows[rows["jacobian_samples"].notna()]
        return set(zip(there["task"], there["variant"], strict=True))

    explained = study.team.once(known)
    for task in study.tasks:
        missing = [variant for variant in variants if (task, variant) not in explained]
        name = f"{prefix}explain:{task}"
        # A phase that was stopped behind its last row is recorded as done now.
        if missing or name in writer.manifest.phases:
            work = partial(_explain, writer, study, task, missing, reporter)
            yield Phase(name, work, study, again=bool(missing))


def _explain(writer: RunWriter, study: Study, task: str, variants: Sequence[str], reporter: Reporter) -> None:
    import pandas as pd

    found = explain(study, task, variants, reporter)
    if found is None:
        return
    for warning in found.warnings:
        writer.warn(warning)
    if found.adjoint:
        writer.append("adjoint", _stacked(found.adjoint), replace=True)
    if found.groups:
        writer.append("group_contributions", pd.DataFrame(found.groups), replace=True)
    if found.layers:
        writer.fill("samples", _stacked(found.samples))
        # Last: by these rows it is known what is explained.
        writer.fill("layers", pd.DataFrame(found.layers))


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
        layer.parameters[f"{site.name}.weight"]
        for layer in study.pool.chain.blocks
        for site in layer.sites
        if site.kind == "linear"
    ]
    width = min((min(slot.shape(source.headers[slot.key].shape)) for slot in maps), default=_USUAL_WIDTH)
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
        architecture={
            **{"adapter": pool.chain.architecture, "reads": pool.chain.modality.name},
            **study.architecture,
            **pool.chain.settings,
        },
        preprocessing=study.preprocessing,
        classes={
            task: list(at.head.classes)
            for task, at in study.tasks.items()
            if at.head is not None and not is_of_vocabulary(at.head)
        },
    )
    for task, at_hand in study.tasks.items():
        if at_hand.calibration is not None:
            writer.write_sample_ids(task, "calibration", at_hand.calibration.ids)
        for split, samples in (("diagnosis", at_hand.diagnosis), ("test", at_hand.test)):
            if samples is not None:
                writer.write_sample_ids(task, split, samples.ids, samples.origin())
    for notice in study.notices:
        writer.notice(notice)


def digest_models(writer: RunWriter, study: Study, names: Sequence[str]) -> None:
    """Write down digest, size and origin of these models of the study's pool."""
    writer.describe(models=study.team.each(names, study.model_info))


def store_diagnosis(writer: RunWriter, study: Study, task: str, found: TaskDiagnosis) -> None:
    """Put what one task's walk found into the run; rows with other keys keep their exact values."""
    import pandas as pd

    tables = {"layers": pd.DataFrame(found.layers), "samples": _stacked(found.samples)}
    if found.outputs:
        tables["outputs"] = _stacked(found.outputs)
    for name, rows in tables.items():
        filling = (entry for entry in chosen(study.settings.options) if entry.table == name)
        columns = [column for entry in filling for column in entry.columns]
        writer.append(name, rows, replace=True, columns=columns)
    for warning in found.warnings:
        writer.warn(warning)
    if not math.isnan(found.precision_error):
        writer.describe(precision={task: found.precision_error})
    for (variant, layer), array in found.features.items():
        writer.write_features(task, variant, layer, array)


def _stacked(parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([pd.DataFrame(dict(part)) for part in parts], ignore_index=True)


def compare_parameters(writer: RunWriter, study: Study, reporter: Reporter) -> None:
    """Compare the task vectors of the study's variants with the experts'."""
    import pandas as pd

    pairs = [(task, variant) for task in study.tasks for variant in study.explained_variants]
    rows: list[dict[str, Any]] = []
    for task, variant in reporter.track(pairs, "params", lambda pair: f"task {pair[0]}, {pair[1]}"):
        compare = partial(_compared, study, task, variant)
        rows += study.team.at(study.owner(task), compare) or []
    writer.append("params", pd.DataFrame(rows), replace=True)


def _compared(study: Study, task: str, variant: str) -> list[dict[str, Any]]:
    return [
        {"task": task, "variant": variant, **row}
        for entry in chosen(study.settings.options, "weights")
        for row in entry.measure(study.pool, task, variant)
    ]


def measure_accuracy(
    writer: RunWriter, study: Study, task: str, variants: Sequence[str], reporter: Reporter
) -> None:
    """Score these variants on one task's test samples; `expert` is the task's own."""
    import pandas as pd

    found = scores_of(study, task, list(variants), reporter)
    if found is None:
        return
    for notice in found.notices:
        writer.notice(notice)
    for name, new in (("scores", found.results), ("accuracy", found.rows)):
        if new:
            writer.append(name, pd.DataFrame(new), replace=True)


def _diagnose(
    writer: RunWriter, study: Study, variants: Sequence[str], task: str, reporter: Reporter
) -> None:
    def base() -> Mapping[int, NDArray[np.float64]] | None:
        if "base" not in study.pool or "base" in variants:
            return None
        rows = open_run(writer.folder).samples(task, "base")  # measured before
        return {int(at): rows["drift_l2"][rows["layer"] == at].to_numpy() for at in rows["layer"].unique()}

    batches = {name: at.diagnosis.num_batches for name, at in study.tasks.items()}
    work = partial(walked, study, task, reporter)
    found = study.divided(task, batches, work, lambda parts: diagnosis_of(study, task, parts, base()))
    if found is None:
        return
    # The expert's features are in the run, too.
    found.features = {key: array for key, array in found.features.items() if key[0] in variants}
    store_diagnosis(writer, study, task, found)
    if "expert" in variants:
        store_shown(writer, task, study.tasks[task])


def _only(study: Study, variants: Sequence[str]) -> Study:
    """The study of these variants."""
    return dataclasses.replace(study, variants=tuple(name for name in variants if name != "expert"))


def store_shown(writer: RunWriter, task: str, samples: TaskSamples) -> None:
    """Keep small pictures of a task's diagnosis samples, in their order, or what they ask; nothing of other samples."""
    ids = samples.diagnosis.ids[:MOST_THUMBS]
    if samples.diagnosis.texts is not None:
        texts = {name: _shortened(samples.diagnosis.text(at).input) for at, name in enumerate(ids)}
        with writer.file(texts_file(task)) as path:
            path.write_text(json.dumps(texts), encoding="utf-8")
    if samples.picture is None or not ids:
        return
    pictures = np.stack([thumb(samples.picture(sample)) for sample in ids])
    with writer.file(thumbs_file(task)) as path, path.open("wb") as file:
        np.savez_compressed(file, pictures=pictures)


def _shortened(text: str) -> str:
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"


def thumb(picture: Picture) -> NDArray[np.uint8]:
    """The picture [side, side, 3], whole, with grey bars where it is not square."""
    from PIL import Image, ImageOps

    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    square = ImageOps.pad(image.convert("RGB"), (THUMB_SIDE, THUMB_SIDE), color=(128, 128, 128))
    return np.asarray(square, dtype=np.uint8)
