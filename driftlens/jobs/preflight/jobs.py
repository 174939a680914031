"""The jobs that are rehearsed: analysis and calibration as they are, but of a study cut short."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import torch

from driftlens.base.progress import Reporter
from driftlens.base.threads import computing_with
from driftlens.base.variants import expert_of
from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.data.task_data import TaskData
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.analyze.job import Phases, describe
from driftlens.jobs.analyze.unmerged import unmerged_bytes
from driftlens.jobs.calibrate.job import OpenCalibration, carry_out
from driftlens.jobs.calibrate.plan import (
    CalibrationPlan,
    Choice,
    calibrator_of,
    plan_calibration,
)
from driftlens.jobs.preflight.rehearsal import PASSES, Job, Rehearsed, rehearsed, shares_of, size_text
from driftlens.jobs.preflight.shortened import Shortened, first_samples
from driftlens.jobs.study.merging import PIECE, merge_of, save_merge
from driftlens.jobs.study.opening import OpenModels, classes_of
from driftlens.jobs.study.reopening import MERGED_FILE, Phase, run_phases
from driftlens.jobs.study.study import Study
from driftlens.merging.method import Merge, MergeMethod, merge_called
from driftlens.models.chain import LayerChain
from driftlens.models.heads import text_head
from driftlens.runs.run import open_run
from driftlens.runs.writer import RunWriter
from driftlens.spec import RunSpec
from driftlens.spec.requests import CalibrationRequest
from driftlens.spec.sections import TextHead

_THERE_AND_BACK = 3
"""A pass back through a layer computes derivatives by inputs and by weights: twice what the pass there took."""
_WAITED_FOR = 2e10
"""Operations on matrices that are waited for: a second or so of one thread."""


@dataclasses.dataclass(frozen=True)
class SpecStudy:
    """The study of a spec whose models and data are open, and what its merge says of itself."""

    spec: RunSpec
    study: Study
    models: OpenModels
    data: Mapping[str, TaskData]
    opening: float = 0.0

    def analysis(self, *, attribution: bool = True) -> Rehearsed:
        """What the analysis takes."""

        def job(short: Shortened, writer: RunWriter) -> None:
            describe(writer, short.study, synthetic=True)
            self._merge(short, writer)
            phases = Phases(writer, short.study, Reporter())
            run_phases(writer, phases.analysis(attribution=attribution))

        rehearsal, passes = rehearsed(self.study, self.models, job), 0.0
        seconds = self.opening + reading_prompts(self.spec, self.models, self.data)
        if self.spec.merge is not None and self._has_stand_in:
            entry, settings = self._method
            chain = self.study.pool.chain
            passes = _THERE_AND_BACK * model_runs(entry, settings, self.data, self.models)
            work = work_of(entry, settings, len(self.study.tasks), chain, self.models)
            seconds += seconds_of_work(work, chain, self.models)
        size = self._model_bytes if self.spec.merge is not None else 0
        resident = rehearsal.resident + unmerged_bytes(self.study)
        return dataclasses.replace(rehearsal, resident=resident, opening=seconds, passes=passes, models=size)

    def calibration(self, request: CalibrationRequest) -> Rehearsed:
        """What a calibration of the analyzed run takes; errors as for `analysis`, or of the request."""
        variants = 1

        def before(short: Shortened, writer: RunWriter) -> None:
            self._merge(short, writer)
            _measure(short, writer)

        def job(short: Shortened, writer: RunWriter) -> None:
            nonlocal variants
            plan = plan_calibration(request, open_run(writer.folder), self.spec, short.study)
            variants = len(plan.variants)
            calibration(plan, attribution=request.attribution)(short, writer)

        rounds = rounds_of(calibrator_of(request, self.spec.calibration))
        rehearsal = rehearsed(self.study, self.models, job, before=before, is_trained=rounds > 0)
        return dataclasses.replace(rehearsal, rounds=rounds, models=variants * self._model_bytes)

    @property
    def _model_bytes(self) -> int:
        return sum(header.nbytes for header in self.models.own_form.headers.values())

    def _merge(self, short: Shortened, writer: RunWriter) -> None:
        """Merge all experts; in the place of a method that nobody waits for stands an average."""
        if self.spec.merge is None or "merged" in short.study.pool:
            return
        merge = merge_called("average") if self._has_stand_in else self._method
        if self._has_stand_in:
            works = {task: functools.partial(_pass, short.study, task) for task in short.study.tasks}
            run_phases(writer, [Phase(f"{PASSES}:{task}", work, short.study) for task, work in works.items()])
        count, full = max(short.size.samples), self.study
        tasks = {
            task: first_samples(data, count, full.pool, short.size.batch) for task, data in full.tasks.items()
        }
        study = dataclasses.replace(short.study, tasks=tasks)

        def save() -> None:
            with writer.file(MERGED_FILE) as path:
                save_merge(short.models, merge, path, study, Reporter())

        run_phases(writer, [Phase("merge", save)])
        short.study.pool.add("merged", open_checkpoint(writer.folder / MERGED_FILE))

    @functools.cached_property
    def _method(self) -> Merge:
        assert self.spec.merge is not None
        return merge_of(self.spec, self.spec.merge.method, self.spec.merge.parameters)

    @functools.cached_property
    def _has_stand_in(self) -> bool:
        """Whether the method runs whole models as often as it likes, or computes for long on matrices alone."""
        entry, settings = self._method
        chain = self.study.pool.chain
        work = work_of(entry, settings, len(self.study.tasks), chain, self.models)
        return bool(entry.reads == "samples" or work * min(1, 4 / len(chain.blocks)) > _WAITED_FOR)


def reading_prompts(spec: RunSpec, models: OpenModels, data: Mapping[str, TaskData]) -> float:
    """Seconds until heads are made of all prompts, by those of a few."""
    prompts = [
        (classes_of(task, entry, data[task].class_names), entry.templates)
        for task, entry in spec.heads.items()
        if isinstance(entry, TextHead)
    ]
    if not prompts or models.base is None:
        return 0.0
    names, templates = prompts[0]
    tower, few = models.architecture.text_tower(models.base), names[:_PROMPTS]
    started = time.perf_counter()
    text_head(tower, few, templates[:1])
    per_prompt = (time.perf_counter() - started) / len(few)
    return per_prompt * sum(len(classes) * len(texts) for classes, texts in prompts)


_PROMPTS = 8
"""That are read to know how long all of them take: a small batch."""


def _pass(study: Study, task: str) -> None:
    final_features(study.pool, expert_of(task), task, study.tasks[task].diagnosis, study.settings.pool)


def _measure(short: Shortened, writer: RunWriter) -> None:
    """The part of an analysis that a calibration builds on."""
    describe(writer, short.study, synthetic=True)
    phases = Phases(writer, short.study, Reporter())
    phases.digest_models(short.study.pool.names)
    run_phases(writer, phases.measuring((*short.study.variants, "expert")))


def rehearsed_calibration(
    opened: OpenCalibration,
    choose: Choice | None = None,
    *,
    attribution: bool = True,
    control: bool = False,
    opening: float = 0.0,
) -> Rehearsed:
    """What a calibration of a finished run takes."""
    plan, study, models = opened.plan, opened.study, opened.models
    rounds, last = rounds_of(plan.calibrator), max(plan.sites, default=0)
    job = calibration(plan, attribution=attribution)
    rehearsal = rehearsed(study, models, job, before=_measure, is_trained=rounds > 0)
    nbytes = sum(header.nbytes for header in models.own_form.headers.values())
    rehearsal = dataclasses.replace(
        rehearsal,
        rounds=rounds,
        waiting=len(study.tasks) * plan.calibrator.waiting_bytes(study.pool, plan.sites),
        models=len(plan.variants) * nbytes,
        blocks=min(last - 1, len(study.pool.chain.blocks)) if last else 0,
    )
    # Before all else the models are hashed once more, as the analysis did.
    hashing = opened.manifest.phases.get("digests")
    seconds = opening + (hashing.seconds if hashing is not None else 0.0)
    once = rehearsal.phase_seconds("calibrate", shares_of(study))
    if control:
        seconds += once
    if choose is not None:
        # A choice goes its own way on every study; it says itself how many calibrations it makes, in those by FeatCal.
        flags = {"has_base": study.has_base, "has_views": study.is_told_views}
        _, number = choose.outlook(plan.calibrator, plan.counts, **flags)
        seconds += once * (number / plan.calibrator.effort - 1)
    return dataclasses.replace(rehearsal, opening=seconds)


def calibration(plan: CalibrationPlan, *, attribution: bool) -> Job:
    """A calibration in a run that is measured; the plan may be one for the whole study."""

    def job(short: Shortened, writer: RunWriter) -> None:
        cut = short_plan(plan, short)
        opened = OpenCalibration(writer.folder, writer.manifest, short.study, short.models, cut)
        carry_out(writer, opened, Reporter(), attribution=attribution)

    return job


def short_plan(plan: CalibrationPlan, short: Shortened) -> CalibrationPlan:
    """The plan for a study cut short: in every layer that is left, the sites that the plan has in any layer."""
    planned = {site for sites in plan.sites.values() for site in sites}
    layers, calibrator = short.study.pool.chain.layers, plan.calibrator
    named = {layer.index: [site.name for site in layer.sites if site.name in planned] for layer in layers}
    is_chosen = plan.shrink.get("asked") == "auto"  # what that takes, the choice tells
    if calibrator.repeats:
        calibrator = calibrator.changed(**{calibrator.repeats: min(short.size.rounds, rounds_of(calibrator))})
    return dataclasses.replace(
        plan,
        calibrator=calibrator,
        shrink={} if is_chosen else plan.shrink,
        sites={index: sites for index, sites in named.items() if sites},
        boundaries=calibrator.boundaries(len(layers)),
        samples=short.study.calibration_sets,
    )


def rounds_of(calibrator: Calibrator) -> int:
    """How often a calibrator that is trained goes through a batch; 0 where it doesn't, or doesn't say."""
    return int(calibrator.get_params()[calibrator.repeats]) if calibrator.repeats else 0


def model_runs(
    entry: MergeMethod, settings: Mapping[str, Any], data: Mapping[str, TaskData], models: OpenModels
) -> int:
    """How often a model runs on one sample, there and back, as the method says of itself; 0 where it runs none."""
    if entry.reads_moments:
        passes = 2 if entry.reads == "prefix" else 1
        return passes * sum(task.calibration.num_read for task in data.values())
    if not entry.scores:
        return 0
    lm = models.architecture.lm
    rows = 1 if lm is None else next(iter(models.sources.values())).headers[lm.key].shape[0]
    return sum(
        entry.runs(settings, len(task.calibration), len(task.class_names or task.answers()) or rows)
        for task in data.values()
    )


def merge_text(entry: MergeMethod, num_tasks: int, models: OpenModels, waiting: int) -> str:
    """How often the files are read, and what is in memory at a time, `waiting` bytes of features among it."""
    headers = next(iter(models.sources.values())).headers
    largest = max(torch.Size(header.shape).numel() for header in headers.values())
    # In float32 and at a time: the base's, each expert's, the result, and one to compute with.
    needed = 4 * (num_tasks + 3) * min(largest, PIECE if entry.reads == "entry" else largest)
    if entry.reads_moments:
        # In float64, once for all sites that read the same.
        widths = [
            {read: columns for read, (_, columns) in layer}.values()
            for layer in _matrices(models.architecture.chain, models)
        ]
        needed += 8 * num_tasks * max(sum(width * width for width in layer) for layer in widths) + waiting
    needed += 4 * entry.held(num_tasks) * sum(torch.Size(header.shape).numel() for header in headers.values())
    passes = entry.passes + entry.reads_moments  # which runs the experts first
    is_known = entry.held(1) > 0 or entry.reads not in ("model", "samples")
    times = "once" if passes == 1 else f"{passes} times"
    return f"every file is read {times}, with {'' if is_known else 'at least '}{size_text(needed)} in memory"


def work_of(
    entry: MergeMethod, settings: Mapping[str, Any], num_tasks: int, chain: LayerChain, models: OpenModels
) -> float:
    """Operations of a method on all matrices of a chain, beyond a few per entry, as it says of itself."""
    return sum(
        entry.work(settings, num_tasks, *shape) for layer in _matrices(chain, models) for _, shape in layer
    )


def seconds_of_work(operations: float, chain: LayerChain, models: OpenModels) -> float:
    """Seconds of so many operations on matrices as large as the chain's, by one thread, as merges compute."""
    rows, columns = max((shape for layer in _matrices(chain, models) for _, shape in layer), default=(1, 1))
    matrix = torch.ones(rows, columns)
    with computing_with(1):
        matrix @ matrix[: min(64, rows)].mT
        started = time.perf_counter()
        matrix @ matrix[: min(64, rows)].mT
        rate = 2 * rows * columns * min(64, rows) / (time.perf_counter() - started)
    return operations / rate


def _matrices(chain: LayerChain, models: OpenModels) -> list[list[tuple[str, tuple[int, int]]]]:
    """By layer what each linear module reads, and the shape of its matrix."""
    headers = next(iter(models.sources.values())).headers
    matrices = []
    for layer in chain.layers:
        sites = [site for site in layer.sites if site.kind == "linear"]
        slots = [(site.input, layer.parameters.get(f"{site.name}.weight")) for site in sites]
        matrices.append([(read, slot.shape(headers[slot.key].shape)) for read, slot in slots if slot])
    return matrices  # type: ignore[return-value]
