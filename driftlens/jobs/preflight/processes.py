"""What every one of several processes will take, from a rehearsal by one and from how a `Team` divides the work."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from driftlens.base.devices import number_of, synchronize
from driftlens.base.division import balanced, shared
from driftlens.base.errors import RunError, SpecError
from driftlens.base.files import write_json_atomic
from driftlens.base.threads import computing_with, some_layer
from driftlens.checkpoints.sources import TensorHeader
from driftlens.engine.sites import select_sites
from driftlens.jobs.calibrate.plan import calibrator_of
from driftlens.jobs.preflight.jobs import SpecStudy, rounds_of
from driftlens.jobs.preflight.rehearsal import Rehearsed, duration_text, features_bytes, shares_of, size_text
from driftlens.jobs.preflight.rehearsal import Share as TaskShare
from driftlens.linalg.gram import held_entries
from driftlens.models.chain import LayerChain
from driftlens.runs.status import as_declared
from driftlens.spec.requests import CalibrationRequest

_ROWS, _WIDTH = 256, 768
_SECONDS = 1.0
_BYTES = 2**26


@dataclass(frozen=True)
class Rates:
    """What a process keeps of its speed beside others, and what sums over processes take.

    `one` is the share of its speed with `threads` that a process has with one, alone on the machine; `crowded` that of
    it which it keeps while every core has one like it. `wire`, in bytes per second, is 0 where nobody measured it;
    `latency` is of the smallest sum, and `start` until a new process has imported what it needs, in seconds.
    """

    device: str
    cores: int
    threads: int
    one: float = 1.0
    crowded: float = 1.0
    wire: float = 0.0
    latency: float = 0.0
    start: float = 0.0

    def pace(self, processes: int) -> float:
        """Share of its speed alone that each of some processes on one machine has; several have one thread each."""
        if processes == 1 or not self.device.startswith("cpu"):
            return 1.0
        busy = min(processes, self.cores)
        # Memory is shared little by little: between one process and one on every core the loss is taken as even.
        share = 1 - (1 - self.crowded) * (busy - 1) / max(1, self.cores - 1)
        return self.one * share * min(1.0, self.cores / processes)

    def lines(self) -> dict[str, str]:
        """The same for a person, one line each."""
        return {
            "processes": f"one thread does {100 * self.one:.0f} % of {self.threads}, "
            f"{100 * self.crowded:.0f} % of that with one process per core",
            "wire": f"{self.wire / 1e9:.3g} GB/s, {self.latency * 1e3:.2g} ms at least",
            "start": f"{self.start:.1f} s until a process is there",
        }


def measured_rates(device: torch.device) -> Rates | None:
    """What `doctor --measure` found for this device on this machine, or None; older files say more than is read."""
    try:
        rates = as_declared(Rates, rates_file(device).read_bytes())
    except (OSError, ValueError):
        return None
    return rates if rates.cores == cores() else None


def measure(device: torch.device, tell: Callable[[str], None] = lambda text: None) -> Rates:
    """Rates of this machine, in a minute at most; they are kept for later.

    One process computes a layer alone, then one on every core at once, as processes that share a machine also share its
    memory. How fast one process is by itself is found out by every rehearsal anew.
    """
    tell("processes")
    threads, file = torch.get_num_threads(), rates_file(device)
    rates = Rates(str(device), cores(), threads, **_together(device, threads))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(file, dataclasses.asdict(rates))
    return rates


def rates_file(device: torch.device) -> pathlib.Path:
    """Where rates are kept."""
    import platformdirs

    return platformdirs.user_cache_path("driftlens") / f"rates-{device.type}.json"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rate(device: torch.device, seconds: float) -> float:
    """How often a second a layer is computed that is as wide as usual ones, and larger than the caches of a core."""
    work = some_layer(_ROWS, _WIDTH, device)
    work()  # the first call also loads libraries
    done, started, passed = 0, time.perf_counter(), 0.0
    while passed < seconds:
        work()
        synchronize(device)
        done, passed = done + 1, time.perf_counter() - started
    return done / passed


def _together(device: torch.device, threads: int) -> dict[str, float]:
    """`one`, `crowded`, `wire`, `latency` and `start`, measured by a process for every core (two at least)."""
    from torch.multiprocessing.spawn import spawn

    number = max(2, cores())
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        try:
            spawn(_member, (number, folder, str(device), threads), nprocs=number)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise RunError(
                f"{number} processes that measure each other could not be started or ended early: {error}",
                hint="Sums over processes need `gloo` and a loopback interface.",
            ) from error
        rates: dict[str, float] = json.loads(pathlib.Path(folder, "found.json").read_text(encoding="utf-8"))
    return rates | {"start": rates["start"] - started}


def _member(rank: int, number: int, folder: str, name: str, threads: int) -> None:
    """What each of some processes does: rank 0 works alone while the others wait, then all work at once."""
    import torch.distributed as distributed
    import transformers.models.llama.modeling_llama  # noqa: F401  what a process of ours waits for most

    ready, device = time.time(), torch.device(name)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=number)
    try:
        torch.set_num_threads(1)
        distributed.barrier()
        many = alone = 0.0
        if rank == 0:
            with computing_with(threads):
                many = _rate(device, _SECONDS)
            alone = _rate(device, _SECONDS)
        distributed.barrier()
        rate = torch.tensor([_rate(device, 2 * _SECONDS)], dtype=torch.float64)
        distributed.all_reduce(rate)
        tiny, large = torch.zeros(1), torch.zeros(_BYTES // 8, dtype=torch.float64)
        latency, heavy = (
            _seconds_of(functools.partial(distributed.reduce, numbers, dst=0)) for numbers in (tiny, large)
        )
        if rank == 0:
            rates = {
                "one": alone / many,
                "crowded": min(1.0, float(rate) / number / alone * max(1.0, number / cores())),
                "wire": _BYTES / heavy,
                "latency": latency,
                "start": ready,
            }
            pathlib.Path(folder, "found.json").write_text(json.dumps(rates), encoding="utf-8")
    finally:
        distributed.destroy_process_group()


def _seconds_of(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


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
    for name, count in (("processes", number), ("per_machine", per_machine)):
        if count is not None and not 1 <= count <= MOST:
            raise SpecError(f"{name} is {count}, expected 1 to {MOST}")
    device = opened.study.pool.device
    measured = measured_rates(device)
    rates = measured or Rates(str(device), cores(), torch.get_num_threads())
    places = rates.cores if device.type == "cpu" else number_of(device)
    together = min(number, per_machine or max(1, places))
    shares = {"analyze": _share(analysis, number, together, rates, solves=False)}
    request = CalibrationRequest(name="preflight", attribution=False)
    calibrator = calibrator_of(request, opened.spec.calibration)
    if all(task.calibration for task in opened.study.tasks.values()) and not rounds_of(calibrator):
        shares["calibrate"] = _share(opened.calibration(request), number, together, rates, solves=True)
    return Processes(number, together, measured is not None, shares)


def _share(whole: Rehearsed, number: int, per_machine: int, rates: Rates, *, solves: bool) -> Share:
    """The busiest process's, of a job rehearsed by one."""
    study = whole.study
    batches = {
        task: math.ceil(len(data.diagnosis) / data.diagnosis.batch_size) for task, data in study.tasks.items()
    }
    part, tasks = _busiest(batches, number)
    shares = [dataclasses.astuple(share) for share in shares_of(study).values()]
    even = TaskShare(*np.mean(shares, axis=0)) * (part * len(shares) / tasks)
    seconds = whole.seconds_of({f"{task}": even for task in range(tasks)})
    # Of tables and features it sends about what its part of the run directory holds of them.
    rows = 0 if number == 1 else int(part * (whole.cost.disk_bytes - whole.models))
    wire, sending = 0, 0.0
    if solves:
        sites = select_sites(study.pool.chain)
        groups = solved_groups(study.pool.chain, study.pool.source(study.pool.names[0]).headers, sites)
        # Solving is what is left of the walk that calibrates without a sample.
        alone = whole.phase_seconds("calibrate", {"": TaskShare(0, 0, 0)})
        seconds -= alone * (1 - solve_share(groups, number))
        wire, received, messages = wire_bytes(groups, batches, number)
        if number > 1:
            sending = max(wire, received) / (rates.wire or _WIRE) + messages * rates.latency
    start = rates.start * max(1.0, per_machine / rates.cores)  # one core imports for one
    seconds = whole.opening + start + sending + seconds / rates.pace(per_machine)
    return Share(seconds, whole.resident + features_bytes(study, part, whole.waiting), wire + rows)


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
        groups.append([Group(width, tuple(sizes)) for (_, width), sizes in outs.items()])
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
    common = moments * 2 * (number - 1) / number + sum(group.weights for group in every) * _FLOAT32
    runs = [[rank for rank, *_ in parts] for parts in shared(batches, number).values()]
    sends = Counter(rank for ranks in runs for rank in ranks[1:])
    gets = Counter(rank for ranks in runs for rank in ranks[:1] * (len(ranks) - 1))
    sent, received = (int(common + moments * max(times.values(), default=0)) for times in (sends, gets))
    return sent, received, len(every) * (1 + max(gets.values(), default=0)) + number * len(groups)
