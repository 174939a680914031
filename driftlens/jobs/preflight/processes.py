"""What every one of several processes will take, from a rehearsal by one and from how a `Team` divides the work."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftlens.base.division import balanced, shared
from driftlens.base.errors import SpecError
from driftlens.checkpoints.sources import TensorHeader
from driftlens.engine.sites import select_sites
from driftlens.jobs.calibrate.plan import calibrator_of
from driftlens.jobs.preflight.jobs import SpecStudy, rounds_of
from driftlens.jobs.preflight.rates import Rates, cores, measured_rates
from driftlens.jobs.preflight.rehearsal import Rehearsed, duration_text, features_bytes, shares_of, size_text
from driftlens.jobs.preflight.rehearsal import Share as TaskShare
from driftlens.linalg.gram import held_entries
from driftlens.models.chain import LayerChain
from driftlens.spec.requests import CalibrationRequest

MOST = 65_536
"""Processes: more than anybody has, and few enough to be laid out one by one."""
_FLOAT64, _FLOAT32 = 8, 4
_WIRE = 1e9
"""Bytes per second between processes where nobody has measured them: a plain network's."""


@dataclass(frozen=True)
class Share:
    """What one process takes, the busiest of all."""

    seconds: float
    memory_bytes: int
    wire_bytes: int

    def text(self) -> str:
        """The same in words."""
        wire = f"{size_text(self.wire_bytes)} on the wire" if self.wire_bytes else "nothing on the wire"
        return f"about {duration_text(self.seconds)}, {size_text(self.memory_bytes)} of memory, {wire}"


@dataclass(frozen=True)
class Processes:
    """The plan of a run by several processes."""

    number: int
    per_machine: int
    measured: bool
    shares: Mapping[str, Share]

    def text(self) -> str:
        """The same in lines."""
        many = f"of {self.number} processes, {self.per_machine} on a machine like this"
        lines = [f"each {many}:" if self.number > 1 else "one process:"]
        width = max(map(len, self.shares), default=0)
        lines += [f"  {name:<{width}}  {share.text()}" for name, share in self.shares.items()]
        if not self.measured and self.number > 1:
            lines.append(
                "  as if processes took nothing from each other; `driftlens doctor --measure` takes a minute and "
                "knows better"
            )
        return "\n".join(lines)


def plan_processes(
    opened: SpecStudy, analysis: Rehearsed, number: int, per_machine: int | None = None
) -> Processes:
    """The busiest process's share of an analysis, and of the calibration that the spec or the defaults ask for."""
    for name, given in (("processes", number), ("per_machine", per_machine)):
        if given is not None and not 1 <= given <= MOST:
            raise SpecError(f"{name} is {given}, expected 1 to {MOST}")
    device = opened.study.pool.device
    known = measured_rates(device)
    rates = known or Rates(str(device), cores(), torch.get_num_threads())
    here = torch.cuda.device_count() if device.type == "cuda" else rates.cores
    crew = _Crew(number, min(number, per_machine or max(1, here)), rates)
    shares = {"analyze": crew.share(analysis, solves=False)}
    request = CalibrationRequest(name="preflight", attribution=False)
    calibrator = calibrator_of(request, opened.spec.calibration)
    if all(task.calibration for task in opened.study.tasks.values()) and not rounds_of(calibrator):
        shares["calibrate"] = crew.share(opened.calibration(request), solves=True)
    return Processes(number, crew.per_machine, known is not None, shares)


@dataclass(frozen=True)
class _Crew:
    """Processes, how many of them share a machine, and what they take from each other."""

    number: int
    per_machine: int
    rates: Rates

    def share(self, whole: Rehearsed, *, solves: bool) -> Share:
        """The busiest process's, of a job rehearsed by one."""
        study = whole.study
        batches = {
            task: math.ceil(len(at.diagnosis) / at.diagnosis.batch_size) for task, at in study.tasks.items()
        }
        part, tasks = _busiest(batches, self.number)
        every = [dataclasses.astuple(share) for share in shares_of(study).values()]
        even = TaskShare(*np.mean(every, axis=0)) * (part * len(every) / tasks)
        seconds = whole.seconds_of({f"{task}": even for task in range(tasks)})
        # Of tables and features it sends about what its part of the run directory holds of them.
        rows = 0 if self.number == 1 else int(part * (whole.cost.disk_bytes - whole.models))
        wire, sending = 0, 0.0
        if solves:
            sites = select_sites(study.pool.chain)
            groups = solved_groups(study.pool.chain, study.pool.source(study.pool.names[0]).headers, sites)
            # Solving is what is left of the walk that calibrates without a sample.
            alone = whole.phase_seconds("calibrate", {"": TaskShare(0, 0, 0)})
            seconds -= alone * (1 - solve_share(groups, self.number))
            wire, received, messages = wire_bytes(groups, batches, self.number)
            if self.number > 1:
                sending = max(wire, received) / (self.rates.wire or _WIRE) + messages * self.rates.latency
        start = self.rates.start * max(1.0, self.per_machine / self.rates.cores)  # one core imports for one
        seconds = whole.opening + start + sending + seconds / self.rates.pace(self.per_machine)
        return Share(seconds, whole.resident + features_bytes(study, part), wire + rows)


def _busiest(batches: Mapping[str, int], number: int) -> tuple[float, int]:
    """The share of all batches that the busiest process has, and of how many tasks one has any at most."""
    load, tasks = Counter[int](), Counter[int]()
    for runs in shared(batches, number).values():
        for rank, first, last in runs:
            load[rank] += last - first
            tasks[rank] += 1
    return max(load.values()) / sum(batches.values()), max(tasks.values())


@dataclass(frozen=True)
class Group:
    """Linear sites of a layer that read the same `width` numbers, and so have one Gram matrix and one factor."""

    width: int
    outs: tuple[int, ...]

    @property
    def weights(self) -> int:
        """Numbers that are solved for."""
        return sum(self.outs) * self.width

    @property
    def moments(self) -> int:
        """Numbers in half of the Gram matrix and in the cross moments, of one task."""
        return held_entries(self.width) + self.weights

    @property
    def operations(self) -> float:
        """Of a Cholesky factor and two triangular solves."""
        return self.width**3 / 3 + 2 * self.weights * self.width


def solved_groups(
    chain: LayerChain, headers: Mapping[str, TensorHeader], sites: Mapping[int, Collection[str]]
) -> list[list[Group]]:
    """Of every layer up to the last one with chosen sites, in forward order."""
    groups = []
    for layer in chain.layers[: max(sites, default=0)]:
        outs = defaultdict[tuple[str, int], list[int]](list)
        for site in layer.sites:
            if site.kind == "linear" and site.name in sites.get(layer.index, ()):
                slot = layer.parameters[f"{site.name}.weight"]
                out, width = slot.shape(headers[slot.key].shape)
                outs[site.input, width].append(out)
        groups.append([Group(width, tuple(of)) for (_, width), of in outs.items()])
    return groups


def solve_share(groups: Sequence[Sequence[Group]], number: int) -> float:
    """The share of all solves that lie on the way, where every layer waits for its busiest process."""
    total = sum(group.operations for layer in groups for group in layer)
    waited = sum(balanced([group.operations for group in layer], number)[1] for layer in groups)
    return waited / total if total else 0.0


def wire_bytes(
    groups: Sequence[Sequence[Group]], batches: Mapping[str, int], number: int
) -> tuple[int, int, int]:
    """What the busiest process sends and receives while a calibration is solved, and in how many messages.

    Of every group, half a Gram matrix and the cross moments, already folded over its tasks, go into one sum in float64;
    a sum over a ring of n processes makes each send 2 (n - 1) / n of it. Before that, processes that share a task's
    batches send its moments to the first of them. What was solved is sent once in float32.
    """
    if number == 1:
        return 0, 0, 0
    every = [group for layer in groups for group in layer]
    moments = sum(group.moments for group in every) * _FLOAT64
    each = moments * 2 * (number - 1) / number + sum(group.weights for group in every) * _FLOAT32
    runs = [[rank for rank, *_ in of] for of in shared(batches, number).values()]
    given = Counter(rank for ranks in runs for rank in ranks[1:])
    taken = Counter(rank for ranks in runs for rank in ranks[:1] * (len(ranks) - 1))
    sent, received = (int(each + moments * max(of.values(), default=0)) for of in (given, taken))
    return sent, received, len(every) * (1 + max(taken.values(), default=0)) + number * len(groups)
