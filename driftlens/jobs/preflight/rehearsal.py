"""What a job will take, rehearsed: the job itself runs on the study cut short, a few times, and is multiplied.

Whatever the job does is measured with it, so that nothing here has to know how the engine works. The first run is for
imports and caches, and doesn't count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from driftlens.base.files import temporary_folder
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import input_bytes
from driftlens.engine.walk import waiting_bytes
from driftlens.jobs.preflight.shortened import Shortened, Size, shortened
from driftlens.jobs.study.opening import OpenModels
from driftlens.jobs.study.study import Study, TaskSamples
from driftlens.runs.writer import RunWriter, peak_rss_bytes


@dataclass(frozen=True)
class Cost:
    """About what a job will take: at its peak in memory, added to the run directory, wall-clock time here and now."""

    memory_bytes: int
    disk_bytes: int
    seconds: float

    def text(self) -> str:
        """The same in words."""
        memory, disk = size_text(self.memory_bytes), size_text(self.disk_bytes)
        return f"about {memory} of memory, {disk} on disk, {duration_text(self.seconds)}"


def size_text(count: int) -> str:
    """A number of bytes as a person reads it."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.2g} {unit}" if size < 10 else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2g} TB" if size < 10 else f"{size:.0f} TB"


def duration_text(seconds: float) -> str:
    """A time as a person reads it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


QUADRATIC = "explain"
"""What carries a vector of every layer before through each one behind, so that it grows with the square of the depth;
all else that a job does is done once for each layer."""


@dataclass(frozen=True)
class Extent:
    """How much there is to do: blocks between stem and head, samples of all tasks, tasks, and rounds of training."""

    blocks: float
    samples: float
    tasks: float = 1
    rounds: float = 0


@dataclass(frozen=True)
class Measured:
    """What so much took: seconds, or bytes."""

    extent: Extent
    amount: float


def extrapolated(what: str, measured: Sequence[Measured], extent: Extent) -> float:
    """What this extent takes, from what others took.

    It is a sum of products with factors that fit best and are not negative: more work gives nothing back. Relative
    errors count, and of what was measured more than once the least: noise only adds.
    """
    from scipy.optimize import nnls

    least: dict[Extent, float] = {}
    for run in measured:
        least[run.extent] = min(run.amount, least.get(run.extent, math.inf))
    terms = dict(_varying(what, [*least]))
    # Of what nobody had any, nothing is known: where no test sample has a target, none is scored.
    terms = {name: product for name, product in terms.items() if any(map(product, least))}
    rows = np.array([[product(other) for product in terms.values()] for other in least])
    amounts = np.array([max(amount, _SHORTEST) for amount in least.values()])
    scale = rows.max(axis=0)
    factors, _ = nnls(rows / scale / amounts[:, None], np.ones(len(rows)))
    return float(np.array([product(extent) for product in terms.values()]) @ (factors / scale))


_SHORTEST = 1e-6
"""Of an amount that others are compared with; a phase that does nothing takes as long."""

_PRODUCTS = {
    "": lambda extent: 1.0,
    "blocks": lambda extent: extent.blocks,
    "samples": lambda extent: extent.samples,
    "blocks samples": lambda extent: extent.blocks * extent.samples,
    "blocks tasks": lambda extent: extent.blocks * extent.tasks,
    "rounds": lambda extent: extent.rounds * extent.tasks,
    "rounds blocks": lambda extent: extent.rounds * extent.tasks * extent.blocks,
}
"""Done once; by block (weights are read, sites solved for); by sample (stem and head); by both (the walk); by block and
task (an expert is read); by round and task."""


def _varying(what: str, extents: Sequence[Extent]) -> Mapping[str, Any]:
    """The products that can be told apart: whatever didn't vary is part of the others."""
    terms = dict(_PRODUCTS)
    if len({extent.tasks for extent in extents}) > 1:
        del terms[
            "samples"
        ]  # of several tasks together: stem and head hardly count beside what there is by task
    else:
        del terms["blocks tasks"]
    if len({extent.rounds for extent in extents}) == 1:
        del terms["rounds"], terms["rounds blocks"]
    if what == QUADRATIC:
        terms["blocks^2 samples"] = lambda extent: extent.blocks**2 * extent.samples
    return terms


BY_TASK = ("analyze", "evaluate", "explain")
"""Phases that are done for one task after the other."""
PASSES = "passes"
"""A phase of forward passes through one model, for what is too long to be rehearsed itself."""
_PATIENCE = 4.0
"""Seconds that all short studies should take together: if they take less, they are repeated; if the first one, with
imports, takes twice as long, the others are hardly longer."""
_FEW = 8
"""Samples that are read to know how large one is, and that any calibration can be chosen by."""

_FIRST = ":0"
"""How phases of the first task end, in which a few samples are also computed in float64: once in a job, so that it
doesn't count."""

Job = Callable[[Shortened, RunWriter], None]
"""Does a job on a short study, in a run directory of its own."""


@dataclass(frozen=True)
class Share:
    """How many samples of a task a process has.

    They count by their bytes against those of the task that was rehearsed: texts differ in length.
    """

    diagnosis: float
    test: float
    calibration: float

    def __mul__(self, part: float) -> Share:
        return Share(self.diagnosis * part, self.test * part, self.calibration * part)


@dataclass(frozen=True)
class Rehearsed:
    """What short studies took, by phase, in bytes of the run directory and in memory, and what the whole comes to.

    Beside that: bytes of the models that the job writes, seconds until it can begin, the `blocks` that a calibration
    walks, the rounds of what is trained, the passes of samples through one model, and bytes that wait beside features.
    """

    study: Study
    seconds: Mapping[str, Sequence[Measured]]
    stored: Sequence[Measured]
    resident: int
    models: int = 0
    opening: float = 0.0
    blocks: int = 0
    rounds: int = 0
    passes: float = 0.0
    waiting: int = 0

    @property
    def cost(self) -> Cost:
        """Of the whole job in one process."""
        shares = shares_of(self.study)
        diagnosed = sum(share.diagnosis for share in shares.values())
        disk = extrapolated("stored", self.stored, Extent(len(self.study.pool.chain.blocks), diagnosed))
        memory = self.resident + features_bytes(self.study, beside=self.waiting)
        disk += max(0, self.waiting - self.study.settings.feature_budget)
        return Cost(memory, int(disk) + self.models, self.opening + self.seconds_of(shares))

    def seconds_of(self, shares: Mapping[str, Share]) -> float:
        """Of all phases, of these shares of the tasks."""
        return sum(self.phase_seconds(phase, shares) for phase in self.seconds)

    def phase_seconds(self, phase: str, shares: Mapping[str, Share]) -> float:
        """Of one phase, over all these tasks."""
        measured = self.seconds[phase]
        return sum(extrapolated(phase, measured, extent) for extent in self._extents(phase, shares))

    def _extents(self, phase: str, shares: Mapping[str, Share]) -> Iterator[Extent]:
        blocks = len(self.study.pool.chain.blocks)
        if phase == PASSES:
            yield Extent(blocks, self.passes)
        elif phase not in BY_TASK:
            count = sum(share.calibration for share in shares.values())
            yield Extent(self.blocks or blocks, count, len(shares), self.rounds)
        else:
            jacobian = self.study.settings.jacobian
            followed = math.inf if jacobian is None or phase != "explain" else jacobian.samples
            for share in shares.values():
                count = share.test if phase == "evaluate" else share.diagnosis
                yield Extent(blocks, min(followed, count))


def rehearsed(
    study: Study, models: OpenModels, job: Job, *, before: Job | None = None, is_trained: bool = False
) -> Rehearsed:
    """Do a job on studies cut short until the whole one can be told from them; nothing is left behind."""
    first = short_run(study, models, Size(1, (_FEW,), 2), job, before)
    is_quick = first.took < 2 * _PATIENCE
    sizes = _sizes(study, is_quick=is_quick, is_trained=is_trained, is_joint=before is not None)
    runs = [short_run(study, models, size, job, before) for size in sizes]
    if sum(run.took for run in runs) < _PATIENCE:
        runs += [short_run(study, models, size, job, before) for size in sizes]
    seconds = defaultdict[str, list[Measured]](list)
    for kind, measured in itertools.chain.from_iterable(run.seconds for run in runs):
        seconds[kind].append(measured)
    return Rehearsed(study, seconds, [run.stored for run in runs], max(run.resident for run in runs))


@dataclass(frozen=True)
class ShortRun:
    """What a job took on one short study."""

    seconds: Sequence[tuple[str, Measured]]
    stored: Measured
    resident: int
    took: float


def short_run(study: Study, models: OpenModels, size: Size, job: Job, before: Job | None = None) -> ShortRun:
    """Do a job once on a study cut to a size; arguments and errors as for `rehearsed`."""
    started, short = time.perf_counter(), shortened(study, models, size)
    log = logging.getLogger("driftlens")
    level = log.level
    diagnosed = sum(len(task.diagnosis) for task in short.study.tasks.values())
    text = f"name: {study.name}\n"
    with (
        temporary_folder() as folder,
        RunWriter.create(folder / "run", spec_yaml=text, spec_digest="", name=study.name) as writer,
    ):
        if before is not None:
            before(short, writer)
        earlier, stored = {*writer.manifest.phases}, _stored_bytes(writer.folder)
        _restart_peak()
        log.setLevel(max(level, logging.WARNING))  # a rehearsal tells nobody how it computes
        try:
            job(short, writer)
        finally:
            log.setLevel(level)
        return ShortRun(
            [
                _kind_and_measured(short, name, phase.seconds)
                for name, phase in writer.manifest.phases.items()
                if name not in earlier and not name.endswith(_FIRST)
            ],
            Measured(Extent(short.blocks, diagnosed), _stored_bytes(writer.folder) - stored),
            _peak(),
            time.perf_counter() - started,
        )


def _sizes(study: Study, *, is_quick: bool, is_trained: bool, is_joint: bool) -> list[Size]:
    """Studies of which everything that multiplies is varied: depth, samples of a task and of all, tasks, rounds."""
    batch, deep = (next(iter(study.tasks.values())).diagnosis.batch_size, 4) if is_quick else (1, 3)
    # Of the tasks that count, one whole batch at least, as that is what the library runs as well.
    first = _FEW if is_joint else 1
    small, large = max(first, batch), 2 * max(first, batch)
    sizes = [
        Size(1, (first, large, small), batch),
        Size(2, (first, small, small) if is_joint else (first, small), batch),
        Size(deep, (first, large, small), batch),
    ]
    if is_joint:
        sizes += [Size(2, (first, small), batch)]
    if is_trained:
        sizes += [dataclasses.replace(size, rounds=4 * size.rounds) for size in (sizes[0], sizes[2])]
    return sizes


def _kind_and_measured(short: Shortened, phase: str, seconds: float) -> tuple[str, Measured]:
    """What a phase does, whatever the names of task and calibration, and how long it took for how much of it."""
    parts, tasks = phase.split(":"), short.study.tasks
    kind = parts[0] if parts[0] != "calibrate" or len(parts) < 3 else parts[2]
    if kind in BY_TASK or kind == PASSES:
        extent = Extent(short.blocks, _samples_of(kind, tasks[parts[-1]], short.study))
    else:
        samples = sum(len(task.calibration or ()) for task in tasks.values())
        extent = Extent(short.blocks, samples, len(tasks), short.size.rounds)
    return kind, Measured(extent, seconds)


def _samples_of(phase: str, task: TaskSamples, study: Study) -> int:
    """How many of a task's samples a phase looks at."""
    if phase == "evaluate":
        return 0 if task.test is None else len(task.test)
    if phase == "explain" and study.settings.jacobian is not None:
        return min(len(task.diagnosis), study.settings.jacobian.samples)
    return len(task.diagnosis)


def shares_of(study: Study) -> dict[str, Share]:
    """All samples of all tasks."""
    sizes = {task: _sample_bytes(data.diagnosis) for task, data in study.tasks.items()}
    first = next(iter(sizes.values()))
    return {
        task: Share(len(data.diagnosis), len(data.test or ()), len(data.calibration or ()))
        * (sizes[task] / first)
        for task, data in study.tasks.items()
    }


def _sample_bytes(samples: SampleSet) -> float:
    """Bytes of a sample's raw inputs, padded as in a batch."""
    count = min(len(samples), samples.batch_size, _FEW)
    return max(1, input_bytes(samples.load(range(count)))) / count


def features_bytes(study: Study, part: float = 1.0, beside: int = 0) -> int:
    """Features that wait in memory: all samples' at one boundary, and a batch's at all of them, within the budget.

    `part` of the samples of the largest task, where processes share them; `beside` is what waits with all samples'.
    """
    pool, layers, tasks = study.pool, study.pool.chain.layers, study.tasks.values()
    task, at_hand = next(iter(study.tasks.items()))
    num_read = (samples.num_read for samples in study.calibration_sets.values())
    per_sample = waiting_bytes(pool, pool.expert(task), at_hand.diagnosis.load([0]), 1 + len(study.variants))
    largest = max(*(len(data.diagnosis) for data in tasks), *(num_read if study.has_views else ()), 0)
    count = math.ceil(part * largest)
    at_once = per_sample * count + beside, per_sample * min(count, at_hand.diagnosis.batch_size) * len(layers)
    return sum(min(study.settings.feature_budget, number) for number in at_once)


def _stored_bytes(folder: Path) -> int:
    """Of a run directory, but for models, whose size is known beforehand."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".safetensors")
    return sum(file.stat().st_size for file in files)


_PEAK, _RESTART = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _restart_peak() -> None:
    """Forget the largest resident memory so far, where the system can do that."""
    with contextlib.suppress(OSError):
        _RESTART.write_text("5", encoding="ascii")


def _peak() -> int:
    """Largest resident memory since then, or of the whole process."""
    with contextlib.suppress(OSError):
        for line in _PEAK.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return peak_rss_bytes() or 0
