"""What every one of several processes will take, from the rates of one and from how a `Team` divides the work."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from driftlens.base.division import balanced, shared
from driftlens.base.errors import SpecError
from driftlens.data.samples import SampleSet
from driftlens.jobs.preflight.costs import (
    OUTPUT_ROW,
    SAMPLE_ROW,
    Effort,
    TaskLoad,
    Workload,
    duration_text,
    effort_of,
    memory_bytes,
    resident_bytes,
    seconds_per_sample,
    size_text,
    width_of,
)
from driftlens.jobs.preflight.rates import Rates, measured_rates, rates_here
from driftlens.jobs.preflight.solving import Group, Solving, look_effort

MOST = 65_536
"""Processes: more than anybody has, and few enough to be laid out one by one."""
_FLOAT64 = 8
_WIRE = 1e9
"""Bytes per second between processes where nobody has measured them: a plain network's."""


@dataclass(frozen=True)
class Share:
    """What one process takes, the busiest of all.

    Attributes:
        seconds: wall-clock time.
        memory_bytes: peak resident memory.
        wire_bytes: what it sends to others.
    """

    seconds: float
    memory_bytes: int
    wire_bytes: int

    def text(self) -> str:
        """The same in words."""
        wire = f"{size_text(self.wire_bytes)} on the wire" if self.wire_bytes else "nothing on the wire"
        return f"{duration_text(self.seconds)}, {size_text(self.memory_bytes)} of memory, {wire}"


@dataclass(frozen=True)
class Processes:
    """The plan of a run by several processes.

    Attributes:
        number: of all processes.
        per_machine: how many of them share a machine like this one.
        measured: whether rates are those of `doctor --measure`, or of a moment.
        shares: "analyze" and "calibrate" -> what the busiest process takes.
    """

    number: int
    per_machine: int
    measured: bool
    shares: Mapping[str, Share]

    def text(self) -> str:
        """The same in lines."""
        many = (
            "process"
            if self.number == 1
            else f"of {self.number} processes, {self.per_machine} on a machine like this"
        )
        lines = [f"each {many}:" if self.number > 1 else "one process:"]
        width = max(map(len, self.shares), default=0)
        lines += [f"  {name:<{width}}  {share.text()}" for name, share in self.shares.items()]
        if not self.measured:
            lines.append(
                "  from a moment's measurement; `driftlens doctor --measure` takes a minute and knows better"
            )
        return "\n".join(lines)


def plan_processes(
    number: int,
    per_machine: int | None,
    work: Workload,
    sample: SampleSet,
    device: torch.device,
    *,
    walk: Solving | None,
    variants: int,
    effort: float = 1.0,
    reads: int = 0,
) -> Processes:
    """The busiest process's share of an analysis, and of a calibration that solves as `walk` says.

    Args:
        number: of processes.
        per_machine: how many share a machine like this one; None means one for every core or GPU.
        work: the analysis.
        sample: of one task, to time its reading.
        device: where each process computes.
        walk: FeatCal's walk; None where the calibrator walks through no samples, or none is possible.
        variants: that a calibration adds and measures.
        effort: of the calibrator against FeatCal.
        reads: bytes of weights that an analysis reads.

    Raises:
        SpecError: one of both is no number of processes.
    """
    for name, given in (("processes", number), ("per_machine", per_machine)):
        if given is not None and not 1 <= given <= MOST:
            raise SpecError(f"{name} is {given}, expected 1 to {MOST}")
    rates, per_sample = rates_here(device, width_of(work.layers)), seconds_per_sample(sample)
    here = torch.cuda.device_count() if device.type == "cuda" else rates.cores
    crew = _Crew(number, min(number, per_machine or max(1, here)), rates, per_sample, reads)
    shares = {"analyze": crew.analysis(work)}
    if walk is not None:
        added = dataclasses.replace(work, variants=variants, explained=variants, merged_bytes=0)
        shares["calibrate"] = crew.calibration(walk, added, effort)
    return Processes(number, crew.per_machine, measured_rates(device) is not None, shares)


@dataclass(frozen=True)
class _Crew:
    """Processes, how many of them share a machine, and what they can do; `reads` as for `plan_processes`."""

    number: int
    per_machine: int
    rates: Rates
    per_sample: float
    reads: int

    @property
    def start(self) -> float:
        """Seconds until the processes of a machine have imported what they need; one core imports for one."""
        return self.rates.start * max(1.0, self.per_machine / self.rates.cores)

    def analysis(self, work: Workload) -> Share:
        share, seconds = self._analysis(work)
        memory = resident_bytes() + memory_bytes(_with_share(work, share))
        return Share(self.start + seconds, memory, _row_bytes(work, share, self.number))

    def calibration(self, walk: Solving, added: Workload, effort: float) -> Share:
        """Of the walk, and of the analysis of what it adds."""
        measured, seconds = self._analysis(added)
        batches = {task: math.ceil(count / added.batch_size) for task, count in walk.counts.items()}
        share, experts = _busiest(batches, self.number)
        mine = walk.shared * share + walk.solves * solve_share(walk, self.number)
        alone = Effort(reads=walk.reads * (experts + 2)) + look_effort(added, walk.counts)
        seconds += self._seconds(mine * effort + alone)
        sent, received, times = wire_bytes(walk, batches, self.number)
        if self.number > 1:
            seconds += max(sent, received) / (self.rates.wire or _WIRE) + times * self.rates.latency
        memory = resident_bytes() + max(walk.memory(added, share), memory_bytes(_with_share(added, measured)))
        return Share(self.start + seconds, memory, sent + _row_bytes(added, measured, self.number))

    def _analysis(self, work: Workload) -> tuple[float, float]:
        """The busiest process's share of all samples, and its seconds."""
        share, _ = _busiest(_batches(work), self.number)
        return share, self._seconds(effort_of(work) * share + Effort(reads=self.reads))

    def _seconds(self, effort: Effort) -> float:
        return effort.seconds(self.rates, self.per_sample, self.rates.pace(self.per_machine))


def _batches(work: Workload) -> dict[str, int]:
    """Of diagnosis samples, by task; test samples and those that are followed are divided about alike."""
    return {task: math.ceil(load.diagnosis / work.batch_size) for task, load in work.tasks.items()}


def _with_share(work: Workload, share: float) -> Workload:
    total = sum(task.diagnosis for task in work.tasks.values())
    most = max(1, math.ceil(share * total))

    def part(task: TaskLoad) -> TaskLoad:
        return dataclasses.replace(task, diagnosis=min(task.diagnosis, most), test=min(task.test, most))

    return dataclasses.replace(work, tasks={name: part(task) for name, task in work.tasks.items()})


def _row_bytes(work: Workload, share: float, number: int) -> int:
    """What a process sends of tables and features: those of its samples, which the first process writes.

    Where processes share a task, its first one makes the tables, of features behind all layers in float32.
    """
    if number == 1:
        return 0
    rows = sum(task.diagnosis * work.variants for task in work.tasks.values())
    per_row = sum(2 * width + SAMPLE_ROW for width in work.stored_widths) + OUTPUT_ROW
    if any(len(runs) > 1 for runs in shared(_batches(work), number).values()):
        per_row += sum(4 * layer.width + SAMPLE_ROW for layer in work.layers)
    return int(rows * share * per_row)


def solve_share(walk: Solving, number: int) -> float:
    """The share of all solves that lie on the way, where every layer waits for its busiest process."""

    def cost(group: Group) -> float:
        return group.width**3 / 3 + 2 * sum(group.outs) * group.width**2

    total = sum(cost(group) for layer in walk.groups for group in layer)
    waited = 0.0
    for layer in walk.groups:
        waited += balanced([cost(group) for group in layer], number)[1]
    return waited / total if total else 0.0


def wire_bytes(walk: Solving, batches: Mapping[str, int], number: int) -> tuple[int, int, int]:
    """What the busiest process sends and receives while a calibration is solved, and in how many messages.

    Of every group, half a Gram matrix and the cross moments, already folded over its tasks, go into one sum in float64;
    a sum over a ring of n processes makes each send 2 (n - 1) / n of it. Before that, processes that share a task's
    batches send its moments to the first of them. What was solved is sent once in float32.
    """
    if number == 1:
        return 0, 0, 0
    groups = [group for layer in walk.groups for group in layer]
    moments = sum(group.moments for group in groups) * _FLOAT64
    each = moments * 2 * (number - 1) / number + sum(group.weights for group in groups) * 4
    runs = [[rank for rank, *_ in of] for of in shared(batches, number).values()]
    given = Counter(rank for ranks in runs for rank in ranks[1:])
    taken = Counter(rank for ranks in runs for rank in ranks[:1] * (len(ranks) - 1))
    sent, received = (int(each + moments * max(of.values(), default=0)) for of in (given, taken))
    return sent, received, len(groups) * (1 + max(taken.values(), default=0)) + number * len(walk.groups)


def _busiest(batches: Mapping[str, int], number: int) -> tuple[float, int]:
    """The share of all batches that the busiest process has, and of how many tasks one has any at most."""
    load, tasks = Counter[int](), Counter[int]()
    for runs in shared(batches, number).values():
        for rank, first, last in runs:
            load[rank] += last - first
            tasks[rank] += 1
    return max(load.values()) / sum(batches.values()), max(tasks.values())
